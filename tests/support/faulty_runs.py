"""Training runs with a fault on purpose, on two processes in a network of their own: slow link, slow rank, busy
experts, slow loader, small micro-batch; and healthy ones."""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.foundation.progress import Reporter
from gristmill.training.calibrate.measure_hardware import measure
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.launch.processes import keep_freed_memory
from gristmill.training.model.moe.router import routers
from gristmill.training.objectives.objective import TrainingData, stack_samples
from gristmill.training.parallel.mesh import build_mesh
from gristmill.training.planner.hardware import Hardware
from gristmill.training.run import Run, RunConfig
from tests.support.forked_pool import ForkedPool

CPU, NEW_NETWORK = torch.device("cpu"), 0x40000000
LENGTH, VOCABULARY, STEPS, EVERY = 128, 512, 16, 4
DENSE: dict[str, Any] = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 4, "sequence_length": LENGTH}
EXPERTS = DENSE | {
    "layers": 2,
    "moe": {"experts": 8, "top_k": 2, "ffn_hidden_size": 512, "bias_update_rate": 0.001, "balance_loss": 0.0},
}


@dataclass(frozen=True)
class FaultyRun:
    """cause: the first that must be named, by its beginning; empty: none may be. rate: of the link, as tc takes it.
    slow_layer: seconds that each layer's forward pass takes longer on `slow_rank`. loader: seconds of a sample more.
    busy: added to the scores by which experts of the first rank are chosen."""

    name: str
    cause: str
    layout: dict[str, Any]
    model: dict[str, Any] = field(default_factory=lambda: DENSE)
    samples: int = 16
    rate: str = ""
    slow_layer: float = 0.0
    slow_rank: int = 1
    loader: float = 0.0
    busy: float = 0.0


class RandomSamples:
    """Samples of random tokens, each `seconds` late."""

    vocab_size, fingerprint = VOCABULARY, "random"

    def __init__(self, seconds: float):
        self.seconds = seconds

    def sample(self, k: int) -> dict[str, np.ndarray]:
        time.sleep(self.seconds)
        tokens = np.random.default_rng(k).integers(0, VOCABULARY, LENGTH + 1)
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": np.ones(LENGTH, dtype=np.float32)}

    def batch(self, numbers: range) -> dict[str, np.ndarray]:
        return stack_samples([self.sample(k) for k in numbers])

    def source_of(self, k: int) -> str:
        return "random"


def why_not() -> str:
    """Why a process cannot have a network of its own here, or ""."""
    if os.geteuid() != 0 or shutil.which("tc") is None:
        return "a slow link needs root and the program tc (iproute2)"
    return ""


@contextmanager
def pool_in_own_network(size: int) -> Iterator[ForkedPool]:
    """A pool whose processes talk over a loopback device of their own, which can be slowed down."""
    libc, before = ctypes.CDLL(None, use_errno=True), os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    if libc.unshare(NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        pool = ForkedPool(size)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
        libc.setns(before, NEW_NETWORK)
        os.close(before)
    try:
        yield pool
    finally:
        pool.close()


def work(seconds: float) -> None:
    """Keeps this thread on a processor, as a slower clock does."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def calibrated(repeats: int) -> Hardware:
    keep_freed_memory()
    return measure(CPU, None, Reporter.silent(), repeats)


def limit_link(rate: str) -> None:
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, stderr=subprocess.DEVNULL)
    if rate:
        limit = ["tbf", "rate", rate, "burst", "512kb", "latency", "2s"]
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *limit], check=True)


def train_with_fault(folder: str, case: FaultyRun) -> None:
    """On each rank. The fault is there from the first step on."""
    tokens = case.samples * LENGTH
    train = TrainConfig(
        tokens=STEPS * tokens,
        batch_tokens=tokens,
        precision="fp32",
        layout=case.layout,
        optimizer={"learning_rate": 1e-4},
        checkpoint={"every": 0},
        monitoring={"communication_every": EVERY, "trackers": ()},
    )
    model = ModelConfig(**case.model)
    mesh = build_mesh(train.layout, model.num_kv_heads, CPU, experts="moe" in case.model)
    data = TrainingData(RandomSamples(case.loader), None, 0, False, {})
    Path(folder).mkdir(parents=True, exist_ok=True)
    run = Run(RunConfig(model, train, seed=1), data, mesh, Path(folder), Reporter.silent())
    for stage in run.model.stages.values():
        if case.slow_layer and mesh.world.rank == case.slow_rank:
            for layer in stage.layers.values():
                layer.register_forward_hook(lambda *_: work(case.slow_layer))
        for router in routers(stage).values():
            assert router.balance_bias is not None
            router.balance_bias[: len(router.balance_bias) // 2] += case.busy
    run.train()
    torch.distributed.barrier()
