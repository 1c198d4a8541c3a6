"""Median seconds of some work on a device."""

import time
from collections.abc import Callable
from typing import Any

import torch


def median_seconds(work: Callable[[], Any], device: torch.device, repeats: int, alone: bool = True) -> float:
    """Of `repeats` runs after two warm-up runs. On a CPU, work of this process alone is timed by its CPU time, which
    other processes do not lengthen, unless it is shorter than a tick of that clock."""
    threads = torch.get_num_threads()
    clock = time.perf_counter if device.type == "cuda" or not alone else lambda: time.process_time() / threads
    times = []
    for index in range(repeats + 2):
        finish(device)
        start, wall = clock(), time.perf_counter()
        work()
        finish(device)
        if index >= 2:
            times.append(clock() - start or time.perf_counter() - wall)
    return sorted(times)[len(times) // 2]


def finish(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
