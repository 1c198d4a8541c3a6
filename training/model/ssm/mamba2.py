"""The Mamba-2 mixer: projections, causal convolutions, the scan, a gated norm, the output projection."""

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.config.mixers.mamba2 import Mamba2
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.metadata import AttentionMetadata, Segments
from gristmill.training.model.fused import fused
from gristmill.training.model.loss import upcast, upcast_dtype
from gristmill.training.model.ssm.convolution import CausalConvolution, last_inputs
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
    """State after the tokens so far: the last K - 1 inputs of the convolutions, [B, K - 1, channels] of x, B and C
    each, and the scan's state in float32 or better. Its size does not grow."""

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
        if metadata.keep_state or state is not None:
            y_BTHP, state = self._mixed(streams, dt_BTH, metadata, state)
        else:
            y_BTHP = metadata.mix(
                lambda *inputs: self._mixed(inputs[:3], inputs[3], metadata, None)[0], *streams, dt_BTH
            )
        return self.output(self.norm(y_BTHP.flatten(2), z_BTI)), state

    def _mixed(
        self, streams: Sequence[Tensor], dt_BTH: Tensor, metadata: AttentionMetadata, state: Mamba2State | None
    ) -> tuple[Tensor, Mamba2State | None]:
        """(y_BTHP, the state after the tokens if it is kept) of x, B and C: convolutions and scan."""
        convolutions = (self.x_convolution, self.B_convolution, self.C_convolution)
        documents_BT, segments = metadata.documents_BT, metadata.segments
        before: Sequence[Tensor | None] = (None, None, None)
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
    """The recurrence, computed in float32 or better (mamba_ssm's kernels read x, B and C in 16 bits and compute in
    float32 themselves), and D x beside it. A module of its own, for its parameters keep
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
        is_step, in_runs = streams[0].shape[1] == 1, isinstance(before, Segments)
        by_package = not is_step and not in_runs and backend_for(streams[0].device.type, dtype) == PACKAGE
        x_BTI, B_BTF, C_BTF = ((x if by_package else upcast(x)) for x in (streams[0], *streams[2:]))
        dt_BTH = upcast(streams[1])
        A_log_H, D_H, dt_bias_H = (
            self.tensor.local(parameter, Sharding.OUTPUT, exact) for parameter in (self.A_log, self.D, self.dt_bias)
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
        y_BTHP = torch.addcmul(upcast(y_BTHP), upcast(x_BTHP), D_H.unsqueeze(-1))
        return y_BTHP.to(dtype), state_BHPN if keep_state else None


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


# State-space duality (SSD, arXiv 2405.21060, section 6): Mamba-2's recurrence, computed in chunks by matmuls.
#
# S_t = exp(dt_t A) S_t-1 + dt_t x_t B_t^T and y_t = S_t C_t, for each head. Within a chunk that is attention without
# a softmax, whose weights decay; between chunks the state is passed on. docs/mixers.md works four tokens by hand.

# B rows, T tokens, H heads, P head width, G groups, R heads of a group, N state; c chunks of Q tokens each
# L, S: the tokens of a chunk, as those that read and those that are read


@dataclass(frozen=True)
class ScanInputs:
    """x_BTHP; dt_BTH: steps, positive; A_H: negative; B_BTGN and C_BTGN. documents_BT: int64, tokens of one document
    are neighbours, and the state is zero before its first; None: one document a row."""

    x_BTHP: Tensor
    dt_BTH: Tensor
    A_H: Tensor
    B_BTGN: Tensor
    C_BTGN: Tensor
    documents_BT: Tensor | None = None


ONE_LEVEL = 64  # chunks that are passed one after another


def ssd(inputs: ScanInputs, chunk: int, state_BHPN: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(y_BTHP, the state after the last token). state_BHPN: of the tokens before, which belong to the document of the
    first token."""
    return ChunkedScan(inputs, chunk).run(state_BHPN)


class ChunkedScan:
    """The chunks, each computed as if no token were before it; `run` passes the state on from chunk to chunk."""

    def __init__(self, inputs: ScanInputs, chunk: int):
        self.inputs = inputs
        self.chunks = _Chunks(inputs, min(chunk, inputs.x_BTHP.shape[1]))
        self.within_BcQGRP, self.added_BcGRPN = self.chunks.within()
        self.kept_BcGR, self.read_BcQGR = self.chunks.carried()

    def run(self, state_BHPN: Tensor | None) -> tuple[Tensor, Tensor]:
        """(y_BTHP, the state after the last token)."""
        tokens = self.inputs.x_BTHP.shape[1]
        before_BcGRPN, state_BGRPN = states_before(self.kept_BcGR, self.added_BcGRPN, self._first(state_BHPN))
        from_state = torch.einsum("bcqgn,bcgrpn->bcqgrp", self.chunks.C_BcQGN, before_BcGRPN)
        y_BcQGRP = self.within_BcQGRP + from_state * self.read_BcQGR.unsqueeze(-1)
        return y_BcQGRP.flatten(1, 2)[:, :tokens].flatten(2, 3), state_BGRPN.flatten(1, 2)

    def summary(self) -> tuple[Tensor, Tensor]:
        """(kept_BHPN, added_BHPN): the state after the last token is kept x the state before the first + added. The
        last two dimensions of kept are 1."""
        _, state_BGRPN = states_before(self.kept_BcGR, self.added_BcGRPN, self._first(None))
        return self.kept_BcGR.prod(dim=1).flatten(1)[..., None, None], state_BGRPN.flatten(1, 2)

    def _first(self, state_BHPN: Tensor | None) -> Tensor:
        rows, _, heads, head_width = self.inputs.x_BTHP.shape
        groups, size = self.inputs.B_BTGN.shape[2:]
        if state_BHPN is None:
            state_BHPN = self.inputs.x_BTHP.new_zeros(rows, heads, head_width, size)
        return state_BHPN.unflatten(1, (groups, -1))


