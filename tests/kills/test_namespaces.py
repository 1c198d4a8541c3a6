"""Machines as namespaces: Ray nodes killed and cut off, with a shared work folder and with nothing shared but a store,
and training over two machines with one lost."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from gristmill.foundation.runtime.store.store import Store
from gristmill.pipelines.workdir.remote import MARK_NAME, local_mirror
from tests.support.kills import Launcher, Run, files_of, number_of_kills, seed_of, write_corpus
from tests.support.net_namespaces import HOST, Network, network, why_not
from tests.support.ray_machines import PORT, Cluster, Machine, cluster
from tests.support.s3_server import s3_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]
KILLS = 50
DEMO = Path(__file__).parents[2] / "pipelines/recipes/demo.yaml"
CUTS = ("--set", "curate.shard_bytes=20000", "--to", "index")


def test_kills_and_a_cut_cable_change_no_byte(launcher: Launcher, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    recipe = write_corpus(tmp_path / "raw")
    launcher.run("run", recipe, *CUTS, "--workdir", tmp_path / "local", "--workers", 1, cwd=tmp_path)
    expected = files_of(tmp_path / "local")
    rng = random.Random(seed_of(time.time_ns() % 10_000))
    wanted, met, folder, done = (
        number_of_kills(KILLS),
        {"driver": 0, "worker": 0, "node": 0, "cut": 0},
        tmp_path / "w",
        0,
    )
    with network(3) as net, cluster(net, tmp_path / "logs") as made:
        command = ("run", recipe, *CUTS, "--workdir", folder, "--engine", "ray", "--address", f"{HOST}:{PORT}")
        while sum(met.values()) < wanted or not done or not met["cut"]:
            run = launcher.start(*command, cwd=tmp_path)
            disturb(run, made, met, wanted, rng)
            code = run.finish()
            assert code in (0, -signal.SIGKILL) or "was lost 4 times" in run.output(), run.output()
            assert "Traceback" not in run.output(), run.output()
            if code == 0:
                assert files_of(folder) == expected, met
                os.rename(folder, tmp_path / f"done-{done}")
                done += 1
    print(met, done)


def disturb(run: Run, made: Cluster, met: dict[str, int], wanted: int, rng: random.Random) -> None:
    """Kills the run's driver, workers and nodes at random moments after it joined the cluster, and cuts one node off
    once half of the wanted kills are done. met: counts what was done; ends with the run or when all is done."""
    while run.running() and not (run.log.exists() and "engine: ray" in run.output()):
        run.launcher.answered(0.1)
    while sum(met.values()) < wanted or not met["cut"]:
        if run.launcher.answered(rng.uniform(0.2, 4.0)):
            return
        may_cut = not met["cut"] and sum(met.values()) >= wanted // 2
        what = "cut" if may_cut else rng.choice(("driver", "worker", "node"))
        number = rng.choice(sorted(made.nodes))
        if what == "driver":
            run.kill_group()
        elif what == "worker" and not made.kill_worker(number, rng):
            continue
        elif what == "node":
            made.restart(number)
        elif what == "cut":
            made.net.cut(number)
            run.launcher.answered(6.0)  # its task is given to another machine, and goes on here too
            made.net.join(number)
            run.launcher.answered(3.0)
            made.restart(number)
        met[what] += 1


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Network]:
    """Three machines and an S3 server with the bucket `corpus`, which is all that they share with this one."""
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "scratch"))
    with network(3) as net, s3_server(monkeypatch, HOST) as client:
        client.create_bucket(Bucket="corpus")
        yield net


def own_folders(tmp_path: Path) -> tuple[Path, ...]:
    """What each node has for itself: the test's folder, with the driver's scratch folder, and Ray's."""
    return tmp_path, Path("/tmp/ray"), Path("/dev/shm")


def write_demo(folder: Path) -> Path:
    """The recipe `demo` with steps that edit texts; its raw files come with Python, which each node has."""
    folder.mkdir(parents=True)
    content = yaml.safe_load(DEMO.read_text())
    content["sources"] = [{**source, "packages": ["numpy"]} for source in content["sources"]]
    held = [{"text": "Return an array of zeros with the same shape and type as a given array."}]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    content["curate"] |= {
        "shard_bytes": 2_000_000,
        "quality": {"positive": ["python_prose"], "negative": ["python_code"], "keep": "quantile", "value": 0.9},
        "span_dedup": [{"unit": "paragraph", "min_count": 3}],
        "substring_dedup": {"min_bytes": 400, "group_bytes": 4_000_000},
        "decontaminate": {"benchmarks": [{"name": "held", "paths": [str(folder / "held.jsonl")], "fields": ["text"]}]},
    }
    (folder / "demo.yaml").write_text(yaml.safe_dump(content))
    return folder / "demo.yaml"


