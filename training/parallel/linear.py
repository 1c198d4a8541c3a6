"""Products of linear layers, x W^T + b. The backend is chosen here and nowhere else.

Several layers of one input are one product (`joint_linear`), although each has a parameter of its own: their weights
lie next to each other in memory (`place_jointly`), or are copied, which a cast to the computation's dtype does anyway.
On CPUs torch's float32 products run in MKL, which leaves another vendor's 512-bit units idle. oneDNN uses them:
220 GFLOP/s forward, 210 by the input and 168 by the weight against 98 (2,048 x 384 x 1,536, one core of an EPYC 9005,
2026-11-23; of an EPYC 9004, whose units are half as wide, 105 against 93 forward)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from gristmill.foundation.errors import RecipeError

# N tokens, D inputs, F outputs

LARGE_MATRIX = 1 << 20  # D x F
MIN_ONEDNN_PRODUCT = 1 << 21  # N x D x F; of 64 x 64 x 64 oneDNN takes twice as long
MANY_TOKENS = 64  # from which on a product is large also where the matrix lies by inputs
CPU_INFO = Path("/proc/cpuinfo")
# Asked here: the question inside a compiled layer splits its graph.
HAS_ONEDNN = torch.backends.mkldnn.is_available()
IS_INTEL = CPU_INFO.exists() and "GenuineIntel" in CPU_INFO.read_text()[:200]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b; weight and bias in the dtype of x."""
    if trains(x, weight) and _in_onednn(x):
        return joint_linear(x, (weight,), () if bias is None else (bias,))[0]
    return product(x, weight, bias) if _is_large(x, weight) else F.linear(x, weight, bias)


def joint_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """x W^T + b of each weight and bias (or without any), in the dtype of x: views of one product."""
    bias = torch.cat([part.to(x.dtype) for part in biases]) if biases else None
    if trains(x, weights[0]):
        return _JointLinear.apply(x, bias, *weights)
    return linear(x, _above(weights, x.dtype), bias).split([len(weight) for weight in weights], dim=-1)