def states_before(kept_BcGR: Tensor, added_BcGRPN: Tensor, state_BGRPN: Tensor) -> tuple[Tensor, Tensor]:
    """(the state before each chunk, [B, c, G, R, P, N]; the state behind the last one) of the recurrence state = kept x
    state + added over the chunks.

    Beyond ONE_LEVEL chunks in two levels: runs of chunks side by side, each as if no state came before it, then from
    run to run. 1,024 chunks, those of 128k tokens, take 64 steps in place of 1,024, which a compiler would unroll."""
    number = added_BcGRPN.shape[1]
    kept_Bc = kept_BcGR[..., None, None]
    if number <= ONE_LEVEL:
        before = []
        for index in range(number):
            before.append(state_BGRPN)
            state_BGRPN = state_BGRPN * kept_Bc[:, index] + added_BcGRPN[:, index]
        return torch.stack(before, dim=1), state_BGRPN
    length = math.isqrt(number - 1) + 1
    spare = -number % length
    # Spare chunks keep the state as it is and add nothing.
    kept_Brl = F.pad(kept_Bc, (0, 0) * 4 + (0, spare), value=1.0).unflatten(1, (-1, length))
    added_Brl = F.pad(added_BcGRPN, (0, 0) * 4 + (0, spare)).unflatten(1, (-1, length))
    within, share = [torch.zeros_like(added_Brl[:, :, 0])], [torch.ones_like(kept_Brl[:, :, 0])]
    for index in range(length):
        within.append(within[-1] * kept_Brl[:, :, index] + added_Brl[:, :, index])
        share.append(share[-1] * kept_Brl[:, :, index])
    before_Br, state_BGRPN = states_before(share[-1][..., 0, 0], within[-1], state_BGRPN)
    starts = before_Br.unsqueeze(2) * torch.stack(share[:-1], dim=2)
    before_Brl = torch.stack(within[:-1], dim=2) + starts
    return before_Brl.flatten(1, 2)[:, :number], state_BGRPN


class _Chunks:
    """The inputs in chunks; the last chunk is filled with tokens of step 0, which neither decay the state nor add."""

    def __init__(self, inputs: ScanInputs, size: int):
        groups = inputs.B_BTGN.shape[2]
        spare = -inputs.x_BTHP.shape[1] % size

        def chunks(values: Tensor) -> Tensor:
            padded = F.pad(values, (0, 0) * (values.dim() - 2) + (0, spare)) if spare else values
            return padded.unflatten(1, (-1, size))

        dt_BcQGR = chunks(inputs.dt_BTH).unflatten(-1, (groups, -1))
        self.B_BcQGN, self.C_BcQGN = chunks(inputs.B_BTGN), chunks(inputs.C_BTGN)
        self.added_BcQGRP = chunks(inputs.x_BTHP).unflatten(3, (groups, -1)) * dt_BcQGR.unsqueeze(-1)
        self.decay_BcQGR = (dt_BcQGR * inputs.A_H.unflatten(0, (groups, -1))).cumsum(dim=2)
        self.documents_BcQ = None
        if inputs.documents_BT is not None:
            last_B = inputs.documents_BT[:, -1:].expand(-1, spare)
            self.documents_BcQ = torch.cat([inputs.documents_BT, last_B], dim=1).unflatten(1, (-1, size))

    def within(self) -> tuple[Tensor, Tensor]:
        """(what tokens read of their own chunk, the state that each chunk adds)."""
        size, documents_BcQ = self.decay_BcQGR.shape[2], self.documents_BcQ
        decay_BcGRQ = self.decay_BcQGR.permute(0, 1, 3, 4, 2)
        seen = torch.ones(size, size, dtype=torch.bool, device=decay_BcGRQ.device).tril()
        if documents_BcQ is not None:
            seen = seen & (documents_BcQ.unsqueeze(-1) == documents_BcQ.unsqueeze(-2))[:, :, None, None]
        # Masked before exp: above the diagonal it would overflow, and its gradient would be no number.
        weights_BcGRLS = (decay_BcGRQ.unsqueeze(-1) - decay_BcGRQ.unsqueeze(-2)).masked_fill(~seen, -torch.inf).exp()
        scores_BcGLS = torch.einsum("bclgn,bcsgn->bcgls", self.C_BcQGN, self.B_BcQGN)
        weighted_BcGRLS = weights_BcGRLS * scores_BcGLS.unsqueeze(3)
        within = torch.einsum("bcgrls,bcsgrp->bclgrp", weighted_BcGRLS, self.added_BcQGRP)
        to_end_BcQGR = (self.decay_BcQGR[:, :, -1:] - self.decay_BcQGR).exp()
        if documents_BcQ is not None:
            to_end_BcQGR = to_end_BcQGR * _mask(documents_BcQ == documents_BcQ[:, :, -1:], to_end_BcQGR)
        states = torch.einsum("bcqgn,bcqgrp->bcgrpn", self.B_BcQGN, self.added_BcQGRP * to_end_BcQGR.unsqueeze(-1))
        return within, states

    def carried(self) -> tuple[Tensor, Tensor]:
        """(the share of the state before a chunk that is left after it, the share that each of its tokens reads)."""
        read_BcQGR = self.decay_BcQGR.exp()
        if self.documents_BcQ is not None:
            first_B1, last_Bc = self.documents_BcQ[:, :1, 0], self.documents_BcQ[:, :, -1]
            before_Bc = torch.cat([first_B1, last_Bc[:, :-1]], dim=1)
            read_BcQGR = read_BcQGR * _mask(self.documents_BcQ == before_Bc.unsqueeze(-1), read_BcQGR)
        return read_BcQGR[:, :, -1], read_BcQGR


