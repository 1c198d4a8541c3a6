"""The TCNCA mixer: dilated causal convolutions, attention inside chunks, and MEGA's gates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.config.mixers.tcnca import Tcnca
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.metadata import AttentionMetadata, Segments
from gristmill.training.model.decoding_cache import RingBuffer
from gristmill.training.model.loss import upcast
from gristmill.training.model.ssm.convolution import CausalConvolution, last_inputs
from gristmill.training.parallel.tensor import ColumnParallelLinear, Sharding, TensorAxis

# B rows, T tokens, D width, Z width of queries and keys, V width of values, C tokens of a chunk, L inputs kept
# a small t = this tensor rank's share


Streams = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, or keys, values and the numbers of their chunks


@dataclass(frozen=True)
class TcncaState:
    """State after the tokens so far: the inputs that each convolution still needs, the last C keys and values, and for
    each row how many tokens of its document there were. Its size does not grow."""

    inputs: tuple[RingBuffer, ...]
    keys: RingBuffer
    values: RingBuffer
    position_B: Tensor

    def keys_before(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the last C tokens in their order, and 0 for those of the last token's chunk if that goes
        on, -1 for others: int64[B, C]."""
        size = self.keys.length
        back_C = torch.arange(size, 0, -1, device=self.position_B.device)
        goes_on_BC = back_C <= self.position_B.unsqueeze(1) % size
        return self.keys.in_order(), self.values.in_order(), goes_on_BC.long() - 1

    def take(self, rows: Tensor) -> "TcncaState":
        """The state of the given batch rows, in that order."""
        inputs = tuple(stream.take(rows) for stream in self.inputs)
        return TcncaState(inputs, self.keys.take(rows), self.values.take(rows), self.position_B[rows])


