"""Measure the host beside a device: its updates of parameters, and the link between them."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from gristmill.foundation.startup import torchrun_variable
from gristmill.training.parallel.collectives import finish, reduce_scatter
from gristmill.training.planner.hardware import Link

HOST = torch.device("cpu")
# fp32 weight, gradient and two moments of so many parameters: more than the caches of a host beside a GPU hold (1 GiB).
CUDA_PARAMETERS, CPU_PARAMETERS = 2**26, 2**22
COPIED_BYTES = 2**26


def measure_host_update(device: torch.device, repeats: int) -> tuple[float, float]:
    """(parameters a second that the host updates with AdamW, how many times as long while another thread copies to the
    device): the rate and the contention of an optimizer whose state is in host memory."""
    parameters = CUDA_PARAMETERS if device.type == "cuda" else CPU_PARAMETERS
    tensors = [torch.zeros(parameters) for _ in range(4)]
    source, target = _buffers(device)
    done = threading.Event()

    def copy() -> None:
        while not done.is_set():
            target.copy_(source)
            finish(device)

    def update() -> None:
        weight, gradient, first, second = ([tensor] for tensor in tensors)
        options: dict[str, Any] = {"fused": True, "amsgrad": False, "maximize": False, "lr": 1e-3}
        options |= {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
        adamw(weight, gradient, first, second, [], [torch.zeros(())], **options)

    alone = median_seconds(update, HOST, repeats, alone=False)
    copier = threading.Thread(target=copy)
    copier.start()
    try:
        beside = median_seconds(update, HOST, repeats, alone=False)
    finally:
        done.set()
        copier.join()
    return parameters / alone, beside / alone


def measure_host_link(device: torch.device, repeats: int) -> float:
    """Bytes a second of a copy between the host's memory (pinned beside a GPU) and the device's, in the slower
    direction. On a CPU of a copy in memory."""
    host, other = _buffers(device)
    seconds = [
        median_seconds(lambda: other.copy_(host, non_blocking=True), device, repeats),
        median_seconds(lambda: host.copy_(other, non_blocking=True), device, repeats),
    ]
    return host.nbytes / max(seconds)


def processes_here() -> int:
    """Processes that share this machine's host."""
    return torchrun_variable("LOCAL_WORLD_SIZE", 1)


