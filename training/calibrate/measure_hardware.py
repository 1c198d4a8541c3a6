"""Measure a machine and write its hardware profile: matmuls, copies and, with several processes, collectives.

`gristmill calibrate`, or for the links of a node `torchrun --nproc-per-node 8 -m
gristmill.training.calibrate.measure_hardware PROFILE.yaml`. The planner itself needs no torch.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.progress import Reporter
from gristmill.foundation.startup import host_bytes
from gristmill.training.calibrate.links import (
    WARM_UP,
    Work,
    collected_messages,
    collective_works,
    curve_text,
    fit_link,
    interleaved_seconds,
    measure_host_link,
    measure_host_update,
    processes_here,
    send_works,
    sent_messages,
)
from gristmill.training.calibrate.measure_layers import (
    expert_works,
    fit_experts,
    fit_layers,
    layer_works,
    rested_machine,
)
from gristmill.training.launch.processes import RankInfo, host_threads, keep_freed_memory, local_device
from gristmill.training.optim.offload import with_threads
from gristmill.training.parallel.linear import matmul, product
from gristmill.training.planner.hardware import GIB, Device, Hardware, Link, Rates, Sustained, load_hardware

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


class MeasuredProduct(NamedTuple):
    """One product [rows, depth] @ [depth, columns] and its seconds."""

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
    return measure_beside(device, base, reporter, repeats, {})[0]


def measure_beside(
    device: torch.device, base: Hardware | None, reporter: Reporter, repeats: int, beside: Mapping[str, Work]
) -> tuple[Hardware, dict[str, float]]:
    """The same, and the seconds of other works on this rank, taken in the same rounds."""
    processes = dist.get_world_size() if dist.is_initialized() else 1
    works = matmul_works(device) | {"copy": copy_work(device)} | expert_works(device)
    if device.type == "cpu":
        works |= layer_works(processes)
    if processes > 1:
        works |= collective_works(device) | send_works(device)
    with reporter.meter("measurements", repeats + WARM_UP, "rounds") as meter:
        seconds = interleaved_seconds({**works, **beside}, device, repeats, meter.advance)
    others = {name: seconds.pop(name) for name in beside}
    if processes > 1:
        seconds = _means_over_ranks(works, seconds, device)
    return fit_experts(seconds, profile_of(seconds, device, base, repeats), device), others


def profile_of(seconds: Mapping[str, float], device: torch.device, base: Hardware | None, repeats: int) -> Hardware:
    """From the seconds of all works by name; measures the host besides."""
    points = measured_matmuls(seconds, device)
    copy = 2 * _copied_bytes(device) / seconds["copy"]
    fitted = fit_device(points, copy, device, base)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    threads = host_threads(processes_here())
    with with_threads(threads):
        updates, slowed = measure_host_update(device, repeats)
    link = measure_host_link(device, repeats)
    wire, latency, wires = None, 0.0, "not measured: one process; set it, or run under torchrun"
    if processes > 1:
        collected, sent = collected_messages(seconds, device), sent_messages(seconds)
        wire = fit_link(collected, "nvlink" if device.type == "cuda" else "memory", log2(processes))
        latency = wire.latency_microseconds * 1e-6 * log2(processes)
        wires = f"measured all-gather and reduce-scatter of {processes} ranks: {curve_text(collected)}; "
        wires += f"sends: {curve_text(sent)}"
    if device.type == "cpu":
        fitted = fit_layers(fitted, seconds, processes, latency)
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
        "host_update": f"measured AdamW in fp32 on the host: {updates / 1e9:.3f}e9 parameters/s by one of "
        f"{processes_here()} processes with {threads} threads, {slowed:.2f} times "
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
        host_update_gparams_per_second=updates / 1e9,
        host_contention=max(0.0, slowed - 1),
        price_per_gpu_hour=base.price_per_gpu_hour if base else None,
        currency=base.currency if base else "USD",
        sources=sources,
    )


def matmul_works(device: torch.device) -> dict[str, Work]:
    """The matmuls of a transformer's shapes by number and kind: in bf16 on CUDA forward; in fp32 on CPU also by the
    input and by the weight, where layouts of the operands differ by a quarter."""
    cuda = device.type == "cuda"
    works: dict[str, Work] = {}
    for index, (rows, depth, columns) in enumerate(_shapes(device)):
        dtype = torch.bfloat16 if cuda else torch.float32
        x = torch.randn(rows, depth, device=device, dtype=dtype)
        weight = torch.randn(columns, depth, device=device, dtype=dtype)
        runs: list[Callable[[], Any]] = [partial(product, x, weight)]
        if not cuda:
            gradient = torch.randn(rows, columns, dtype=dtype)
            runs += [partial(product, gradient, weight.T), partial(matmul, gradient.T, x)]
        works |= {f"matmul {index} {kind}": Work(run) for kind, run in enumerate(runs)}
    return works


def measured_matmuls(seconds: Mapping[str, float], device: torch.device) -> list[MeasuredProduct]:
    """The mean over the kinds of each shape."""
    kinds = 1 if device.type == "cuda" else 3
    return [
        MeasuredProduct(*shape, sum(seconds[f"matmul {index} {kind}"] for kind in range(kinds)) / kinds)
        for index, shape in enumerate(_shapes(device))
    ]


def _shapes(device: torch.device) -> tuple[tuple[int, int, int], ...]:
    return CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES


def copy_work(device: torch.device) -> Work:
    """A copy larger than any cache."""
    source = torch.zeros(_copied_bytes(device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Work(lambda: target.copy_(source))


def _copied_bytes(device: torch.device) -> int:
    return 2**30 if device.type == "cuda" else 2**27


def _means_over_ranks(
    works: Mapping[str, Work], seconds: Mapping[str, float], device: torch.device
) -> dict[str, float]:
    """Mean seconds of the works that each rank does alone; rank 0's of the others."""
    means = torch.tensor([seconds[name] for name in works], device=device)
    dist.all_reduce(means)
    means /= dist.get_world_size()
    return {
        name: mean if works[name].alone else seconds[name] for name, mean in zip(works, means.tolist(), strict=True)
    }


