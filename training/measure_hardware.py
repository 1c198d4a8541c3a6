"""Measure a machine and write its hardware profile: matmuls, copies and, with several processes, collectives.

`gristmill calibrate`, or `torchrun --nproc-per-node 8 -m gristmill.training.measure_hardware PROFILE.yaml` for the
links of a node. The planner itself needs no torch.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.training.host_allocator import keep_freed_memory
from gristmill.training.measure_host import measure_host_link, measure_host_update, processes_here
from gristmill.training.measure_layers import fit_layers, rested_machine
from gristmill.training.median_seconds import median_seconds
from gristmill.training.memory_check import host_bytes
from gristmill.training.parallel.linear import matmul, product
from gristmill.training.pattern_search import pattern_search
from gristmill.training.planner.hardware import GIB, Device, Hardware, Link, load_hardware
from gristmill.training.planner.rates import Rates, Sustained
from gristmill.training.processes import RankInfo, local_device

# Square, tall and thin, as in a transformer, small enough to be measured in seconds on a CPU.
CPU_SHAPES = (
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 512, 2048),
    (1024, 256, 4096),
    (512, 4096, 512),
)
CUDA_SHAPES = (
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (2048, 8192, 8192),
    (8192, 1024, 8192),
    (8192, 8192, 1024),
    (2048, 12288, 4608),
    (4096, 4096, 11008),
    (16384, 4096, 4096),
)


class Measured(NamedTuple):
    """One product [rows, depth] @ [depth, columns] and the median of its seconds."""

    rows: int
    depth: int
    columns: int
    seconds: float

    @property
    def tflops(self) -> float:
        return 2 * self.rows * self.depth * self.columns / self.seconds / 1e12


def measure(device: torch.device, base: Hardware | None, reporter: Reporter, repeats: int = 10) -> Hardware:
    """Hardware profile of this machine. base: profile with what one process cannot measure: network, price, peak.

    matmul_tflops is the base's where it is given (a datasheet's peak), else the best that was measured."""
    points = measure_matmuls(device, reporter, repeats)
    copy = measure_copy(device, repeats)
    fitted = fit_device(points, copy, device, base)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    updates, slowed = measure_host_update(device, repeats)
    link = measure_host_link(device, repeats)
    wire, latency, wires = None, 0.0, "not measured: one process; set it, or run under torchrun"
    if processes > 1:
        reduced, sent = measure_all_reduce(device, repeats), measure_sends(device, repeats)
        wire = fit_link(reduced, "nvlink" if device.type == "cuda" else "memory", log2(processes))
        latency = wire.latency_microseconds * 1e-6 * log2(processes)
        wires = f"measured all-reduce of {processes} ranks: {_curve(reduced)}; sends: {_curve(sent)}"
    if device.type == "cpu":
        fitted = fit_layers(fitted, repeats, processes, latency)
    name = _device_name(device)
    sources = {
        "matmul": f"measured on {name}: " + ", ".join(f"{p.rows}x{p.depth}x{p.columns} {p.tflops:.2f}" for p in points),
        "layer": f"measured passes of an empty layer: {fitted.layer_microseconds:.0f} us; of layers, in which "
        f"element-wise work reaches {fitted.memory_efficiency:.2f} of a copy's bandwidth, attention "
        f"{fitted.flash_forward:.2f} and {fitted.flash_backward:.2f} of the peak forward and backward"
        if device.type == "cpu"
        else "not measured",
        "memory": f"measured copy of {copy / 1e9:.1f} GB/s (read and write counted)",
        "node_link": wires,
        "host_update": f"measured AdamW in fp32 on the host: {updates / 1e9:.3f}e9 parameters/s, {slowed:.2f} times "
        "as long while another thread copies",
        "host_link": f"measured copies between the host and {name}, the slower direction: {link / 1e9:.1f} GB/s",
        "host_memory_gib_per_gpu": f"this machine's, over {processes_here()} processes",
        "network": f"from {base.name}" if base else "not measured; set it before you plan several nodes",
    }
    memory_link = Link(kind="memory", gb_per_second=copy / 2e9, latency_microseconds=50.0)
    return Hardware(
        name="measured",
        device=fitted,
        node_gpus=base.node_gpus if base else max(processes, 1),
        node_link=wire or (base.node_link if base else memory_link),
        network=base.network if base else Link(kind="ethernet", gb_per_second=1.25, latency_microseconds=100.0),
        host_link=Link(kind="pcie" if device.type == "cuda" else "memory", gb_per_second=link / 1e9),
        host_memory_gib_per_gpu=host_bytes() / GIB / processes_here(),
        host_update_gparams_per_second=updates / 1e9 / processes_here(),
        host_contention=max(0.0, slowed - 1),
        usd_per_gpu_hour=base.usd_per_gpu_hour if base else None,
        sources=sources,
    )


def measure_matmuls(device: torch.device, reporter: Reporter, repeats: int) -> list[Measured]:
    """Times the matmuls of a transformer's shapes: in bf16 on CUDA forward, in fp32 on CPU the mean of forward and
    backward."""
    cuda = device.type == "cuda"
    points = []
    with reporter.meter("matmuls", len(CUDA_SHAPES if cuda else CPU_SHAPES), "shapes") as meter:
        for rows, depth, columns in CUDA_SHAPES if cuda else CPU_SHAPES:
            dtype = torch.bfloat16 if cuda else torch.float32
            x = torch.randn(rows, depth, device=device, dtype=dtype)
            weight = torch.randn(columns, depth, device=device, dtype=dtype)
            works = [partial(product, x, weight)]
            if not cuda:  # by the input and by the weight, where layouts of the operands differ by a quarter
                gradient = torch.randn(rows, columns, dtype=dtype)
                works += [partial(product, gradient, weight.T), partial(matmul, gradient.T, x)]
            seconds = sum(median_seconds(work, device, repeats) for work in works) / len(works)
            points.append(Measured(rows, depth, columns, seconds))
            meter.advance(1, f"{points[-1].tflops:.2f} TFLOP/s")
    return points


def measure_copy(device: torch.device, repeats: int) -> float:
    """Bytes per second, read and written, of a copy larger than any cache."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device, repeats)