def _buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(in host memory, on the device)."""
    host = torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return host, torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)


# Seconds of work on a device: of one work, or of many in turn on a machine whose clock varies.

WARM_UP = 2  # runs; the allocator's heap has its size only after them


class Work(NamedTuple):
    """alone: the work waits for no other process, so that its processor time says what it takes."""

    run: Callable[[], Any]
    alone: bool = True


def interleaved_seconds(
    works: Mapping[str, Work], device: torch.device, rounds: int, advance: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """The lower quartile of each work's seconds over `rounds` rounds, after two to warm up. Each round runs every work
    once, so all are measured in the same states of a machine, whose clock and neighbours may change by the second, and
    each finds the caches as the others leave them. Ranks on CPUs begin each work together. advance: called each round.

    rounds 9: of the nine times of a work the third, for what disturbs a run only lengthens it."""
    times: dict[str, list[float]] = {name: [] for name in works}
    together = device.type == "cpu" and dist.is_initialized() and dist.get_world_size() > 1
    for index in range(rounds + WARM_UP):
        for name, work in works.items():
            if together:
                dist.barrier()
            seconds = _seconds(work, device)
            if index >= WARM_UP:
                times[name].append(seconds)
        advance()
    return {name: sorted(measured)[len(measured) // 4] for name, measured in times.items()}


def median_seconds(work: Callable[[], Any], device: torch.device, repeats: int, alone: bool = True) -> float:
    """Median seconds of `repeats` runs after two warm-up runs."""
    times = [_seconds(Work(work, alone), device) for _ in range(repeats + WARM_UP)][WARM_UP:]
    return sorted(times)[len(times) // 2]


def _seconds(work: Work, device: torch.device) -> float:
    """On a CPU, work of one thread of this process alone is timed by its processor time, which other processes do not
    lengthen, unless it is shorter than a tick of that clock."""
    by_processor = device.type != "cuda" and work.alone and torch.get_num_threads() == 1
    clock = time.process_time if by_processor else time.perf_counter
    finish(device)
    start, wall = clock(), time.perf_counter()
    work.run()
    finish(device)
    return clock() - start or time.perf_counter() - wall


# Measure the links between processes: collectives and sends, and the line through their seconds.

SENT_SIZES = (2**12, 2**16, 2**20, 2**24)


class Sent(NamedTuple):
    """A message of so many bytes, the bytes that each rank sent for it, and its seconds."""

    num_bytes: int
    sent_bytes: float
    seconds: float


def collective_works(device: torch.device) -> dict[str, Work]:
    """An all-gather and a reduce-scatter over the default process group, as FSDP and sequence parallelism run them, of
    4 kB to 256 MB (16 MB on a CPU), by powers of eight."""
    return {f"collectives {size}": Work(_gather_and_scatter(size, device), alone=False) for size in _sizes(device)}


def collected_messages(seconds: Mapping[str, float], device: torch.device) -> list[Sent]:
    """Messages of one collective, the mean of both."""
    ranks = dist.get_world_size()
    return [Sent(size, (ranks - 1) / ranks * size, seconds[f"collectives {size}"] / 2) for size in _sizes(device)]


def _gather_and_scatter(size: int, device: torch.device) -> Callable[[], None]:
    share = torch.zeros(size // 4 // dist.get_world_size(), device=device)
    whole = torch.zeros(len(share) * dist.get_world_size(), device=device)
    group = dist.group.WORLD
    assert group is not None, "several processes"

    def run() -> None:
        dist.all_gather_into_tensor(whole, share)
        reduce_scatter(share, whole, group)

    return run


def _sizes(device: torch.device) -> list[int]:
    return [2**power for power in range(12, 29 if device.type == "cuda" else 25, 3)]


def send_works(device: torch.device) -> dict[str, Work]:
    """From rank 0 to rank 1 and back, as between pipeline stages. The other ranks wait."""
    messages = {size: torch.zeros(size // 4, device=device) for size in SENT_SIZES}
    return {f"send {size}": Work(partial(_there_and_back, message), alone=False) for size, message in messages.items()}


def sent_messages(seconds: Mapping[str, float]) -> list[Sent]:
    return [Sent(size, size, seconds[f"send {size}"] / 2) for size in SENT_SIZES]


def _there_and_back(numbers: torch.Tensor) -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.send(numbers, 1)
        dist.recv(numbers, 1)
    elif rank == 1:
        dist.recv(numbers, 0)
        dist.send(numbers, 0)


def fit_link(curve: Sequence[Sent], kind: Any, hops: float) -> Link:
    """Fit latency and bandwidth to the curve by least squares of seconds / measured - 1, so that small messages count
    as much as large ones. hops: number of latencies in one collective."""
    rows = torch.tensor([[1 / sent.seconds, sent.sent_bytes / sent.seconds] for sent in curve], dtype=torch.float64)
    fitted = torch.linalg.lstsq(rows, torch.ones(len(curve), 1, dtype=torch.float64)).solution[:, 0]
    latency, per_byte = max(0.0, float(fitted[0])), float(fitted[1])
    if per_byte <= 0:  # noise: the largest message alone
        per_byte = curve[-1].seconds / curve[-1].sent_bytes
    return Link(kind=kind, gb_per_second=1 / per_byte / 1e9, latency_microseconds=latency * 1e6 / max(1.0, hops))


def curve_text(curve: Sequence[Sent]) -> str:
    return ", ".join(f"{sent.num_bytes} B {sent.seconds * 1e6:.0f} us" for sent in curve)