def _mask(same_BcQ: Tensor, like: Tensor) -> Tensor:
    return same_BcQ[..., None, None].to(like.dtype)


# Chooses how SSD's scan is computed: the Triton kernels of mamba_ssm where that package is installed, else the
# chunked scan of ssm/mamba2.py, compiled on GPUs and as it is on CPUs.

PACKAGE = "mamba_ssm"
KERNELS = "mamba_ssm.ops.triton.ssd_combined"


def scan(inputs: ScanInputs, chunk: int, state_BHPN: Tensor | None) -> tuple[Tensor, Tensor]:
    """(y_BTHP, the state after the last token), as `ssd` gives them. A single token is one step of the recurrence."""
    if state_BHPN is not None and inputs.x_BTHP.shape[1] == 1:
        return step(inputs, state_BHPN)
    backend = backend_for(inputs.x_BTHP.device.type, inputs.x_BTHP.dtype)
    if backend == PACKAGE:
        return by_kernels(importlib.import_module(KERNELS), inputs, chunk, state_BHPN)
    return (fused(ssd) if backend == "compiled" else ssd)(inputs, chunk, state_BHPN)


def step(inputs: ScanInputs, state_BHPN: Tensor) -> tuple[Tensor, Tensor]:
    """One token of decoding: S = exp(dt A) S + dt x B^T, y = S C."""
    heads = inputs.A_H.shape[0] // inputs.B_BTGN.shape[2]
    B_BHN, C_BHN = (part[:, 0].repeat_interleave(heads, dim=1) for part in (inputs.B_BTGN, inputs.C_BTGN))
    dt_BH = inputs.dt_BTH[:, 0]
    added_BHP = inputs.x_BTHP[:, 0] * dt_BH.unsqueeze(-1)
    decay_BH11 = (dt_BH * inputs.A_H).exp()[..., None, None]
    state_BHPN = torch.addcmul(state_BHPN * decay_BH11, added_BHP.unsqueeze(-1), B_BHN.unsqueeze(-2))
    return (state_BHPN @ C_BHN.unsqueeze(-1)).squeeze(-1).unsqueeze(1), state_BHPN


def backend_for(device: str, dtype: torch.dtype) -> str:
    """mamba_ssm, compiled or plain. float64 is for comparisons, so nothing is approximated there."""
    if device != "cuda" or dtype == torch.float64:
        return "plain"
    return PACKAGE if importlib.util.find_spec(PACKAGE) is not None else "compiled"


def by_kernels(kernels: Any, inputs: ScanInputs, chunk: int, state_BHPN: Tensor | None) -> tuple[Tensor, Tensor]:
    """kernels: the module of mamba_ssm, whose chunks have a power of two of tokens, 16 at least. Its steps come with
    bias and softplus done, and its documents are numbered from 0 in each row."""
    documents_BT = inputs.documents_BT
    if documents_BT is not None:
        starts_BT = torch.nn.functional.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
        documents_BT = starts_BT.cumsum(dim=1).int()
    return kernels.mamba_chunk_scan_combined(
        inputs.x_BTHP,
        inputs.dt_BTH,
        inputs.A_H,
        inputs.B_BTGN,
        inputs.C_BTGN,
        chunk_size=max(16, 1 << (chunk.bit_length() - 1)),
        initial_states=state_BHPN,
        seq_idx=documents_BT,
        return_final_states=True,
    )
