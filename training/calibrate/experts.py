"""Work of a mixture of experts beside plain products: grouped products by number and size of the experts, and rows that
are read in the order of their experts. Measured as the model runs them: by its own grouped linear layer."""

from collections.abc import Mapping
from functools import partial
from statistics import median

import torch

from gristmill.training.calibrate.links import Work
from gristmill.training.model.moe.dispatch import Runs, grouped_linear, uses_grouped
from gristmill.training.planner.hardware import Hardware, Rates, Sustained

# (experts, rows of each, inputs, outputs): many small products and few large ones.
CPU_GROUPS = ((4, 256, 256, 256), (16, 64, 256, 256), (64, 16, 256, 256))
CUDA_GROUPS = ((8, 2048, 2048, 1408), (32, 512, 2048, 1408), (128, 128, 2048, 1408), (128, 512, 2048, 768))
PRODUCTS = 9  # of an expert both ways: three forward (gate, up, down), each twice backward
ROWS_ON_CPU, ROWS_ON_GPU, ROW_WIDTH = 2**14, 2**18, 1024


def expert_works(device: torch.device) -> dict[str, Work]:
    """Works that `fit_experts` needs the seconds of, by name."""
    works = {f"grouped {group}": Work(_grouped(group, device)) for group in _groups(device)}
    rows = ROWS_ON_GPU if device.type == "cuda" else ROWS_ON_CPU
    table = torch.zeros(rows, ROW_WIDTH, device=device, dtype=_dtype(device))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(device)
    return works | {"routed rows": Work(partial(table.index_select, 0, order))}


def fit_experts(seconds: Mapping[str, float], hardware: Hardware, device: torch.device) -> Hardware:
    """The profile with what an expert's products take beyond one product of as many rows, and the share of the memory
    rate at which routed rows are copied."""
    rates = Rates(hardware, Sustained())
    beyond = [
        (seconds[f"grouped {group}"] - rates.matmul(group[1], group[2], group[3], group[0])) / group[0]
        for group in _groups(device)
    ]
    rows = ROWS_ON_GPU if device.type == "cuda" else ROWS_ON_CPU
    copied = 2 * rows * ROW_WIDTH * torch.finfo(_dtype(device)).bits // 8
    measured = {
        "expert_microseconds": PRODUCTS * max(0.0, median(beyond)) * 1e6,
        "routed_copies": min(1.0, copied / seconds["routed rows"] / rates.memory_rate),
    }
    points = ", ".join(
        f"{'x'.join(map(str, group))} {seconds[f'grouped {group}'] * 1e6:.0f} us" for group in _groups(device)
    )
    source = (
        f"measured grouped products (experts x rows x inputs x outputs): {points}; routed rows {copied / 1e6:.0f} MB "
    )
    source += f"{seconds['routed rows'] * 1e6:.0f} us"
    fitted = hardware.device.model_copy(update=measured)
    return hardware.model_copy(update={"device": fitted, "sources": hardware.sources | {"experts": source}})


def _grouped(group: tuple[int, int, int, int], device: torch.device) -> "partial[torch.Tensor]":
    experts, rows, inputs, outputs = group
    x_ND = torch.zeros(experts * rows, inputs, device=device, dtype=_dtype(device))
    weight_EFD = torch.zeros(experts, outputs, inputs, device=device, dtype=_dtype(device))
    runs = Runs(sizes=(rows,) * experts)
    if uses_grouped(x_ND):
        runs = Runs(ends_E=torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows)
    return partial(grouped_linear, x_ND, weight_EFD, runs)


def _groups(device: torch.device) -> tuple[tuple[int, int, int, int], ...]:
    return CUDA_GROUPS if device.type == "cuda" else CPU_GROUPS


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32