def fit_device(points: Sequence[MeasuredProduct], copy: float, device: torch.device, base: Hardware | None) -> Device:
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
    if path.exists() and not _is_profile(path):
        raise RecipeError(f"{path} stands there already and is no hardware profile; name another file")
    device = local_device(RankInfo.from_environment())
    keep_freed_memory()  # as training does
    started = _start_processes(device)
    try:
        profile = measure(device, load_hardware(base) if base else None, reporter, repeats)
        if not started or dist.get_rank() == 0:
            write_atomic(path, yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False).encode())
    finally:
        if started:
            dist.destroy_process_group()
    return profile


def _is_profile(path: Path) -> bool:
    try:
        load_hardware(path)
    except RecipeError:
        return False
    return True


def _start_processes(device: torch.device) -> bool:
    if "RANK" not in os.environ or dist.is_initialized():
        return False
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return True


def _plain_device(best: float, copy: float, device: torch.device) -> Device:
    """The device before the fit. On a CPU, threads count as multiprocessors."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory, units = properties.total_memory / GIB, properties.multi_processor_count
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


# Pattern search: minimize a function of a few variables without derivatives.


def pattern_search(
    loss: Callable[[Sequence[float]], float],
    start: Sequence[float],
    step: float,
    min_step: float,
    low: float,
    high: float,
) -> list[float]:
    """Minimize loss within [low, high] by steps along each axis, halved when none improves (Hooke and Jeeves)."""
    point, value = list(start), loss(start)
    while step > min_step:
        moved = False
        for axis in range(len(point)):
            for change in (step, -step):
                trial = list(point)
                trial[axis] = min(high, max(low, trial[axis] + change))
                trial_value = loss(trial)
                if trial_value < value:
                    point, value, moved = trial, trial_value, True
        step = step if moved else step / 2
    return point
