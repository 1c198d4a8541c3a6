"""Machines as network namespaces: Ray nodes killed and cut off, and training over two machines with one lost."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.kills import Launcher, files_of, number_of_kills, seed_of, write_corpus
from tests.support.net_namespaces import HOST, Network, network, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]
KILLS = 50
PORT = 6390
CUTS = ("--set", "curate.shard_bytes=20000", "--to", "index")
# A node that does not answer is given up after 2 s, by Ray's default after 20.
HEALTH = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 4,
}


class Machine:
    """A process tree on one machine of the network."""

    def __init__(self, command: list[str], log: Path):
        self.log = log.open("wb")
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=environment, start_new_session=True
        )

    def tree(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            parent = psutil.Process(self.process.pid)
            return [*parent.children(recursive=True), parent]
        return []

    def named(self, text: str) -> list[psutil.Process]:
        found = []
        for process in self.tree():
            with suppress(psutil.Error):
                if text in " ".join(process.cmdline())[:200]:
                    found.append(process)
        return found

    def kill(self) -> None:
        for process in self.tree():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self.log.close()


class Cluster:
    """A head on this machine and a Ray node on each machine of the network."""

    def __init__(self, net: Network, folder: Path):
        self.net, self.folder, self.count = net, folder, 0
        self.ray = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            "--object-store-memory",
            "80000000",
        ]
        head = [
            "--head",
            "--node-ip-address",
            HOST,
            "--port",
            str(PORT),
            "--num-cpus",
            "0",
            "--system-config",
            json.dumps(HEALTH),
        ]
        self.head = Machine([*self.ray, *head, "--include-dashboard", "false"], folder / "head.log")
        self._wait_for("head.log", "Ray runtime started")
        self.nodes = {number: self._node(number) for number in net.machines}

    def _node(self, number: int) -> Machine:
        self.count += 1
        log = self.folder / f"node-{number}-{self.count}.log"
        join = ["--address", f"{HOST}:{PORT}", "--node-ip-address", self.net.machines[number], "--num-cpus", "1"]
        machine = Machine(self.net.command(number, *self.ray, *join), log)
        self._wait_for(log.name, "Ray runtime started")
        return machine

    def _wait_for(self, log: str, text: str) -> None:
        for _ in range(600):
            if text in (self.folder / log).read_text("utf-8", "replace"):
                return
            time.sleep(0.1)
        raise TimeoutError((self.folder / log).read_text("utf-8", "replace"))

    def restart(self, number: int) -> None:
        self.nodes[number].kill()
        self.nodes[number] = self._node(number)

    def kill_worker(self, number: int, rng: random.Random) -> bool:
        workers = self.nodes[number].named("ray::")
        if workers:
            with suppress(psutil.Error):
                rng.choice(workers).kill()
        return bool(workers)

    def close(self) -> None:
        for machine in (*self.nodes.values(), self.head):
            machine.kill()


@contextmanager
def cluster(net: Network, folder: Path) -> Iterator[Cluster]:
    folder.mkdir(parents=True, exist_ok=True)
    made = Cluster(net, folder)
    try:
        yield made
    finally:
        made.close()


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
            while run.running() and not run.launcher.answered(rng.uniform(0.2, 4.0)):
                what = (
                    "cut"
                    if not met["cut"] and sum(met.values()) >= wanted // 2
                    else rng.choice(("driver", "worker", "node"))
                )
                number = rng.choice(sorted(made.nodes))
                if what == "driver":
                    run.kill_group()
                elif what == "worker" and not made.kill_worker(number, rng):
                    continue
                elif what == "node":
                    made.restart(number)
                elif what == "cut":
                    net.cut(number)
                    run.launcher.answered(6.0)  # its task is given to another machine, and goes on here too
                    net.join(number)
                    run.launcher.answered(3.0)
                    made.restart(number)
                met[what] += 1
            code = run.finish()
            assert code in (0, -signal.SIGKILL) or "was lost 4 times" in run.output(), run.output()
            assert "Traceback" not in run.output(), run.output()
            if code == 0:
                assert files_of(folder) == expected, met
                os.rename(folder, tmp_path / f"done-{done}")
                done += 1
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