def joins(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether one product of them all is the better way: where it copies no weight for it alone, or in training on a
    CPU, where a copy takes 2 % of a product over 2,048 tokens."""
    if not trains(x, weights[0]):
        return weights[0].dtype == x.dtype and adjacent(weights)
    return x.device.type == "cpu" or weights[0].dtype != x.dtype or adjacent(weights)


def trains(x: Tensor, weight: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)


def place_jointly(parameters: Sequence[nn.Parameter], by_input: bool = False) -> None:
    """Moves the values of these matrices [F, D] next to each other in memory, so that `joint_linear` copies none.

    by_input: the numbers of an input lie side by side, which products of few tokens read faster on a CPU: one token by
    1,376 x 256 takes 56 microseconds against 120, 12 tokens 317 against 445 (one core of an EPYC with AVX2, MKL,
    2026-11-27)."""
    joint = torch.cat([parameter.detach() for parameter in parameters])
    if by_input:
        joint = joint.T.contiguous().T
    for parameter, part in zip(parameters, joint.split([len(param) for param in parameters]), strict=True):
        parameter.data = part


class _JointLinear(torch.autograd.Function):
    """Keeps the input, and the weights or what a cast made of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
        joint_FD, stored = _above(weights, x.dtype), weights[0].dtype
        ctx.save_for_backward(x, *(weights if stored == x.dtype else (joint_FD,)))
        ctx.sizes, ctx.stored, ctx.has_bias = [len(weight) for weight in weights], stored, bias is not None
        y_NF = product(x.flatten(0, -2), joint_FD, bias)
        return y_NF.unflatten(0, x.shape[:-1]).split(ctx.sizes, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        gradient_NF = _beside(gradients).flatten(0, -2)
        by_x = by_bias = None
        if ctx.needs_input_grad[0]:
            by_x = product(gradient_NF, _above(weights, x.dtype).T).unflatten(0, x.shape[:-1])
        if ctx.has_bias:
            by_bias = gradient_NF.sum(dim=0)
        by_weights = matmul(gradient_NF.T, x.flatten(0, -2)).to(ctx.stored).split(ctx.sizes)
        return by_x, by_bias, *by_weights


def _above(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights [F, D] above each other: a view where they lie so, else a copy."""
    if len(weights) == 1:
        return weights[0].to(dtype)
    sizes = [len(weight) for weight in weights]
    if weights[0].dtype == dtype and adjacent(weights):
        return weights[0].as_strided((sum(sizes), weights[0].shape[1]), weights[0].stride())
    joint_FD = weights[0].new_empty((sum(sizes), weights[0].shape[1]), dtype=dtype)
    for part, weight in zip(joint_FD.split(sizes), weights, strict=True):
        part.copy_(weight)
    return joint_FD


def _beside(gradients: Sequence[Tensor]) -> Tensor:
    """Gradients [..., F] beside each other: a view where they lie so, as those of causal attention do, else a copy."""
    first, width = gradients[0], sum(gradient.shape[-1] for gradient in gradients)
    if len(gradients) == 1:
        return first
    if adjacent(gradients, rows=False) and first.stride(-1) == 1 and first.stride(-2) == width:
        return first.as_strided((*first.shape[:-1], width), first.stride())
    return torch.cat(list(gradients), dim=-1)


def adjacent(parts: Sequence[Tensor], rows: bool = True) -> bool:
    """Whether each part begins in memory where the one before it ends: all its rows, or (rows false) its first row."""
    if torch.compiler.is_compiling():  # where addresses are not known
        return False
    after, storage = parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != after or part.untyped_storage().data_ptr() != storage:
            return False
        if part.stride() != parts[0].stride():
            return False
        after += part.element_size() * (len(part) * part.stride(0) if rows else part.shape[-1])
    return True


def lie_by_input(weight_FD: Tensor) -> bool:
    """Whether the numbers of an input lie side by side."""
    return weight_FD.stride(0) == 1


def add_product(x_ND: Tensor, y_NF: Tensor, weight_DF: Tensor) -> Tensor:
    """x + y W^T without gradients; x may be overwritten."""
    if _is_large(y_NF, weight_DF):
        return x_ND.add_(product(y_NF, weight_DF))
    return x_ND.addmm_(y_NF, weight_DF.T)


def product(x_ND: Tensor, weight_FD: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b as in training, without gradients."""
    if _in_onednn(x_ND):
        return _onednn_linear(x_ND.contiguous(), weight_FD, bias)
    return F.linear(x_ND, weight_FD, bias)


def matmul(left_MK: Tensor, right_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """left @ right without gradients, written to `out` if it is given. Either may be a transposed view, which is not
    copied."""
    rows, depth = left_MK.shape
    if rows * depth * right_KN.shape[1] < MIN_ONEDNN_PRODUCT or not _in_onednn(left_MK):
        return torch.mm(left_MK, right_KN, out=out)
    product_MN = _onednn_linear(left_MK, right_KN.T, None)
    return product_MN if out is None else out.copy_(product_MN)


def _is_large(x: Tensor, weight_FD: Tensor) -> bool:
    """Whether a product is worth oneDNN's 10 microseconds a call: a large one, or one of few tokens with a large
    matrix, which it reads up to 1.7 times as fast. A matrix that lies by inputs is read well by either, and of that
    MKL's products on Intel's processors are never slower: of 128 tokens with 256 x 1,376 .59 ms and .69 (one core of a
    Xeon with AVX-512, 2026-11-28)."""
    if lie_by_input(weight_FD) and (IS_INTEL or x.numel() < MANY_TOKENS * x.shape[-1]):
        return False
    return weight_FD.numel() >= LARGE_MATRIX or x.numel() * len(weight_FD) >= MIN_ONEDNN_PRODUCT


def _onednn_linear(x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    call = _opaque_linear if torch.compiler.is_compiling() else _linear_pointwise
    return call(x_ND, weight_FD, bias_F)


def _linear_pointwise(x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_ND, weight_FD, bias_F, "none", [], "")


# The same, as the compiler takes it: its own rewriting of oneDNN's operators knows constant weights only.
_opaque_linear = torch.library.custom_op("gristmill::onednn_linear", _linear_pointwise, mutates_args=())
ONEDNN_OPERATOR = torch.ops.gristmill.onednn_linear.default


@_opaque_linear.register_fake
def _(x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    return x_ND.new_empty((*x_ND.shape[:-1], len(weight_FD)))


def _in_onednn(x: Tensor) -> bool:
    return HAS_ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu"


# Linear layers whose three matmuls run on 8-bit numbers: e4m3 for activations and weights, e5m2 for gradients, each
# tensor scaled by its largest element (Micikevicius et al., arXiv 2209.05433). Sums, results and stored weights keep
# their precision. Each tensor rank scales its own shard, so the rounding depends on the layout (nowhere else does
# it). A weight is cast once a step (engine/local_model.py), activations and gradients in each pass.

MIN_CAPABILITY = (8, 9)  # CUDA compute capability of the first GPUs with 8-bit matmuls (Ada; Hopper is 9.0)
GROUPED_CAPABILITIES = (9, 10)  # major numbers that torch's grouped 8-bit matmuls are built for (Blas.cpp)


def check_float8(device: torch.device, experts: bool = False) -> None:
    """Raises RecipeError where the device has no 8-bit matmuls. experts: the model has some, whose matmuls are
    grouped."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < MIN_CAPABILITY:
        raise RecipeError(
            f"train.float8 needs a GPU with 8-bit matmuls (H100, L40S or newer), not {device}; set it false"
        )
    if experts and capability[0] not in GROUPED_CAPABILITIES:
        raise RecipeError(
            f"train.float8: experts need a GPU with grouped 8-bit matmuls (H100, H200, B200), and {device} has compute "
            f"capability {capability[0]}.{capability[1]}; set it false"
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

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
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
    """Float8 copy of a weight in the computation's dtype. largest: the largest element by size, where this is a shard
    of it."""
    largest = weight.abs().amax() if largest is None else largest
    return Float8Copy(*_scaled(weight, largest, torch.float8_e4m3fn))


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_FD: Tensor, weight8: Tensor, weight_scale: Tensor) -> Tensor:
        x8, x_scale = _cast(x_ND, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.stored = weight_FD.dtype
        return _matmul(x8, weight8.T, x_scale, weight_scale, fast=True)

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
    return _scaled(x, torch.linalg.vector_norm(x, torch.inf), dtype)  # one pass, without a tensor of |x|


def _scaled(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = (largest.float() / torch.finfo(dtype).max).clamp(min=1e-12)
    return x.to(torch.float32, copy=True).div_(scale).to(dtype), scale


def float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in e4m3, contiguous, and the factor that brings back each row, the last dimension. [.., K] -> [.., K], [..]."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = (torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).float() / limit).clamp(min=1e-12)
    return (x.float() / scale).to(torch.float8_e4m3fn).contiguous(), scale.squeeze(-1)


def _matmul(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, fast: bool = False) -> Tensor:
    """The kernels want the left operand row by row and the right one column by column. fast: Hopper's tensor cores add
    in their own registers, of fewer bits: for outputs, not for gradients, as torchao and Transformer Engine do."""
    columns = right.T.contiguous().T
    return torch._scaled_mm(
        left.contiguous(),
        columns,
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
