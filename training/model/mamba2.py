"""The Mamba-2 mixer: projections, causal convolutions, the scan, a gated norm, the output projection."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.loss import upcast, upcast_dtype
from gristmill.training.mixers.mamba2 import Mamba2
from gristmill.training.model.attention_metadata import AttentionMetadata
from gristmill.training.model.causal_convolution import CausalConvolution, last_inputs
from gristmill.training.model.segments import Segments
from gristmill.training.model.ssd import ChunkedScan, ScanInputs
from gristmill.training.model.ssd_backend import scan
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    Sharding,
    TensorAxis,
    column_parallel,
)

# B rows, T tokens, D width, H heads, P head width, G groups, N state, K taps; a small t = this tensor rank's share
# I inner width: H x P


@dataclass(frozen=True)
class Mamba2State:
    """Of the tokens so far: the last K - 1 inputs of the convolutions, [B, K - 1, channels] of x, B and C each, and the
    scan's state in float32 or better. Its size does not grow."""

    inputs: tuple[Tensor, Tensor, Tensor]
    scan_BHPN: Tensor

    def take(self, rows: Tensor) -> "Mamba2State":
        """The state of the given batch rows, in that order."""
        x, B, C = (part[rows] for part in self.inputs)
        return Mamba2State((x, B, C), self.scan_BHPN[rows])