class TcncaMixer(nn.Module):
    """With x' = convolutions(x), z = silu(S x'), q and k = z scaled and shifted, v = silu(V x) and o = attention of q,
    k and v in chunks, the result is u (h - x), where u = sigmoid(U x') and h = silu(H x' + O (silu(R x') o)). The layer
    adds it to its input: under norm_order post that is MEGA's u h + (1 - u) x. Without gates it is O o, and v = V x'.

    Each tensor rank has its share of the channels of the convolutions and of the values; queries and keys are the same
    on all."""

    def __init__(self, config: ModelConfig, mixer: Tcnca, tensor: TensorAxis):
        super().__init__()
        self.tensor, self.mixer = tensor, mixer
        width, shared, values = config.width, mixer.shared_width(config.width), mixer.expand * config.width
        self.scale = 8 / shared if config.init_method == "mup" else shared**-0.5
        convolutions = [CausalConvolution(tensor, width, mixer.kernel, dilation) for dilation in mixer.dilations]
        self.convolutions: Sequence[CausalConvolution] = nn.ModuleList(convolutions)  # type: ignore[assignment]
        self.shared = InputShare(tensor, width, shared, Sharding.REPLICATED_OVER_HEADS)
        self.query_key = ScaleAndShift(tensor, shared)
        self.distances = DistanceBias(tensor, mixer.chunk)
        self.value = ColumnParallelLinear(tensor, width, values, True)
        if mixer.gated:
            self.reset = ColumnParallelLinear(tensor, width, values, True)
            self.candidate = InputShare(tensor, width, width, Sharding.REPLICATED)
            self.update = InputShare(tensor, width, width, Sharding.REPLICATED)
        self.output = InputShare(tensor, values, width)

    def forward(
        self, x_BTD: Tensor, metadata: AttentionMetadata, state: TcncaState | None = None
    ) -> tuple[Tensor, TcncaState | None]:
        """The mixed tokens and, if the metadata keeps state, the state after them."""
        all_BTD = self.tensor.enter(x_BTD)
        own_BTDt = self.tensor.own_channels(all_BTD)
        inputs: tuple[RingBuffer, ...] = ()
        kept: tuple[RingBuffer, RingBuffer, Tensor] | None = None
        trains = state is None and not metadata.keep_state
        if trains:
            mixed_BTDt = metadata.mix(lambda own_BTDt: self._convolved(own_BTDt, metadata, None)[0], own_BTDt)
        else:
            mixed_BTDt, inputs = self._convolved(own_BTDt, metadata, state)
        mixed_BTD = self.tensor.gather_channels(mixed_BTDt)
        summed_BTZ = self.tensor.sum_for_all(self.shared(mixed_BTDt))
        query_BTZ, key_BTZ = self.query_key(F.silu(summed_BTZ + self.shared.local_bias(x_BTD.dtype)))
        value_BTVt = F.silu(self.value(all_BTD)) if self.mixer.gated else self.value(mixed_BTD)
        streams = query_BTZ * self.scale, key_BTZ, value_BTVt
        if trains:
            read_BTVt = metadata.mix(lambda q, k, v: self._attended((q, k, v), metadata, None)[0], *streams)
        else:
            read_BTVt, kept = self._attended(streams, metadata, state)
        y_BTD = self._gate(read_BTVt, mixed_BTDt, mixed_BTD, x_BTD)
        return y_BTD, None if kept is None else TcncaState(inputs, *kept)

    def _convolved(
        self, own_BTDt: Tensor, metadata: AttentionMetadata, state: TcncaState | None
    ) -> tuple[Tensor, tuple[RingBuffer, ...]]:
        """(this rank's channels after the convolutions, the buffers of their inputs if the metadata keeps state)."""
        segments = metadata.segments
        if segments is not None:
            return segments.join(self._convolve_segments(segments.split(own_BTDt), segments)), ()
        documents_BT = None if _steps(own_BTDt, metadata, state) else metadata.documents_BT
        return self._convolve(own_BTDt, documents_BT, state, metadata.keep_state)

    def _attended(
        self, streams: Streams, metadata: AttentionMetadata, state: TcncaState | None
    ) -> tuple[Tensor, tuple[RingBuffer, RingBuffer, Tensor] | None]:
        """(what queries read of keys and values, these and the position if the metadata keeps state)."""
        segments = metadata.segments
        if segments is not None:
            return self._read_segments(streams, segments), None
        if state is not None and _steps(streams[0], metadata, state):
            return self._read_ring(streams, state)
        return self._read(streams, metadata.documents_BT, state, metadata.keep_state)

    def _convolve(
        self, x_BTDt: Tensor, documents_BT: Tensor | None, state: TcncaState | None, keep: bool
    ) -> tuple[Tensor, tuple[RingBuffer, ...]]:
        """Blocks of convolutions with silu, each block added to its input."""
        buffers: list[RingBuffer] = []
        change_BTDt = x_BTDt
        for index, convolution in enumerate(self.convolutions):
            buffer = None if state is None else state.inputs[index]
            result_BTDt, buffer = _convolve(convolution, change_BTDt, documents_BT, buffer, keep)
            buffers += [buffer] if buffer is not None and keep else []
            change_BTDt = F.silu(result_BTDt)
            if (index + 1) % self.mixer.depth == 0:
                change_BTDt = x_BTDt = x_BTDt + change_BTDt
        return x_BTDt, tuple(buffers)

    def _convolve_segments(self, x_RLDt: Tensor, segments: Segments) -> Tensor:
        """The same on the runs of a context rank, each convolution with the last inputs of the runs before."""
        change_RLDt = x_RLDt
        for index, convolution in enumerate(self.convolutions):
            before_RKDt = segments.before(change_RLDt, convolution.reach) if convolution.reach else None
            change_RLDt = F.silu(convolution(change_RLDt, segments.documents_RL, before_RKDt))
            if (index + 1) % self.mixer.depth == 0:
                change_RLDt = x_RLDt = x_RLDt + change_RLDt
        return x_RLDt

    def _read_segments(self, streams: Streams, segments: Segments) -> Tensor:
        """Attention of the runs of a context rank, whose chunks may begin in the runs before."""
        query_RLZ, key_RLZ, value_RLVt = (segments.split(stream) for stream in streams)
        bias_C, tokens = self.distances(), segments.shares.tokens
        size, rows = len(bias_C), len(streams[0])
        like_BT = segments.shares.own_T.new_empty(rows, tokens)
        chunk_BT = chunk_numbers(position_in_document(segments.documents_BT, None, like_BT), size)
        chunk_RL = segments.own(chunk_BT)
        before = (
            segments.before(key_RLZ, size),
            segments.before(value_RLVt, size),
            segments.known_before(chunk_BT, size, fill=-1),
        )
        joined = _joined(before, (key_RLZ, value_RLVt, chunk_RL))
        return segments.join(attend_in_packed_chunks(query_RLZ, joined, chunk_RL, bias_C))

    def _read(
        self, streams: Streams, documents_BT: Tensor | None, state: TcncaState | None, keep: bool
    ) -> tuple[Tensor, tuple[RingBuffer, RingBuffer, Tensor] | None]:
        """Attention over whole sequences, or over many new tokens after those of the state."""
        query_BTZ, key_BTZ, value_BTVt = streams
        bias_C = self.distances()
        if state is None and documents_BT is None and not keep:
            return attend_in_chunks(query_BTZ, key_BTZ, value_BTVt, bias_C), None
        before_B, size = None if state is None else state.position_B, len(bias_C)
        position_BT = position_in_document(documents_BT, before_B, key_BTZ)
        chunk_BT = chunk_numbers(position_BT, size)
        before = _no_keys(streams, size) if state is None else state.keys_before()
        joined = _joined(before, (key_BTZ, value_BTVt, chunk_BT))
        read_BTVt = attend_in_packed_chunks(query_BTZ, joined, chunk_BT, bias_C)
        if not keep:
            return read_BTVt, None
        keys, values = (RingBuffer.of(part[:, part.shape[1] - size :]) for part in joined[:2])
        return read_BTVt, (keys, values, position_BT[:, -1] + 1)

    def _read_ring(self, streams: Streams, state: TcncaState) -> tuple[Tensor, tuple[RingBuffer, RingBuffer, Tensor]]:
        """Attention of one new token, over the buffers that it is written to."""
        query_B1Z, key_B1Z, value_B1Vt = streams
        keys, values = state.keys.append(key_B1Z[:, 0]), state.values.append(value_B1Vt[:, 0])
        (slots_BCZ, back_C), (values_BCVt, _) = keys.slots(), values.slots()
        buffers = slots_BCZ, values_BCVt, back_C - 1
        read_B1Vt = attend_in_ring(query_B1Z, buffers, state.position_B, self.distances())
        return read_B1Vt, (keys, values, state.position_B + 1)

    def _gate(self, read_BTVt: Tensor, mixed_BTDt: Tensor, mixed_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        """One reduction for the sums of candidate and update gate, or for the output alone."""
        if not self.mixer.gated:
            return self.tensor.leave(self.output(read_BTVt))
        candidate_BTD = self.candidate(mixed_BTDt) + self.output(F.silu(self.reset(mixed_BTD)) * read_BTVt)
        both_BTE = self.tensor.leave(torch.cat([candidate_BTD, self.update(mixed_BTDt)], dim=-1))
        candidate_BTD, update_BTD = both_BTE.chunk(2, dim=-1)
        candidate_BTD = F.silu(candidate_BTD + self.candidate.local_bias(x_BTD.dtype))
        return torch.sigmoid(update_BTD + self.update.local_bias(x_BTD.dtype)) * (candidate_BTD - x_BTD)


def _convolve(
    convolution: CausalConvolution, x_BTC: Tensor, documents_BT: Tensor | None, buffer: RingBuffer | None, keep: bool
) -> tuple[Tensor, RingBuffer | None]:
    """(the convolution, the buffer of its inputs after these tokens if it is kept)."""
    if buffer is not None and keep and x_BTC.shape[1] == 1:
        back = range(convolution.reach, 0, -convolution.dilation)
        taps_BKC = torch.cat([buffer.at(back), x_BTC], dim=1)
        return convolution.step(taps_BKC), buffer.append(x_BTC[:, 0])
    before_BLC = None if buffer is None else buffer.in_order()
    result_BTC = convolution(x_BTC, documents_BT, before_BLC)
    if not keep:
        return result_BTC, None
    return result_BTC, RingBuffer.of(last_inputs(x_BTC, documents_BT, before_BLC, convolution.reach))


def _steps(x_BTF: Tensor, metadata: AttentionMetadata, state: TcncaState | None) -> bool:
    """Whether one token follows those of the state."""
    return state is not None and x_BTF.shape[1] == 1 and metadata.keep_state


def _joined(before: Streams, new: Streams) -> Streams:
    keys, values, numbers = (torch.cat(pair, dim=1) for pair in zip(before, new, strict=True))
    return keys, values, numbers


def _no_keys(streams: Streams, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values before the first token of all, and the number of no chunk."""
    _, key_BTZ, value_BTV = streams
    empty = [part.new_zeros(len(part), size, part.shape[2]) for part in (key_BTZ, value_BTV)]
    return empty[0], empty[1], torch.full((len(key_BTZ), size), -1, device=key_BTZ.device)


class InputShare(nn.Module):
    """x W^T of this rank's inputs: its share of a sum over the tensor ranks, to which the caller adds the bias.
    bias: how the ranks see the bias; None: there is none."""

    def __init__(self, tensor: TensorAxis, inputs: int, outputs: int, bias: Sharding | None = None):
        super().__init__()
        self.tensor, self.sharding = tensor, bias
        self.weight = tensor.parameter((outputs, inputs), Sharding.INPUT)
        self.bias = None if bias is None else tensor.parameter((outputs,), bias)

    def forward(self, x_BTFt: Tensor) -> Tensor:
        return F.linear(x_BTFt, self.tensor.local(self.weight, Sharding.INPUT, x_BTFt.dtype))

    def local_bias(self, dtype: torch.dtype) -> Tensor:
        assert self.bias is not None and self.sharding is not None
        return self.tensor.local(self.bias, self.sharding, dtype)


class ScaleAndShift(nn.Module):
    """Query and key, each z with a scale and a shift of its own for every channel."""

    def __init__(self, tensor: TensorAxis, width: int):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((2, width), Sharding.REPLICATED_OVER_HEADS)
        self.bias = tensor.parameter((2, width), Sharding.REPLICATED_OVER_HEADS)

    def forward(self, z_BTZ: Tensor) -> tuple[Tensor, Tensor]:
        weight_2Z, bias_2Z = (
            self.tensor.local(parameter, Sharding.REPLICATED_OVER_HEADS, z_BTZ.dtype)
            for parameter in (self.weight, self.bias)
        )
        query_BTZ, key_BTZ = (z_BTZ * weight_2Z[index] + bias_2Z[index] for index in (0, 1))
        return query_BTZ, key_BTZ


class DistanceBias(nn.Module):
    """A number for each distance inside a chunk, added to the scores."""

    def __init__(self, tensor: TensorAxis, chunk: int):
        super().__init__()
        self.tensor = tensor
        self.bias = tensor.parameter((chunk,), Sharding.REPLICATED_OVER_HEADS)

    def forward(self) -> Tensor:
        return self.tensor.local(self.bias, Sharding.REPLICATED_OVER_HEADS, self.bias.dtype)


# Causal attention inside chunks of consecutive tokens of a document, with a bias for each distance.

# B rows, T tokens, Z width of queries and keys, V width of values; n blocks of C tokens, C tokens of a chunk
# Q queries of a block, S keys that they may see


def position_in_document(documents_BT: Tensor | None, before_B: Tensor | None, like_BT: Tensor) -> Tensor:
    """int64[B, T]: number of tokens of its document before each token. before_B: for the document of the first token,
    how many there were before these; None: none."""
    rows, tokens = like_BT.shape[:2]
    index_BT = torch.arange(tokens, device=like_BT.device).expand(rows, -1)
    first_B1 = 0 if before_B is None else before_B.unsqueeze(1)
    if documents_BT is None:
        return index_BT + first_B1
    starts_BT = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
    start_BT = torch.where(starts_BT, index_BT, 0).cummax(dim=1).values
    return index_BT - start_BT + torch.where(start_BT == 0, first_B1, 0)


def chunk_numbers(position_BT: Tensor, chunk: int) -> Tensor:
    """int64[B, T]: equal for the tokens of one chunk; 0 for those that continue the chunk of the token before.

    positions 2, 3, 0, 1 and 2 with chunks of 2 -> 1, 1, 2, 2, 3."""
    return (position_BT % chunk == 0).cumsum(dim=1)


def attend_in_chunks(query_BTZ: Tensor, key_BTZ: Tensor, value_BTV: Tensor, bias_C: Tensor) -> Tensor:
    """Attention in chunks of rows that are one document each: token t sees those of its chunk t // C up to itself.
    softmax(q k^T + bias of the distance) v, with scores and softmax in float32 or better."""
    tokens, size = query_BTZ.shape[1], min(len(bias_C), query_BTZ.shape[1])
    spare = -tokens % size

    def blocks(x_BTF: Tensor) -> Tensor:
        return (F.pad(x_BTF, (0, 0, 0, spare)) if spare else x_BTF).unflatten(1, (-1, size))

    back_QS = _back(size, size, query_BTZ.device)
    mixed_BnQV = _attend(blocks(query_BTZ), blocks(key_BTZ), blocks(value_BTV), (bias_C, back_QS, back_QS >= 0))
    return mixed_BnQV.flatten(1, 2)[:, :tokens]


def attend_in_packed_chunks(
    query_BTZ: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
    chunk_BT: Tensor,
    bias_C: Tensor,
) -> Tensor:
    """As `attend_in_chunks`, where chunks begin anywhere. keys: key_BSZ, value_BSV and chunk_BS, whose first C columns
    are of tokens before these (with number -1 where they are of another chunk). A chunk that starts in one block of C
    tokens ends in the next, so a block of queries sees two blocks of keys."""
    key_BSZ, value_BSV, chunk_BS = keys
    tokens, size = query_BTZ.shape[1], len(bias_C)
    block = min(size, tokens)
    spare = -tokens % block
    query_BnQZ = F.pad(query_BTZ, (0, 0, 0, spare)).unflatten(1, (-1, block))
    chunk_BnQ1 = F.pad(chunk_BT, (0, spare), value=-2).unflatten(1, (-1, block)).unsqueeze(-1)

    def seen(x_BSF: Tensor) -> Tensor:
        return x_BSF.unfold(1, size + block, block).transpose(2, 3)

    back_QS = _back(block, size + block, query_BTZ.device)
    padded_BS = F.pad(chunk_BS, (0, spare), value=-1)
    same_BnQS = chunk_BnQ1 == padded_BS.unfold(1, size + block, block).unsqueeze(2)
    # A query behind the last token sees itself alone, so that its softmax is a number.
    visible_BnQS = (same_BnQS & (back_QS >= 0)) | (back_QS == 0)
    keys_BnSZ, values_BnSV = (seen(F.pad(part, (0, 0, 0, spare))) for part in (key_BSZ, value_BSV))
    mixed_BnQV = _attend(query_BnQZ, keys_BnSZ, values_BnSV, (bias_C, back_QS, visible_BnQS))
    return mixed_BnQV.flatten(1, 2)[:, :tokens]


def attend_in_ring(
    query_B1Z: Tensor, buffers: tuple[Tensor, Tensor, Tensor], position_B: Tensor, bias_C: Tensor
) -> Tensor:
    """[B, 1, V]: of one new token at a position of its document. buffers: key_BCZ, value_BCV and the distance of each
    slot, int64[C]; the token's own are in them."""
    key_BCZ, value_BCV, back_C = buffers
    visible_B1C = (back_C <= position_B.unsqueeze(1) % len(bias_C)).unsqueeze(1)
    return _attend(query_B1Z, key_BCZ, value_BCV, (bias_C, back_C.unsqueeze(0), visible_B1C))


def _attend(query: Tensor, key: Tensor, value: Tensor, places: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """places: bias by distance, distance of each pair [Q, S], and which of them count."""
    bias_C, back_QS, visible = places
    bias_QS = upcast(bias_C)[back_QS.clamp(0, len(bias_C) - 1)]
    scores = upcast(query @ key.mT) + bias_QS
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1).to(value.dtype) @ value


def _back(queries: int, keys: int, device: torch.device) -> Tensor:
    """int64[Q, S]: distance of each key before each query, the last key and the last query being one token."""
    index_Q = torch.arange(keys - queries, keys, device=device)
    return index_Q.unsqueeze(1) - torch.arange(keys, device=device)
