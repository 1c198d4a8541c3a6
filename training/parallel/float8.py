"""Linear layers whose three matmuls run on 8-bit numbers: e4m3 for activations and weights, e5m2 for gradients, each
tensor scaled by its largest element (Micikevicius et al., arXiv 2209.05433). Sums, results and stored weights keep
their precision. Each tensor rank scales its own shard, so the rounding depends on the layout (nowhere else does it)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gristmill.foundation.errors import RecipeError

MIN_CAPABILITY = (8, 9)  # CUDA compute capability of the first GPUs with 8-bit matmuls (Ada; Hopper is 9.0)


def check_float8(device: torch.device) -> None:
    """Raises RecipeError where the device has no 8-bit matmuls."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        raise RecipeError(
            f"train.float8 needs a GPU with 8-bit matmuls (H100, L40S or newer), not {device}; set it false"
        )


def float8_linear(x_BTD: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T in bf16. All sizes must be multiples of 16."""
    return _Float8Linear.apply(x_BTD.flatten(0, -2), weight_FD).unflatten(0, x_BTD.shape[:-1])


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_FD: Tensor) -> Tensor:
        x8, x_scale = _cast(x_ND, torch.float8_e4m3fn)
        weight8, weight_scale = _cast(weight_FD, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        return _matmul(x8, weight8.T, x_scale, weight_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        gradient8, scale = _cast(gradient_NF, torch.float8_e5m2)
        x_gradient = _matmul(gradient8, weight8, scale, weight_scale)
        weight_gradient = _matmul(gradient8.T, x8, scale, x_scale)
        return x_gradient, weight_gradient


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The 8-bit tensor, and the factor that brings it back."""
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=1e-12)
    return (x.float() / scale).to(dtype), scale


def _matmul(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor) -> Tensor:
    """The kernels want the left operand row by row and the right one column by column."""
    columns = right.T.contiguous().T
    return torch._scaled_mm(
        left.contiguous(), columns, scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16
    )