def test_nodes_that_share_nothing_but_a_store_give_the_local_bytes_whatever_is_killed(
    bucket: Network, tmp_path: Path
) -> None:
    recipe, mirror = write_demo(tmp_path / "recipe"), local_mirror("s3://corpus/run")
    launcher = Launcher(tmp_path / "runs")  # after the server, whose address its processes need
    launcher.run("run", recipe, "--to", "curate", "--workdir", tmp_path / "local", "--workers", 1, cwd=tmp_path)
    expected = files_of(tmp_path / "local")
    rng = random.Random(seed_of(time.time_ns() % 10_000))
    wanted, met, done = number_of_kills(KILLS), {"driver": 0, "worker": 0, "node": 0, "cut": 0}, 0
    with cluster(bucket, tmp_path / "logs", own_folders(tmp_path)) as made:
        command = ("run", recipe, "--to", "curate", "--workdir", "s3://corpus/run", "--engine", "ray")
        while sum(met.values()) < wanted or not done or not met["cut"]:
            run = launcher.start(*command, "--address", f"{HOST}:{PORT}", cwd=tmp_path)
            disturb(run, made, met, wanted, rng)
            code = run.finish()
            assert code in (0, -signal.SIGKILL) or "was lost 4 times" in run.output(), run.output()
            assert "Traceback" not in run.output(), run.output()
            if code == 0:
                found = {name: digest for name, digest in files_of(mirror).items() if name != MARK_NAME}
                assert found == expected, met
                done += 1
                os.rename(mirror, tmp_path / f"done-{done}")
                for name in (store := Store("s3://corpus/run")).list():
                    store.delete(name)
    launcher.close()
    print(met, done)


LAYOUT = ("--set", "train.layout.tensor=2", "--set", "train.layout.pipeline=2")


def train(net: Network, folder: Path, recipe: Path, work: Path, log: str) -> list[Machine]:
    """torchrun on two machines with two processes each: tensor inside a machine, pipeline across."""
    program = Path(sys.executable).with_name("gristmill")
    machines = []
    for rank, number in enumerate(sorted(net.machines)):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{net.machines[2]}:29511", "--rdzv-id", log]
        rendezvous += ["--rdzv-conf", f"is_host={rank == 0}"]  # torchrun compares names, which namespaces share
        local = ["--local-addr", net.machines[number], "--max-restarts", "0", str(program)]
        order = ["train", str(recipe), "--workdir", str(work), *LAYOUT]
        variables = ["env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1"]
        command = net.command(number, *variables, *torchrun, *rendezvous, *local, *order)
        machines.append(Machine(command, folder / f"{log}-{rank}.log"))
    return machines


def said(folder: Path) -> str:
    return "\n".join(path.read_text("utf-8", "replace")[-3000:] for path in sorted(folder.glob("*.log")))


def test_training_over_two_machines_is_that_of_one_process_and_goes_on_after_a_lost_one(
    launcher: Launcher, tmp_path: Path
) -> None:
    recipe = write_corpus(tmp_path / "raw")
    recipe.write_text(recipe.read_text().replace("kv_heads: 1", "kv_heads: 2"))
    launcher.run("run", recipe, "--workdir", tmp_path / "one", "--to", "index", "--workers", 1, cwd=tmp_path)
    for name in ("two", "lost"):
        shutil.copytree(tmp_path / "one", tmp_path / name)
    launcher.run("train", recipe, "--workdir", tmp_path / "one", cwd=tmp_path)
    with network(2) as net:
        whole = train(net, tmp_path, recipe, tmp_path / "two", "whole")
        assert [machine.process.wait(140) for machine in whole] == [0, 0], said(tmp_path)
        killed = train(net, tmp_path, recipe, tmp_path / "lost", "killed")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list((tmp_path / "lost").glob(".train-*/checkpoints/*/*")):
            time.sleep(0.02)
        killed[1].kill()
        with suppress(subprocess.TimeoutExpired):  # the machine that is left ends by itself, or is ended
            killed[0].process.wait(20)
        killed[0].kill()
        assert not (tmp_path / "lost/train/manifest.json").exists()
        again = train(net, tmp_path, recipe, tmp_path / "lost", "again")
        assert [machine.process.wait(140) for machine in again] == [0, 0], said(tmp_path)

    def losses(work: str) -> list[float]:
        lines = (tmp_path / work / "train/metrics.jsonl").read_text().splitlines()
        return [entry["loss"] for line in lines if "loss" in (entry := json.loads(line))]

    assert losses("one") == pytest.approx(losses("two"), rel=2e-5) and len(losses("one")) >= 16
    assert files_of(tmp_path / "lost/train") == files_of(tmp_path / "two/train")
