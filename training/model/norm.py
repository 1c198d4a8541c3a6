"""The two norms. Statistics are taken in float32 (or float64), whatever the dtype of the stream."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gristmill.training.loss import upcast, upcast_dtype
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.collectives import all_reduce
from gristmill.training.parallel.tensor import Sharding, TensorAxis


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm over the last dimension. With norm_plus_one it multiplies by 1 + weight.

    A sharding over heads (OUTPUT, KEY_VALUE) splits that dimension of an RMSNorm over the tensor ranks; copies: ranks
    that hold the same share."""

    def __init__(
        self,
        config: ModelConfig,
        tensor: TensorAxis,
        width: int,
        sharding: Sharding = Sharding.REPLICATED,
        copies: int = 1,
    ):
        super().__init__()
        split = tensor.size > 1 and sharding in (Sharding.OUTPUT, Sharding.KEY_VALUE)
        self.split_over = SplitDimension(tensor.mesh.tensor.group, width * copies) if split else None
        self.tensor, self.sharding, self.epsilon = tensor, sharding, config.norm_epsilon
        self.width, self.centred, self.plus_one = width, config.norm != "rmsnorm", config.norm_plus_one
        self.weight = tensor.parameter((width,), sharding) if "weight" in config.norm_leaves else None
        self.bias = tensor.parameter((width,), sharding) if "bias" in config.norm_leaves else None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (self._local(parameter, x) for parameter in (self.weight, self.bias))
        if weight is not None and self.plus_one:
            weight = 1 + weight
        if not self.centred:
            return _RMSNorm.apply(x, weight, self.epsilon, self.split_over)
        if x.device.type == "cpu":  # whose kernel takes a 16-bit input with float32 parameters
            return F.layer_norm(x, (self.width,), weight, bias, self.epsilon)
        return F.layer_norm(upcast(x), (self.width,), weight, bias, self.epsilon).to(x.dtype)

    def _local(self, parameter: Tensor | None, x: Tensor) -> Tensor | None:
        return None if parameter is None else self.tensor.local(parameter, self.sharding, upcast_dtype(x))


class SplitDimension(NamedTuple):
    """A last dimension whose shares lie on the ranks of the group. width: of all shares together."""

    group: dist.ProcessGroup
    width: int

    def mean(self, sums: Tensor) -> Tensor:
        """From this rank's sums."""
        return all_reduce(sums, self.group) / self.width


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight. torch's own keeps its input and the normed copy in float32 for the backward pass; this keeps
    the input as it came and one number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, split: SplitDimension | None) -> Tensor:
        wide = upcast(x)
        squares = wide.square()
        mean = squares.mean(dim=-1, keepdim=True) if split is None else split.mean(squares.sum(dim=-1, keepdim=True))
        scale = mean.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.split = split
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        gradient, normed = upcast(gradient), upcast(x) * scale
        products = gradient * normed
        slope = (products @ weight).unsqueeze(-1)
        slope = slope / x.shape[-1] if ctx.split is None else ctx.split.mean(slope)
        x_gradient = (gradient * weight).addcmul_(normed, slope, value=-1).mul_(scale)
        return x_gradient.to(x.dtype), products.flatten(0, -2).sum(dim=0), None, None
