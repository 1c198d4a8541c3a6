"""The SwiGLU experts of a layer in a loop: forward and backward pass of one expert after another, so that what an
expert computes stays in the processor's cache, and only its rows of the large tensors are touched."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gristmill.training.model.grouped_linear import runs_of
from gristmill.training.parallel.linear import matmul

# N rows sorted by expert, D width, E experts, F width of an expert


def loop_swiglu(x_ND: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """(silu(x gate^T) * (x up^T)) down^T with the weights of each row's expert; rows behind the last run come out as
    zeros. sizes: rows of each expert."""
    return _LoopSwiGLU.apply(x_ND, gate_EFD, up_EFD, down_EDF, sizes)


class _LoopSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, sizes: tuple[int, ...]
    ) -> Tensor:
        gate_NF, up_NF = (x_ND.new_empty(len(x_ND), gate_EFD.shape[1]) for _ in range(2))
        y_ND = torch.empty_like(x_ND)
        for expert, rows in runs_of(sizes):
            matmul(x_ND[rows], gate_EFD[expert].T, out=gate_NF[rows])
            matmul(x_ND[rows], up_EFD[expert].T, out=up_NF[rows])
            matmul(F.silu(gate_NF[rows]).mul_(up_NF[rows]), down_EDF[expert].T, out=y_ND[rows])
        y_ND[sum(sizes) :] = 0
        ctx.save_for_backward(x_ND, gate_EFD, up_EFD, down_EDF, gate_NF, up_NF)
        ctx.sizes = sizes
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, gate_EFD, up_EFD, down_EDF, gate_NF, up_NF = ctx.saved_tensors
        dx_ND, d_gate, d_up, d_down = (torch.empty_like(each) for each in (x_ND, gate_EFD, up_EFD, down_EDF))
        for expert, rows in runs_of(ctx.sizes):
            gate, up, dy = gate_NF[rows], up_NF[rows], dy_ND[rows]
            silu = F.silu(gate)
            matmul(dy.T, silu * up, out=d_down[expert])
            d_hidden = matmul(dy, down_EDF[expert])
            d_up_rows = silu.mul_(d_hidden)
            d_gate_rows = torch.ops.aten.silu_backward(d_hidden.mul_(up), gate)
            matmul(d_gate_rows.T, x_ND[rows], out=d_gate[expert])
            matmul(d_up_rows.T, x_ND[rows], out=d_up[expert])
            matmul(d_gate_rows, gate_EFD[expert], out=dx_ND[rows]).add_(matmul(d_up_rows, up_EFD[expert]))
        dx_ND[sum(ctx.sizes) :] = 0
        for expert, size in enumerate(ctx.sizes):
            if size == 0:
                for gradient in (d_gate, d_up, d_down):
                    gradient[expert] = 0
        return dx_ND, d_gate, d_up, d_down, None
