"""Seconds of work on a device: of one work, or of many in turn on a machine whose clock varies."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
    return {name: sorted(each)[len(each) // 4] for name, each in times.items()}


def median_seconds(work: Callable[[], Any], device: torch.device, repeats: int, alone: bool = True) -> float:
    """Of `repeats` runs after two warm-up runs."""
    times = [_seconds(Work(work, alone), device) for _ in range(repeats + WARM_UP)][WARM_UP:]
    return sorted(times)[len(times) // 2]


def finish(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
