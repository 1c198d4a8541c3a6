"""A Ray cluster whose nodes are machines of a network of namespaces."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.net_namespaces import HOST, Network

PORT = 6390
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
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
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
    """A head on this machine and a Ray node on each machine of the network. own_disk: see `cluster`."""

    def __init__(self, net: Network, folder: Path, own_disk: Sequence[Path] = ()):
        self.net, self.folder, self.own_disk, self.count = net, folder, own_disk, 0
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
        command = self.net.command(number, *self.ray, *join)
        if self.own_disk:
            command = self.net.command_on_own_disk(number, self.own_disk, *self.ray, *join)
        machine = Machine(command, log)
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
def cluster(net: Network, folder: Path, own_disk: Sequence[Path] = ()) -> Iterator[Cluster]:
    """own_disk: folders of which each node has its own, with nothing of this machine's in them."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Cluster(net, folder, own_disk)
    try:
        yield made
    finally:
        made.close()
