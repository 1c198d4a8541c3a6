"""Measure the links between processes: collectives and sends, and the line through their seconds."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gristmill.training.parallel.collectives import reduce_scatter
from gristmill.training.planner.hardware import Link
from gristmill.training.timing import Work

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
    """Of one collective, the mean of both."""
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
    return {f"send {size}": Work(partial(_there_and_back, each), alone=False) for size, each in messages.items()}


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
