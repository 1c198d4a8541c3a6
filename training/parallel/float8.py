"""Linear layers whose three matmuls run on 8-bit numbers: e4m3 for activations and weights, e5m2 for gradients, each
tensor scaled by its largest element (Micikevicius et al., arXiv 2209.05433). Sums, results and stored weights keep
their precision. Each tensor rank scales its own shard, so the rounding depends on the layout (nowhere else does it).
A weight is cast once a step (engine/float8_weights.py), activations and gradients in each pass."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from gristmill.foundation.errors import RecipeError

MIN_CAPABILITY = (8, 9)  # CUDA compute capability of the first GPUs with 8-bit matmuls (Ada; Hopper is 9.0)


def check_float8(device: torch.device) -> None:
    """Raises RecipeError where the device has no 8-bit matmuls."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        raise RecipeError(
            f"train.float8 needs a GPU with 8-bit matmuls (H100, L40S or newer), not {device}; set it false"
        )


@dataclass(frozen=True)
class Float8Copy:
    """A weight in 8 bits. scale: the factor that brings it back, float32."""

    values: Tensor
    scale: Tensor


class Float8Weight(torch.Tensor):
    """A weight that FSDP gathered in 8 bits: to autograd a tensor of the computation's dtype. Anything but a float8
    layer reads its values in that dtype."""

    @staticmethod
    def __new__(cls, copy: Float8Copy, dtype: torch.dtype) -> "Float8Weight":
        values = copy.values
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, values.size(), strides=values.stride(), dtype=dtype, device=values.device
        )

    def __init__(self, copy: Float8Copy, dtype: torch.dtype):
        self.copy = copy

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VIEWS:
            weight = args[0]
            values = func(weight.copy.values, *args[1:], **(kwargs or {}))
            return cls(Float8Copy(values, weight.copy.scale), weight.dtype)
        args, kwargs = tree_map_only(cls, _in_full, (args, kwargs or {}))
        return func(*args, **kwargs)


_VIEWS = (
    torch.ops.aten.view.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.as_strided.default,
)


def _in_full(weight: Float8Weight) -> Tensor:
    return (weight.copy.values.float() * weight.copy.scale).to(weight.dtype)


def float8_linear(x_BTD: Tensor, weight_FD: Tensor, copy: Float8Copy | None = None) -> Tensor:
    """x W^T in bf16. copy: of the weight; without one it is cast here. All sizes must be multiples of 16."""
    if copy is None:
        copy = weight_FD.copy if isinstance(weight_FD, Float8Weight) else float8_copy(weight_FD.to(x_BTD.dtype))
    return _Float8Linear.apply(x_BTD.flatten(0, -2), weight_FD, copy.values, copy.scale).unflatten(0, x_BTD.shape[:-1])


def float8_copy(weight: Tensor, largest: Tensor | None = None) -> Float8Copy:
    """Of a weight in the computation's dtype. largest: the largest element by size, where this is a shard of it."""
    largest = weight.abs().amax() if largest is None else largest
    return Float8Copy(*_scaled(weight, largest, torch.float8_e4m3fn))


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_FD: Tensor, weight8: Tensor, weight_scale: Tensor) -> Tensor:
        x8, x_scale = _cast(x_ND, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.stored = weight_FD.dtype
        return _matmul(x8, weight8.T, x_scale, weight_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        gradient8, scale = _cast(gradient_NF, torch.float8_e5m2)
        x_gradient = _matmul(gradient8, weight8, scale, weight_scale)
        weight_gradient = _matmul(gradient8.T, x8, scale, x_scale)
        return x_gradient, weight_gradient.to(ctx.stored), None, None


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The 8-bit tensor, and the factor that brings it back."""
    return _scaled(x, x.abs().amax(), dtype)


def _scaled(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = (largest.float() / torch.finfo(dtype).max).clamp(min=1e-12)
    return (x.float() / scale).to(dtype), scale


def _matmul(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor) -> Tensor:
    """The kernels want the left operand row by row and the right one column by column."""
    columns = right.T.contiguous().T
    return torch._scaled_mm(
        left.contiguous(), columns, scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16
    )
