"""The MLPs: the position-wise blocks of a layer."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gristmill.training.config.layers import RopeScaling
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.loss import upcast, upcast_dtype
from gristmill.training.parallel.collectives import all_reduce
from gristmill.training.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    Sharding,
    TensorAxis,
    column_parallel,
)

# B batch, T tokens, D width, Ft = this tensor rank's share of the hidden width


class GatedMlp(nn.Module):
    """down(f(gate x) * up x) for an element-wise function f (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis, hidden: int):
        super().__init__()
        self.tensor = tensor
        self.gate = ColumnParallelLinear(tensor, config.width, hidden, config.mlp_biases)
        self.up = ColumnParallelLinear(tensor, config.width, hidden, config.mlp_biases)
        self.down = RowParallelLinear(tensor, hidden, config.width, config.mlp_biases)

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x_BTD: Tensor) -> Tensor:
        # In training a joint product would cost copies: of the weights under FSDP, and of its parts' gradients.
        gate_BTFt, up_BTFt = column_parallel(self.tensor, x_BTD, [self.gate, self.up], joint=not self.training)
        return self.down(self.activation(gate_BTFt) * up_BTFt)


class SwiGLU(GatedMlp):
    """down(silu(gate x) * up x)."""

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        return F.silu(hidden_BTFt)


class GeGLU(GatedMlp):
    """down(gelu(gate x) * up x)."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis, hidden: int):
        super().__init__(config, tensor, hidden)
        self.approximate = gelu_approximation(config)

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        return F.gelu(hidden_BTFt, approximate=self.approximate)


class PlainMlp(nn.Module):
    """down(f(up x)) for an element-wise function f."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis, hidden: int):
        super().__init__()
        self.tensor = tensor
        self.up = ColumnParallelLinear(tensor, config.width, hidden, config.mlp_biases)
        self.down = RowParallelLinear(tensor, hidden, config.width, config.mlp_biases)

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x_BTD: Tensor) -> Tensor:
        (up_BTFt,) = column_parallel(self.tensor, x_BTD, [self.up])
        return self.down(self.activation(up_BTFt))


class GELU(PlainMlp):
    """down(gelu(up x))."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis, hidden: int):
        super().__init__(config, tensor, hidden)
        self.approximate = gelu_approximation(config)

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        return F.gelu(hidden_BTFt, approximate=self.approximate)


class ReLU(PlainMlp):
    """down(relu(up x))."""

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        return F.relu(hidden_BTFt)


class ReLU2(PlainMlp):
    """down(relu(up x)^2) (Primer, arXiv 2109.08668)."""

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        return F.relu(hidden_BTFt).square()


def gelu_approximation(config: ModelConfig) -> str:
    """torch's name for the form of gelu."""
    return "tanh" if config.gelu == "tanh" else "none"


MLPS = {"swiglu": SwiGLU, "geglu": GeGLU, "gelu": GELU, "relu": ReLU, "relu2": ReLU2}


