"""A pass over tokens of slots in few calls, for layers of the common form on a CPU in float32.

The modules of a layer take 0.7 ms for one token, of which the products take 0.03, and half of the time of 600 tokens
(one core of a Xeon with AVX-512, 2026-11-28). Here the tokens of all rows are one matrix without padding; what is
between the products are kernels of numba, and the last layer computes the wanted tokens alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.training.model.attention.attention import GroupedQueryAttention
from gristmill.training.model.attention.metadata import NO_HOOK, AttentionMetadata
from gristmill.training.model.attention.slot_attention import (
    AttendedBeginnings,
    SlotPlaces,
    attend_tokens,
    write_tokens,
)
from gristmill.training.model.cpu_kernels import FAST, exp_without_power
from gristmill.training.model.decoding_cache import KVSlots, SlotRows
from gristmill.training.model.layer import Layer
from gristmill.training.model.modules import GatedMlp, Norm, SwiGLU
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.linear import add_product, adjacent, lie_by_input, linear
from gristmill.training.parallel.tensor import ColumnParallelLinear, RowParallelLinear

# B rows, T tokens of a row, N tokens of all rows, D width, F outputs, H query heads, G key/value heads, K head width
# C columns of a slot, R query heads of a group

MIN_BLOCK_TOKENS = 12  # of a row whose attention is a product; fewer are attended to token by token


@dataclass(frozen=True)
class FlatTokens:
    """The tokens of a pass, row behind row without padding. slots_N, positions_N: int64. spans: (first token, tokens)
    of each row. wanted_N: the last token of each row where the pass wants no others, else None."""

    rows: SlotRows
    positions_1N: Tensor
    slots_N: np.ndarray
    positions_N: np.ndarray
    spans: list[tuple[int, int]]
    wanted_N: Tensor | None

    @staticmethod
    def of(rows: SlotRows, places: np.ndarray | None = None) -> "FlatTokens":
        """places: int64, where each slot is in memory; None: by its number."""
        positions_BT = rows.positions_BT.numpy()
        slots_B = rows.slots_B.numpy() if places is None else places[rows.slots_B.numpy()]
        slots_BT = np.broadcast_to(slots_B[:, None], positions_BT.shape)
        kept_BT = positions_BT >= 0
        positions_N = positions_BT[kept_BT]
        lengths = kept_BT.sum(axis=1)
        ends = np.cumsum(lengths)
        spans = list(zip((ends - lengths).tolist(), lengths.tolist(), strict=True))
        positions_1N = torch.from_numpy(positions_N).unsqueeze(0)
        # A row without tokens, such as one whose prompt is read elsewhere, has any hidden state.
        wanted_N = torch.from_numpy(np.maximum(ends - 1, 0)) if rows.last_only else None
        return FlatTokens(rows, positions_1N, slots_BT[kept_BT], positions_N, spans, wanted_N)

    def flat(self, tokens_BT: Tensor) -> Tensor:
        """[1, N] of [B, T]."""
        if not self.rows.padded:
            return tokens_BT.reshape(1, -1)
        return tokens_BT[self.rows.positions_BT >= 0].unsqueeze(0)

    def by_row(self, hidden_ND: Tensor) -> Tensor:
        """[B, T, D] of [N, D], zeros for padding; of wanted tokens [B, 1, D]."""
        if self.wanted_N is not None:
            return hidden_ND.unsqueeze(1)
        positions_BT = self.rows.positions_BT
        if not self.rows.padded:
            return hidden_ND.view(*positions_BT.shape, -1)
        hidden_BTD = hidden_ND.new_zeros(*positions_BT.shape, hidden_ND.shape[-1])
        hidden_BTD[positions_BT >= 0] = hidden_ND
        return hidden_BTD


class FlatLayers:
    """The layers of a model, if all are of the common form: grouped-query attention, then a gated MLP on the residual
    stream, with RMSNorms before, behind or both, also of queries and keys. `of` gives None for others.

    Weights lie as `place_decoding_weights` puts them, and do not move."""

    def __init__(self, model: Transformer):
        self.model = model
        self.layers = [_FlatLayer(layer) for layer in model.layers.values()]
        self.final_norm = None if model.final_norm is None else _FlatNorm(model.final_norm)

    @staticmethod
    def of(model: Transformer) -> "FlatLayers | None":
        whole = model.embedding is not None and model.head is not None and model.config.positions != "alibi"
        norm = model.final_norm
        if not whole or not (norm is None or _is_plain_norm(norm)) or not all(map(_is_common, model.layers.values())):
            return None
        return FlatLayers(model)

    def hidden(self, tokens_BT: Tensor, tokens: FlatTokens, slots: Sequence[KVSlots]) -> Tensor:
        """Hidden states [B, T, D] behind the final norm, or those of the wanted tokens, [B, 1, D]."""
        metadata = self.model.unmasked_metadata(tokens.positions_1N)
        x_ND = self.model.embed(tokens.flat(tokens_BT), metadata)[0]
        attention = _Attention(tokens, metadata)
        for number, (layer, layer_slots) in enumerate(zip(self.layers, slots, strict=True), start=1):
            x_ND = layer.forward(x_ND, attention, layer_slots, tokens.wanted_N if number == len(self.layers) else None)
        return tokens.by_row(x_ND if self.final_norm is None else self.final_norm.normed(x_ND))


def _is_common(layer: Layer) -> bool:
    mixer, mlp = layer.mixer, layer.mlp
    if type(mixer) is not GroupedQueryAttention or not isinstance(mlp, GatedMlp):
        return False
    is_plain = layer.hook is NO_HOOK and layer.norm_order != "post" and not layer.parallel
    is_plain = is_plain and mixer.softcap is None and mixer.clip is None
    norms = [module for module in layer.modules() if isinstance(module, Norm)]
    return is_plain and all(map(_is_plain_norm, norms)) and _are_placed(mixer, mlp)


def _is_plain_norm(norm: Norm) -> bool:
    return not norm.centred and norm.split_over is None and norm.bias is None


def _are_placed(mixer: GroupedQueryAttention, mlp: GatedMlp) -> bool:
    """Whether the products are those of `place_decoding_weights`, with biases of query, key and value at most."""
    joint = [[mixer.query, mixer.key, mixer.value], [mlp.gate, mlp.up]]
    alone = [mixer.output, mlp.down]
    kinds = [type(layer) is ColumnParallelLinear for group in joint for layer in group]
    kinds += [type(layer) is RowParallelLinear for layer in alone]
    if not all(kinds) or mixer.tensor.size > 1 or mixer.tensor.float8:
        return False
    if any(layer.bias is not None for layer in (mixer.output, mlp.gate, mlp.up, mlp.down)):
        return False
    weights = [layer.get_parameter("weight") for layer in (*joint[0], *joint[1], *alone)]
    is_plain = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    return is_plain and all(map(lie_by_input, weights)) and adjacent(weights[:3]) and adjacent(weights[3:5])


def _joint(layers: Sequence[nn.Module]) -> Tensor:
    """The weights [F, D] of layers above each other, which lie so."""
    weights = [layer.get_parameter("weight").detach() for layer in layers]
    return weights[0].as_strided((sum(map(len, weights)), weights[0].shape[1]), weights[0].stride())


class _FlatNorm:
    @staticmethod
    def of(norm: Norm | None) -> "_FlatNorm | None":
        return None if norm is None else _FlatNorm(norm)

    def __init__(self, norm: Norm):
        weight_D = torch.ones(norm.width) if norm.weight is None else norm.weight.detach()
        self.weight_D = (1 + weight_D if norm.plus_one and norm.weight is not None else weight_D).contiguous().numpy()
        self.epsilon = norm.epsilon

    def normed(self, x_ND: Tensor) -> Tensor:
        normed_ND = torch.empty_like(x_ND)
        _rms_norm(x_ND.numpy(), self.weight_D, self.epsilon, normed_ND.numpy())
        return normed_ND

    def norm_parts(self, joint_NF: Tensor, first: int, numbers: int) -> None:
        """Norms so many numbers of each row, from the first on, in place: as many at a time as have a weight."""
        _norm_parts(joint_NF.numpy(), first, numbers // len(self.weight_D), self.weight_D, self.epsilon)


def _normed(norm: _FlatNorm | None, x_ND: Tensor) -> Tensor:
    return x_ND if norm is None else norm.normed(x_ND)


class _FlatLayer:
    """One layer: its weights and its form."""

    def __init__(self, layer: Layer):
        mixer, mlp = layer.mixer, layer.mlp
        assert isinstance(mixer, GroupedQueryAttention) and isinstance(mlp, GatedMlp)
        inputs = layer.norm_order in ("pre", "sandwich")
        outputs = layer.norm_order == "output"
        self.mixer_norm = _FlatNorm.of(layer.mixer_norm if inputs else None)
        self.mlp_norm = _FlatNorm.of(layer.mlp_norm if inputs else None)
        self.mixer_output_norm = _FlatNorm.of(layer.mixer_norm if outputs else layer.mixer_output_norm)
        self.mlp_output_norm = _FlatNorm.of(layer.mlp_norm if outputs else layer.mlp_output_norm)
        self.query_norm, self.key_norm = _FlatNorm.of(mixer.query_norm), _FlatNorm.of(mixer.key_norm)
        self.residual_scale = layer.scale
        self.window, self.rotates, self.scale = mixer.window, mixer.rotates, mixer.scale
        self.width, self.groups = mixer.head_dim, mixer.num_groups
        self.heads = len(mixer.query.get_parameter("weight")) // self.width
        projections = [mixer.query, mixer.key, mixer.value]
        self.projection_FD = _joint(projections)
        self.bias_F = None
        if mixer.query.bias is not None:
            self.bias_F = torch.cat([layer.get_parameter("bias").detach() for layer in projections])
        self.output_DF = mixer.output.weight.detach()
        self.mlp, self.gate_up_FD, self.down_DF = mlp, _joint([mlp.gate, mlp.up]), mlp.down.weight.detach()

    def forward(self, x_ND: Tensor, attention: "_Attention", slots: KVSlots, wanted_N: Tensor | None) -> Tensor:
        """The stream behind this layer, of the wanted tokens where some are wanted. x is overwritten."""
        mixed_NF = attention.mix(self, _normed(self.mixer_norm, x_ND), slots, wanted_N)
        x_ND = x_ND if wanted_N is None else x_ND[wanted_N]
        x_ND = self._add(x_ND, mixed_NF, self.output_DF, self.mixer_output_norm)
        gate_up_NF = linear(_normed(self.mlp_norm, x_ND), self.gate_up_FD, None)
        return self._add(x_ND, self._gated(gate_up_NF), self.down_DF, self.mlp_output_norm)

    def _add(self, x_ND: Tensor, y_NF: Tensor, weight_DF: Tensor, norm: "_FlatNorm | None") -> Tensor:
        if norm is None and self.residual_scale == 1:
            return add_product(x_ND, y_NF, weight_DF)
        return x_ND.add_(_normed(norm, linear(y_NF, weight_DF, None)), alpha=self.residual_scale)

    def _gated(self, gate_up_NF: Tensor) -> Tensor:
        if type(self.mlp) is not SwiGLU:
            gate_NF, up_NF = gate_up_NF.chunk(2, dim=1)
            return self.mlp.activation(gate_NF).mul_(up_NF)
        hidden_NF = gate_up_NF.new_empty(len(gate_up_NF), self.down_DF.shape[1])
        silu_product(gate_up_NF.numpy(), hidden_NF.numpy())
        return hidden_NF

    def project(self, normed_ND: Tensor, first: int, last: int) -> Tensor:
        """Outputs first to last - 1 of the joint product of query, key and value."""
        if last - first == len(self.projection_FD):
            return linear(normed_ND, self.projection_FD, self.bias_F)
        bias_F = None if self.bias_F is None else self.bias_F[first:last]
        return F.linear(
            normed_ND, self.projection_FD[first:last], bias_F
        )  # of a slice oneDNN takes 2,000 times as long


class _Attention:
    """The attention of a pass: what its layers share."""

    def __init__(self, tokens: FlatTokens, metadata: AttentionMetadata):
        self.tokens, self.metadata = tokens, metadata
        self._angles_of: dict[int | None, tuple[np.ndarray, np.ndarray]] = {}
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self.blocks = [row for row, (_, count) in enumerate(tokens.spans) if count >= MIN_BLOCK_TOKENS]
        self.positions_N = tokens.positions_N  # of tokens that are attended to one by one, -1 for others
        if self.blocks:
            self.positions_N = self.positions_N.copy()
            for row in self.blocks:
                first, count = tokens.spans[row]
                self.positions_N[first : first + count] = -1
        self.has_single_tokens = bool((self.positions_N >= 0).any())
        self.prefixes = [
            (prefix.columns, [token for row in prefix.rows for token in self._single_tokens(row)])
            for prefix in tokens.rows.prefixes
        ]

    def _single_tokens(self, row: int) -> Sequence[int]:
        first, count = self.tokens.spans[row]
        return range(first, first + count) if count < MIN_BLOCK_TOKENS else ()

    def mix(self, layer: _FlatLayer, normed_ND: Tensor, slots: KVSlots, wanted_N: Tensor | None) -> Tensor:
        """Mixed values [N, H x K] of the tokens, or of the wanted ones, whose keys and values are written."""
        query_width, key_width = layer.heads * layer.width, layer.groups * layer.width
        outputs = query_width + 2 * key_width
        if wanted_N is None:
            joint_NF = layer.project(normed_ND, 0, outputs)
            memories = self._place(layer, joint_NF, slots, layer.heads)
            return self._mixed(layer, joint_NF, memories)
        memories = self._place(layer, layer.project(normed_ND, query_width, outputs), slots, 0)
        query_NF = layer.project(normed_ND[wanted_N], 0, query_width)
        wanted = wanted_N.numpy()
        if layer.query_norm is not None:
            layer.query_norm.norm_parts(query_NF, 0, query_width)
        _rotate(query_NF.numpy(), layer.heads, layer.width, *(part[wanted] for part in self._angles(layer)))
        places = SlotPlaces(self.tokens.slots_N[wanted], self.tokens.positions_N[wanted])
        mixed_NF = torch.empty_like(query_NF)
        self._attend_tokens(layer, query_NF, memories, places, mixed_NF)
        return mixed_NF

    def _angles(self, layer: _FlatLayer) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of each token; none where the layer does not turn heads."""
        window = layer.window if layer.rotates else False
        if window not in self._angles_of:
            rotation = self.metadata.rotation_of(layer.window) if layer.rotates else None
            if rotation is None:
                rotation = 2 * (torch.empty(1, len(self.positions_N), 0),)
            self._angles_of[window] = rotation[0][0].numpy(), rotation[1][0].numpy()
        return self._angles_of[window]

    def _place(
        self, layer: _FlatLayer, joint_NF: Tensor, slots: KVSlots, query_heads: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Norms and turns queries and keys, which come first in a row, and writes keys and values to the slots; returns
        these."""
        width = layer.width
        if layer.query_norm is not None and query_heads:
            layer.query_norm.norm_parts(joint_NF, 0, query_heads * width)
        if layer.key_norm is not None:
            layer.key_norm.norm_parts(joint_NF, query_heads * width, layer.groups * width)
        like_1NGK = joint_NF[:, : layer.groups * width].view(1, len(joint_NF), layer.groups, width)
        keys, values = (memory.numpy() for memory in slots.reserve(self.tokens.rows, like_1NGK, like_1NGK))
        joint, places = joint_NF.numpy(), (self.tokens.slots_N, self.tokens.positions_N)
        _rotate(joint, query_heads + layer.groups, width, *self._angles(layer))
        write_tokens(joint, query_heads * width, keys, values, *places)
        return keys, values

    def _mixed(self, layer: _FlatLayer, joint_NF: Tensor, memories: tuple[np.ndarray, np.ndarray]) -> Tensor:
        mixed_NF = joint_NF.new_empty(len(joint_NF), layer.heads * layer.width)
        if self.has_single_tokens:
            beginnings = self._beginnings(layer, joint_NF, memories)
            places = SlotPlaces(self.tokens.slots_N, self.positions_N, beginnings)
            self._attend_tokens(layer, joint_NF, memories, places, mixed_NF)
        for row in self.blocks:
            first, count = self.tokens.spans[row]
            begin, slot = int(self.tokens.positions_N[first]), int(self.tokens.slots_N[first])
            keys, values = (torch.from_numpy(memory[slot, : begin + count]) for memory in memories)
            query_TF = joint_NF[first : first + count]
            self._attend_block(layer, query_TF, (keys, values), begin, mixed_NF[first : first + count])
        return mixed_NF

    def _beginnings(
        self, layer: _FlatLayer, joint_NF: Tensor, memories: tuple[np.ndarray, np.ndarray]
    ) -> AttendedBeginnings | None:
        """Attention of tokens to prefixes that their rows share, each as one product."""
        if layer.window is not None or not self.prefixes:
            return None
        columns_N = np.zeros_like(self.positions_N)
        mixed_NF = joint_NF.new_empty(len(joint_NF), layer.heads * layer.width)
        logsumexp_NH = joint_NF.new_empty(len(joint_NF), layer.heads)
        for columns, tokens in self.prefixes:
            if not tokens:
                continue
            slot = self.tokens.slots_N[tokens[0]]
            keys, values = (torch.from_numpy(memory[slot, :columns]) for memory in memories)
            query_RGTK, key_RGCK, value_RGCK = self._by_copies(layer, joint_NF[tokens], keys, values)
            mixed_RGTK, logsumexp_RGT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query_RGTK, key_RGCK, value_RGCK, scale=layer.scale
            )
            columns_N[tokens] = columns
            mixed_NF[tokens] = mixed_RGTK.permute(2, 1, 0, 3).flatten(1)
            logsumexp_NH[tokens] = logsumexp_RGT.permute(2, 1, 0).flatten(1)
        return AttendedBeginnings(columns_N, mixed_NF.numpy(), logsumexp_NH.numpy())

    def _by_copies(
        self, layer: _FlatLayer, query_TF: Tensor, key_CGK: Tensor, value_CGK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The heads of a group as rows of a batch, all of which see the same keys, so that none is copied."""
        copies = layer.heads // layer.groups
        query_TGRK = query_TF[:, : layer.heads * layer.width].view(len(query_TF), layer.groups, copies, -1)
        key_RGCK, value_RGCK = (part.transpose(0, 1).expand(copies, -1, -1, -1) for part in (key_CGK, value_CGK))
        return query_TGRK.permute(2, 1, 0, 3), key_RGCK, value_RGCK

    def _attend_tokens(
        self,
        layer: _FlatLayer,
        query_NF: Tensor,
        memories: tuple[np.ndarray, np.ndarray],
        places: SlotPlaces,
        mixed_NF: Tensor,
    ) -> None:
        reach = self.tokens.rows.span if layer.window is None else min(layer.window, self.tokens.rows.span)
        attend_tokens(query_NF.numpy(), memories, places, mixed_NF.numpy(), layer.scale, reach)

    def _attend_block(
        self, layer: _FlatLayer, query_TF: Tensor, memories: tuple[Tensor, Tensor], begin: int, mixed_TF: Tensor
    ) -> None:
        """Attention of a row's tokens, from column `begin` on, to the columns [C, G, K] of its slot."""
        count = len(query_TF)
        parts_RG = self._by_copies(layer, query_TF, *memories)
        mask_TC = self._mask(begin, count, layer.window)
        mixed_RGTK = F.scaled_dot_product_attention(
            *parts_RG, attn_mask=mask_TC, is_causal=mask_TC is None, scale=layer.scale
        )
        mixed_TF.view(count, layer.groups, len(mixed_RGTK), -1).copy_(mixed_RGTK.permute(2, 1, 0, 3))

    def _mask(self, begin: int, count: int, window: int | None) -> Tensor | None:
        """Numbers to add to the scores of tokens from column `begin` on; None: plainly causal."""
        if window is not None and window >= begin + count:
            window = None
        if begin == 0 and window is None:
            return None
        key = begin, count, window
        if key not in self._masks:
            mask_TC = torch.full((count, begin + count), -torch.inf).triu_(begin + 1)
            if window is not None:
                mask_TC += torch.full_like(mask_TC, -torch.inf).tril_(begin - window)
            self._masks[key] = mask_TC
        return self._masks[key]


# The kernels index flat arrays by unsigned numbers: of those the compiler makes vectors, of views it does not.


@cached_njit(nogil=True, fastmath=FAST)
def _rms_norm(x_ND: np.ndarray, weight_D: np.ndarray, epsilon: float, normed_ND: np.ndarray) -> None:
    """x / rms(x) * weight of each row."""
    width = np.uint64(x_ND.shape[1])
    x, normed = x_ND.ravel(), normed_ND.ravel()
    for row in range(len(x_ND)):
        start = np.uint64(row) * width
        total = np.float32(0)
        for k in range(width):
            total += x[start + k] * x[start + k]
        scale = np.float32(1) / np.sqrt(total / np.float32(x_ND.shape[1]) + np.float32(epsilon))
        for k in range(width):
            normed[start + k] = x[start + k] * scale * weight_D[k]


@cached_njit(nogil=True, fastmath=FAST)
def _norm_parts(joint_NF: np.ndarray, first: int, parts: int, weight_D: np.ndarray, epsilon: float) -> None:
    """The same of parts of each row, in place. The first begins at number `first`, each is as long as the weight."""
    width, joint = np.uint64(len(weight_D)), joint_NF.ravel()
    for row in range(len(joint_NF)):
        for part in range(parts):
            start = np.uint64(row * joint_NF.shape[1] + first + part * len(weight_D))
            total = np.float32(0)
            for k in range(width):
                total += joint[start + k] * joint[start + k]
            scale = np.float32(1) / np.sqrt(total / np.float32(len(weight_D)) + np.float32(epsilon))
            for k in range(width):
                joint[start + k] *= scale * weight_D[k]


@cached_njit(nogil=True, fastmath=FAST)
def _rotate(joint_NF: np.ndarray, heads: int, width: int, cosine_NK: np.ndarray, sine_NK: np.ndarray) -> None:
    """`modules.rotate` of the first heads of each row, in place."""
    half, joint = np.uint64(cosine_NK.shape[1] // 2), joint_NF.ravel()
    cosines, sines = cosine_NK.ravel(), sine_NK.ravel()
    for row in range(len(joint_NF)):
        angle = np.uint64(row * cosine_NK.shape[1])
        for head in range(heads):
            start = np.uint64(row * joint_NF.shape[1] + head * width)
            for k in range(half):
                first, second = joint[start + k], joint[start + half + k]
                cosine, sine = cosines[angle + k], sines[angle + k]
                joint[start + k] = first * cosine - second * sine
                joint[start + half + k] = second * cosine + first * sine


@cached_njit(nogil=True, fastmath=FAST, error_model="numpy")  # of a division that may raise there are no vectors
def silu_product(gate_up_NF: np.ndarray, hidden_NF: np.ndarray) -> None:
    """silu(gate) * up of each row, which has the gates first."""
    inner = np.uint64(hidden_NF.shape[1])
    gate_up, hidden = gate_up_NF.ravel(), hidden_NF.ravel()
    exponential, powers = np.empty(inner, dtype=np.float32), np.empty(inner, dtype=np.int32)
    bits = exponential.view(np.int32)
    for row in range(len(gate_up_NF)):
        gate, place = np.uint64(row) * inner * np.uint64(2), np.uint64(row) * inner
        up = gate + inner
        for k in range(inner):
            x = min(max(-gate_up[gate + k], np.float32(-87)), np.float32(87))
            n = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
            exponential[k] = exp_without_power(x, n)
            powers[k] = np.int32(n)
        for k in range(inner):
            bits[k] += powers[k] << np.int32(23)
        for k in range(inner):
            x = gate_up[gate + k]
            hidden[place + k] = x / (np.float32(1) + exponential[k]) * gate_up[up + k]
