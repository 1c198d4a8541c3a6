"""Curation and indexing on Ray clusters of 1, 2 and 4 nodes, and with processes and nodes killed: the local bytes."""

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from kills import Run, files_of, number_of_kills, seed_of, write_corpus

from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.node import NodeRequirements, versions_here
from gristmill.foundation.runtime.tasks.ray import RayEngine
from tests.support.ray_cluster import add_node, ray_cluster

pytest.importorskip("ray", reason="the extra `cluster` is not installed")
pytestmark = pytest.mark.slow
KILLS = 50
CUTS = ("--set", "curate.shard_bytes=20000", "--to", "index")


@pytest.fixture(scope="module")
def local(launcher, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """(recipe, the files of a run on the local engine)."""
    folder = tmp_path_factory.mktemp("local")
    recipe = write_corpus(folder / "raw")
    launcher.run("run", recipe, *CUTS, "--workdir", folder / "work", "--workers", 1, cwd=folder)
    return recipe, files_of(folder / "work")


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_any_number_of_nodes_gives_the_local_bytes(launcher, local, tmp_path, nodes):
    recipe, expected = local
    with ray_cluster(nodes=nodes) as cluster:
        command = ("run", recipe, *CUTS, "--workdir", tmp_path / "work", "--engine", "ray", "--address")
        said, _ = launcher.run(*command, cluster.address, cwd=tmp_path)
    assert f"engine: ray, {nodes} nodes" in said
    assert "raylet" not in said
    assert files_of(tmp_path / "work") == expected


def test_kills_of_drivers_workers_and_nodes_change_no_byte(launcher, local, tmp_path):
    recipe, expected = local
    rng = random.Random(seed_of(time.time_ns() % 10_000))
    wanted, killed, folder = number_of_kills(KILLS), {"driver": 0, "worker": 0, "node": 0}, tmp_path / "work"
    with ray_cluster(nodes=3) as cluster:
        command = ("run", recipe, *CUTS, "--workdir", folder, "--engine", "ray", "--address", cluster.address)
        while sum(killed.values()) < wanted:
            run = launcher.start(*command, cwd=tmp_path)
            while run.running() and not run.launcher.answered(rng.uniform(0.2, 4.0)):
                what = rng.choice(sorted(killed))
                killed[what] += kill(what, run, cluster, rng)
            code = run.finish()
            assert code in (0, -signal.SIGKILL) or "was lost 4 times" in run.output(), run.output()
            assert "Traceback" not in run.output(), run.output()
            if code == 0:
                assert files_of(folder) == expected, killed
                os.rename(folder, tmp_path / f"done-{sum(killed.values())}")
    assert any(tmp_path.glob("done-*")) and min(killed.values()) > 0, killed
    print(killed)


def kill(what: str, run: Run, cluster, rng: random.Random) -> int:
    """1 if there was one to kill."""
    if what == "driver":
        run.kill_group()
        return 1
    nodes = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    chosen = rng.choice(nodes)
    if what == "node":
        cluster.remove_node(chosen, allow_graceful=False)
        add_node(cluster)
        return 1
    raylet = psutil.Process(chosen.all_processes["raylet"][0].process.pid)
    workers = [child for child in raylet.children(recursive=True) if "ray::" in " ".join(child.cmdline())]
    if not workers:
        return 0
    rng.choice(workers).kill()
    return 1


def doze(seconds):
    time.sleep(seconds)


def test_a_task_that_never_fits_in_memory_ends_with_its_name(tmp_path, monkeypatch):
    """Ray by itself would run it again without end. Here its limit is what the machine uses anyway."""
    limits = {"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 50}
    place = NodeRequirements(os.getcwd(), versions_here())
    monkeypatch.setattr(
        "gristmill.foundation.runtime.tasks.ray.checked_place", lambda *_: place
    )  # it would be killed too
    with ray_cluster(nodes=1, _system_config=limits) as cluster:
        engine = RayEngine(cluster.address, Reporter.silent(), tmp_path)
        with pytest.raises(InputError, match=r"^dozing: task 1 of 1 was lost 4 times, last because its node ran"):
            engine.map(doze, [5.0], "dozing")
        engine.disconnect()