class Mamba2Mixer(nn.Module):
    """output(norm(scan(silu(conv(x))) * silu(z))). Each tensor rank has whole heads and whole groups, so only the input
    and the output need collectives."""

    def __init__(self, config: ModelConfig, mixer: Mamba2, tensor: TensorAxis):
        super().__init__()
        self.tensor, self.mixer = tensor, mixer
        width, inner, shared = config.width, mixer.inner(config.width), mixer.group_width
        heads = mixer.heads(width)
        self.z = ColumnParallelLinear(tensor, width, inner, False)
        self.x = ColumnParallelLinear(tensor, width, inner, False)
        self.B = ColumnParallelLinear(tensor, width, shared, False)
        self.C = ColumnParallelLinear(tensor, width, shared, False)
        self.dt = ColumnParallelLinear(tensor, width, heads, False)
        self.x_convolution = CausalConvolution(tensor, inner, mixer.kernel)
        self.B_convolution = CausalConvolution(tensor, shared, mixer.kernel)
        self.C_convolution = CausalConvolution(tensor, shared, mixer.kernel)
        self.scan = Scan(tensor, heads, mixer)
        self.norm = GatedNorm(tensor, inner, inner // mixer.groups, config.norm_epsilon)
        self.output = RowParallelLinear(tensor, inner, width, False)

    def forward(
        self, x_BTD: Tensor, metadata: AttentionMetadata, state: Mamba2State | None = None
    ) -> tuple[Tensor, Mamba2State | None]:
        """The mixed tokens and, if the metadata keeps state, the state after them."""
        layers = [self.z, self.dt, self.x, self.B, self.C]
        z_BTI, dt_BTH, *streams = column_parallel(self.tensor, x_BTD, layers)
        if metadata.around_mixing is None:
            y_BTHP, state = self._mixed(streams, dt_BTH, metadata, state)
        else:  # in training, which keeps no state
            y_BTHP = metadata.mix(lambda *each: self._mixed(each[:3], each[3], metadata, None)[0], *streams, dt_BTH)
        return self.output(self.norm(y_BTHP.flatten(2), z_BTI)), state

    def _mixed(
        self, streams: Sequence[Tensor], dt_BTH: Tensor, metadata: AttentionMetadata, state: Mamba2State | None
    ) -> tuple[Tensor, Mamba2State | None]:
        """(y_BTHP, the state after the tokens if it is kept) of x, B and C: convolutions and scan."""
        convolutions = (self.x_convolution, self.B_convolution, self.C_convolution)
        before, documents_BT, segments = (None, None, None), metadata.documents_BT, metadata.segments
        if segments is not None:
            streams, dt_BTH = tuple(segments.split(stream) for stream in streams), segments.split(dt_BTH)
            before = tuple(segments.before(stream, self.mixer.kernel - 1) for stream in streams)
            documents_BT = segments.documents_RL
        elif state is not None:
            before = state.inputs
        x_BTI, B_BTF, C_BTF = (
            F.silu(convolve(stream, documents_BT, inputs))
            for convolve, stream, inputs in zip(convolutions, streams, before, strict=True)
        )
        y_BTHP, scan_BHPN = self.scan(
            (x_BTI, dt_BTH, B_BTF, C_BTF),
            documents_BT,
            segments if state is None else state.scan_BHPN,
            metadata.keep_state,
        )
        if segments is not None:
            y_BTHP = segments.join(y_BTHP)
        if scan_BHPN is None:
            return y_BTHP, None
        x, B, C = (
            last_inputs(stream, documents_BT, inputs, self.mixer.kernel - 1)
            for stream, inputs in zip(streams, before, strict=True)
        )
        return y_BTHP, Mamba2State((x, B, C), scan_BHPN)


class Scan(nn.Module):
    """The recurrence, computed in float32 or better, and D x beside it. A module of its own, for its parameters keep
    float32 when those of the layer are cast."""

    def __init__(self, tensor: TensorAxis, heads: int, mixer: Mamba2):
        super().__init__()
        self.tensor, self.mixer = tensor, mixer
        self.A_log = tensor.parameter((heads,), Sharding.OUTPUT)
        self.D = tensor.parameter((heads,), Sharding.OUTPUT)
        self.dt_bias = tensor.parameter((heads,), Sharding.OUTPUT)

    def forward(
        self,
        streams: tuple[Tensor, Tensor, Tensor, Tensor],
        documents_BT: Tensor | None,
        before: Tensor | Segments | None,
        keep_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """streams: x, dt, B, C. before: the state, or the runs of a sample that other ranks have before these. Returns
        y_BTHP in the dtype of x, and the state if it is kept. Neither is a view in training: FSDP warns of those that
        its modules return."""
        dtype, exact = streams[0].dtype, upcast_dtype(streams[0])
        x_BTI, dt_BTH, B_BTF, C_BTF = (upcast(stream) for stream in streams)
        A_log_H, D_H, dt_bias_H = (
            self.tensor.local(each, Sharding.OUTPUT, exact) for each in (self.A_log, self.D, self.dt_bias)
        )
        x_BTHP = x_BTI.unflatten(-1, (-1, self.mixer.head_width))
        step_BTH = F.softplus(dt_BTH + dt_bias_H)
        inputs = ScanInputs(
            x_BTHP,
            step_BTH.clamp(min=self.mixer.min_step) if self.mixer.min_step else step_BTH,
            -A_log_H.exp(),
            B_BTF.unflatten(-1, (-1, self.mixer.state)),
            C_BTF.unflatten(-1, (-1, self.mixer.state)),
            documents_BT,
        )
        chunk = self.mixer.chunk_of(x_BTHP.shape[1])
        if isinstance(before, Segments):
            chunks = ChunkedScan(inputs, chunk)
            y_BTHP, state_BHPN = chunks.run(before.state_before(*chunks.summary()))
        else:
            y_BTHP, state_BHPN = scan(inputs, chunk, before)
        return torch.addcmul(y_BTHP, x_BTHP, D_H.unsqueeze(-1)).to(dtype), state_BHPN if keep_state else None


class GatedNorm(nn.Module):
    """RMSNorm of y * silu(z) over each group's channels, so that no tensor rank needs those of another."""

    def __init__(self, tensor: TensorAxis, inner: int, group_width: int, epsilon: float):
        super().__init__()
        self.tensor, self.group_width, self.epsilon = tensor, group_width, epsilon
        self.weight = tensor.parameter((inner,), Sharding.OUTPUT)

    def forward(self, y_BTI: Tensor, z_BTI: Tensor) -> Tensor:
        weight_I = self.tensor.local(self.weight, Sharding.OUTPUT, upcast_dtype(y_BTI))
        gated_BTGF = (upcast(y_BTI) * F.silu(upcast(z_BTI))).unflatten(-1, (-1, self.group_width))
        scale_BTG1 = gated_BTGF.square().mean(dim=-1, keepdim=True).add(self.epsilon).rsqrt()
        return ((gated_BTGF * scale_BTG1).flatten(-2) * weight_I).to(y_BTI.dtype)