class Sent(NamedTuple):
    """A message of so many bytes, the bytes that each rank sent for it, and the median of its seconds."""

    num_bytes: int
    sent_bytes: float
    seconds: float


def measure_all_reduce(device: torch.device, repeats: int) -> list[Sent]:
    """The curve of the default process group, from 4 kB to 256 MB (16 MB on a CPU), by powers of eight."""
    ranks = dist.get_world_size()
    largest = 2**28 if device.type == "cuda" else 2**24
    curve, size = [], 2**12
    while size <= largest:
        numbers = torch.zeros(size // 4, device=device)
        seconds = median_seconds(lambda numbers=numbers: dist.all_reduce(numbers), device, repeats, alone=False)  # type: ignore[misc]
        curve.append(Sent(size, 2 * (ranks - 1) / ranks * size, seconds))
        size *= 8
    return curve


def measure_sends(device: torch.device, repeats: int) -> list[Sent]:
    """Half the time from rank 0 to rank 1 and back, as between pipeline stages. The other ranks wait."""
    curve = []
    for size in (2**12, 2**16, 2**20, 2**24):
        numbers = torch.zeros(size // 4, device=device)
        seconds = median_seconds(lambda numbers=numbers: _there_and_back(numbers), device, repeats, alone=False)  # type: ignore[misc]
        curve.append(Sent(size, size, seconds / 2))
    return curve


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


def _curve(curve: Sequence[Sent]) -> str:
    return ", ".join(f"{sent.num_bytes} B {sent.seconds * 1e6:.0f} us" for sent in curve)


def fit_device(points: Sequence[Measured], copy: float, device: torch.device, base: Hardware | None) -> Device:
    """Fit a device to the measured matmuls: the best rate, and the costs of tiles, of a small K and of launches.

    Fitted by least squares of the logarithms, so that a small matmul counts as much as a large one."""
    best = max(point.tflops for point in points)
    start = base.device if base else _plain_device(best, copy, device)
    peak = base.device.matmul_tflops if base else best * 1.1
    fields = start.model_dump() | {
        "matmul_tflops": peak,
        "memory_tb_per_second": copy / 1e12 if base is None else start.memory_tb_per_second,
        "memory_efficiency": 1.0 if base is None else min(1.0, copy / 1e12 / start.memory_tb_per_second),
    }

    def build(point: Sequence[float]) -> Device:
        efficiency, tile, depth, kernel = point
        return Device.model_validate(
            fields
            | {
                "matmul_efficiency": efficiency,
                "tile_penalty": tile * 32,
                "depth_penalty": depth * 512,
                "kernel_microseconds": kernel * 50,
            }
        )

    def loss(point: Sequence[float]) -> float:
        rates = Rates(rested_machine(build(point)), Sustained())
        times = [rates.matmul(p.rows, p.depth, p.columns) for p in points]
        return sum(((time / p.seconds) - 1) ** 2 for time, p in zip(times, points, strict=True))

    return build(pattern_search(loss, [0.8, 0.2, 0.2, 0.2], step=0.2, min_step=0.005, low=0.01, high=1.0))


def write_profile(path: Path, base: str | None, reporter: Reporter, repeats: int = 10) -> Hardware:
    """Measures this machine and writes its hardware profile. Under torchrun all processes measure and rank 0 writes."""
    if path.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"{path}: a hardware profile is a .yaml file")
    if not path.parent.is_dir():
        raise RecipeError(f"{path.parent}: no such folder; make it, or write the profile elsewhere")
    device = local_device(RankInfo.from_environment())
    keep_freed_memory()  # as training does
    started = _start_processes(device)
    try:
        profile = measure(device, load_hardware(base) if base else None, reporter, repeats)
        if not started or dist.get_rank() == 0:
            path.write_text(yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False), "utf-8")
    finally:
        if started:
            dist.destroy_process_group()
    return profile


def _start_processes(device: torch.device) -> bool:
    if "RANK" not in os.environ or dist.is_initialized():
        return False
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return True


def _plain_device(best: float, copy: float, device: torch.device) -> Device:
    """The device before the fit. On a CPU, threads count as multiprocessors."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        memory, units = found.total_memory / GIB, found.multi_processor_count
    else:
        memory, units = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, torch.get_num_threads()
    return Device(
        memory_gib=memory,
        memory_tb_per_second=copy / 1e12,
        memory_efficiency=1.0,
        matmul_tflops=best,
        matmul_efficiency=0.9,
        multiprocessors=units,
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    write_profile(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None, Reporter.to_terminal())
