"""Linear layers of many experts at once: rows sorted by expert, each run times the weight of its expert.

Two backends of one function: a loop over the experts (any device and dtype; the oracle), and torch's grouped matmul
(CUDA, bfloat16), which reads the runs' ends on the device."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gristmill.training.parallel.linear import matmul

# N rows, E experts, D inputs, F outputs

ALIGNMENT = 8  # rows of a run begin at multiples of 16 bytes in bfloat16, as the CUDA kernel wants strides of gradients


@dataclass(frozen=True)
class Runs:
    """Which rows belong to which expert. sizes: rows of each expert, as numbers of the host (loop); ends_E: the row
    after each expert's last one, int32 on the device (grouped). Exactly one of them is set."""

    sizes: tuple[int, ...] | None = None
    ends_E: Tensor | None = None


def uses_grouped(x: Tensor) -> bool:
    """The backend is chosen here and nowhere else. Grouped matmuls are slower than the loop on a CPU (1.4 to 2.9 times
    in torch 2.13) and take bfloat16 only on CUDA."""
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


def grouped_linear(x_ND: Tensor, weight_EFD: Tensor, runs: Runs) -> Tensor:
    """Rows x W^T with the weight of their expert. Rows behind the last run come out as zeros from the loop; of the
    grouped matmul, which leaves them undefined, there must be none."""
    if runs.sizes is not None:
        return _LoopLinear.apply(x_ND, weight_EFD, runs.sizes)
    return F.grouped_mm(x_ND, weight_EFD.transpose(1, 2), offs=runs.ends_E)


class _LoopLinear(torch.autograd.Function):
    """A matmul an expert. Autograd alone would fill a gradient of all experts for each of them."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_EFD: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x_ND, weight_EFD)
        ctx.sizes = sizes
        y_NF = x_ND.new_empty(len(x_ND), weight_EFD.shape[1])
        for expert, rows in runs_of(sizes):
            matmul(x_ND[rows], weight_EFD[expert].T, out=y_NF[rows])
        y_NF[sum(sizes) :] = 0
        return y_NF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_EFD = ctx.saved_tensors
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = torch.empty_like(x_ND)
            for expert, rows in runs_of(ctx.sizes):
                matmul(gradient_NF[rows], weight_EFD[expert], out=x_gradient[rows])
            x_gradient[sum(ctx.sizes) :] = 0
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.empty_like(weight_EFD)
            for expert, rows in runs_of(ctx.sizes):
                matmul(gradient_NF[rows].T, x_ND[rows], out=weight_gradient[expert])
            for expert, size in enumerate(ctx.sizes):
                if size == 0:
                    weight_gradient[expert] = 0
        return x_gradient, weight_gradient, None


def runs_of(sizes: tuple[int, ...]) -> list[tuple[int, slice]]:
    """(expert, its rows) of the experts that have rows. (2, 0, 1) -> [(0, 0:2), (2, 2:3)]."""
    found, start = [], 0
    for expert, size in enumerate(sizes):
        if size:
            found.append((expert, slice(start, start + size)))
        start += size
    return found


def padded_positions(counts_E: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """Where sorted rows stand once each run begins at a multiple of ALIGNMENT, without a copy to the host.

    counts_E: rows of each expert, `rows` in all. Returns (position of each row, int64[rows]; end of each padded run,
    int32[E]; rows of the padded buffer, a bound that depends on no count and that the last run is extended to, so that
    no row of the buffer is left undefined). counts (3, 1), 4 rows -> positions 0, 1, 2, 8; ends 8, 20; 20 rows."""
    total = rows + len(counts_E) * ALIGNMENT
    padded_E = (counts_E + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends_E, row_ends_E = padded_E.cumsum(0), counts_E.cumsum(0)
    shift_E = (ends_E - padded_E) - (row_ends_E - counts_E)
    row_N = torch.arange(rows, device=counts_E.device)
    position_N = row_N + shift_E[torch.searchsorted(row_ends_E, row_N, right=True)]
    ends_E[-1] = total
    return position_N, ends_E.to(torch.int32), total