# The two norms. Statistics are taken in float32 (or float64), whatever the dtype of the stream.


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
        self.width, self.centred, self.plus_one = width, not config.has_rmsnorm, config.norm_plus_one
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

    group: dist.ProcessGroup | None
    width: int

    def mean(self, sums: Tensor) -> Tensor:
        """From this rank's sums."""
        return all_reduce(sums, self.group) / self.width


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight. torch's own keeps its input and the normed copy in float32 for the backward pass; this keeps
    the input as it came and one number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float, split: SplitDimension | None) -> Tensor:
        wide = upcast(x)
        squares = wide.square()
        mean = squares.mean(dim=-1, keepdim=True) if split is None else split.mean(squares.sum(dim=-1, keepdim=True))
        scale = mean.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.split = split
        normed = wide * scale
        return (normed if weight is None else normed.mul_(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        gradient, normed = upcast(gradient), upcast(x) * scale
        products = gradient * normed
        slope = products.sum(dim=-1, keepdim=True) if weight is None else (products @ weight).unsqueeze(-1)
        slope = slope / x.shape[-1] if ctx.split is None else ctx.split.mean(slope)
        weighted = gradient if weight is None else gradient * weight
        x_gradient = weighted.addcmul(normed, slope, value=-1).mul_(scale)
        return x_gradient.to(x.dtype), None if weight is None else products.flatten(0, -2).sum(dim=0), None, None


# Rotary positions (RoFormer, arXiv 2104.09864), also for contexts longer than those of pretraining.

# B batch, T tokens, H heads, K head width


def rotary_angles(
    positions_BT: Tensor, head_width: int, base: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, T, K] for `rotate`. Feature i turns with feature i + K / 2."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, head_width, 2, device=positions_BT.device, dtype=exact) / head_width
    frequencies, factor = base**-exponent, 1.0
    if scaling is not None:
        frequencies, factor = _scaled(frequencies, base, scaling)
    angles = positions_BT.unsqueeze(-1).to(exact) * frequencies
    angles_BTK = torch.cat([angles, angles], dim=-1)
    cosine, sine = angles_BTK.cos(), angles_BTK.sin()
    if factor != 1.0:
        cosine, sine = cosine * factor, sine * factor
    return cosine.to(dtype), sine.to(dtype)


def rotate(x_BTHK: Tensor, rotation_BTK: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the first features of each head, as many as there are angles; the others stay as they are."""
    turned = rotation_BTK[0].shape[-1]
    if turned < x_BTHK.shape[-1]:
        first, rest = x_BTHK.split((turned, x_BTHK.shape[-1] - turned), dim=-1)
        return torch.cat([rotate(first, rotation_BTK), rest], dim=-1)
    cosine, sine = (part.unsqueeze(2) for part in rotation_BTK)
    first, second = x_BTHK.chunk(2, dim=-1)
    return torch.addcmul(x_BTHK * cosine, torch.cat([-second, first], dim=-1), sine)


def _scaled(frequencies: Tensor, base: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """(frequencies [K / 2] in radians a token, factor of cosine and sine)."""
    lowered = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return lowered, 1.0
    if scaling.rope_type == "ntk":
        larger = scaling.ntk_base(base, 2 * len(frequencies))
        return frequencies ** (math.log(larger) / math.log(base)), 1.0
    if scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * lowered + kept * frequencies, 1.0
    first, last = _yarn_features(2 * len(frequencies), base, scaling)
    places = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
    kept = 1 - ((places - first) / max(last - first, 1e-3)).clamp(0, 1)
    return (1 - kept) * lowered + kept * frequencies, scaling.rotation_factor


def _yarn_features(head_width: int, base: float, scaling: RopeScaling) -> tuple[int, int]:
    """The features that turn beta_fast and beta_slow times within the original length, rounded outwards."""
    length = scaling.original_max_position_embeddings

    def feature(turns: float) -> float:
        return head_width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    return max(math.floor(feature(scaling.beta_fast)), 0), min(math.ceil(feature(scaling.beta_slow)), head_width - 1)


# Dropout with a mask that is a hash of the element's position, equal on every layout and on recomputation.
#
# keep = hash(seed, layer, site, sample, position, feature): a 64-bit hash for each token and one for each feature,
# then one int32 mixing round for each element. No random state is kept, saved or restored.

_ROUNDS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))  # SplitMix64's finaliser (Steele et al. 2014)
_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number


@dataclass(frozen=True)
class Dropout:
    """The dropout of one forward pass. samples_B: the numbers k of the samples; positions_T: the tokens' places in
    their sample that this rank's residual stream holds; features_D: 0 to D - 1, a tensor that is handed in because
    torch.compile would fold the hash of a range it sees into an index, which overflows."""

    rate: float
    seed: int
    samples_B: Tensor
    positions_T: Tensor
    features_D: Tensor

    def __call__(self, x_BTD: Tensor, layer: int, site: int) -> Tensor:
        if self.rate == 0:
            return x_BTD
        kept = _keep(self, layer, site)
        return torch.where(kept, x_BTD * (1 / (1 - self.rate)), torch.zeros((), dtype=x_BTD.dtype, device=x_BTD.device))


def _keep(dropout: Dropout, layer: int, site: int) -> Tensor:
    """bool[B, T, D]; each element is kept with probability 1 - rate."""
    place = _place(dropout.seed, layer, site, dropout.samples_B.device)
    token_BT = _token_hashes(place, dropout.samples_B, dropout.positions_T)
    feature_D = _hash(place + dropout.features_D)
    low_BT1, high_BT1 = token_BT.to(torch.int32).unsqueeze(-1), (token_BT >> 32).to(torch.int32).unsqueeze(-1)
    mixed_BTD = feature_D.to(torch.int32) * (high_BT1 | 1) + low_BT1
    mixed_BTD = (mixed_BTD ^ _shifted(mixed_BTD, 15, bits=32)) * 0x2C1B3C6D
    mixed_BTD = mixed_BTD ^ _shifted(mixed_BTD, 13, bits=32)
    return mixed_BTD >= int((dropout.rate - 0.5) * 2**32)


def token_priorities(seed: int, layer: int, samples_B: Tensor, positions_T: Tensor) -> Tensor:
    """A random number for each token of each sample, int64[B, T]: a hash, equal on every layout."""
    return _token_hashes(_place(seed, layer, 2, samples_B.device), samples_B, positions_T)


def _place(seed: int, layer: int, site: int, device: torch.device) -> Tensor:
    place = (seed * 1_000_003 + layer) * 1_009 + site
    return torch.full((), place, dtype=torch.int64, device=device)  # torch.tensor would wait for a copy to the GPU


def _token_hashes(place: Tensor, samples_B: Tensor, positions_T: Tensor) -> Tensor:
    return _hash(_hash(place + samples_B * _GOLDEN).unsqueeze(-1) + positions_T)


def _hash(x: Tensor) -> Tensor:
    x = x * _GOLDEN
    for shift, factor in _ROUNDS:
        x = (x ^ _shifted(x, shift, bits=64)) * factor
    return x ^ _shifted(x, 31, bits=64)


def _shifted(x: Tensor, places: int, bits: int) -> Tensor:
    """To the right with zeros; torch's own shift of signed numbers draws the sign in, which would clear every sign."""
    return (x >> places) & ((1 << (bits - places)) - 1)


# Learned positions and segments.

# B batch, T tokens, R rows, D width


class TokenTable(nn.Module):
    """A table of learned positions or segments, added to this rank's tokens."""

    def __init__(self, tensor: TensorAxis, rows: int, width: int):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((rows, width), Sharding.REPLICATED)

    def forward(self, rows_BT: Tensor, dtype: torch.dtype) -> Tensor:
        table_RD = self.tensor.local(self.weight, Sharding.REPLICATED, dtype)
        return nn.functional.embedding(self.tensor.local_tokens(rows_BT), table_RD)
