"""Self-attention with grouped key/value heads."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gristmill.training.config.mixers import attention as mixers
from gristmill.training.config.mixers.attention import BLOCK, MAX_SCORES
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.metadata import AttentionMetadata, Mask
from gristmill.training.model.attention.ring import ring_attention
from gristmill.training.model.attention.slot_attention import attend_by_rows, attends_by_rows
from gristmill.training.model.decoding_cache import SlotView
from gristmill.training.model.fused import fused
from gristmill.training.model.loss import upcast
from gristmill.training.model.modules import Norm, rotate
from gristmill.training.parallel.context import exchange_heads, exchange_tokens
from gristmill.training.parallel.mesh import Axis
from gristmill.training.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    Sharding,
    TensorAxis,
    column_parallel,
)

# B batch, T tokens, S tokens looked at, D width, H query heads, G key/value heads, K head width
# Ht, Gt = heads on this tensor rank


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over the tokens that the metadata lets each token see, for modules that make queries,
    keys and values. softcap: of the model."""

    def __init__(self, config: ModelConfig, window: int | None):
        super().__init__()
        self.window, self.scale, self.softcap = window, attention_scale(config), config.attention_softcap

    @property
    def cached_numbers(self) -> int:
        """Numbers of a token that decoding keeps on this rank."""
        raise NotImplementedError

    def mixed(
        self, heads: tuple[Tensor, Tensor, Tensor], metadata: AttentionMetadata, slots: SlotView | None
    ) -> Tensor:
        """heads: query, key and value, [B, T, Ht or Gt, K]. Their mix [B, T, Ht, K]. slots: take keys and values, and
        give those that the tokens attend to."""
        return metadata.mix(lambda q, k, v: self._attend(q, k, v, metadata, slots), *heads)

    def _attend(
        self,
        query_BTHtK: Tensor,
        key_BTGtK: Tensor,
        value_BTGtK: Tensor,
        metadata: AttentionMetadata,
        slots: SlotView | None,
    ) -> Tensor:
        if metadata.ring is not None:
            query, key, value = (part.transpose(1, 2) for part in (query_BTHtK, key_BTGtK, value_BTGtK))
            mixed_BHtTK = ring_attention(query, key, value, metadata.ring[self.window], self.scale, self.softcap)
            return mixed_BHtTK.transpose(1, 2)
        if metadata.shares is not None:
            query_BTHtK, key_BTGtK, value_BTGtK = _share_of_heads(
                query_BTHtK, key_BTGtK, value_BTGtK, metadata.shares.axis
            )
        mask_BTS = metadata.masks_BTS[self.window]
        if slots is not None and self.softcap is None and attends_by_rows(query_BTHtK, mask_BTS):
            return attend_by_rows(query_BTHtK, key_BTGtK, value_BTGtK, slots, self.scale, self.window)
        key_BGtSK, value_BGtSK = key_BTGtK.transpose(1, 2), value_BTGtK.transpose(1, 2)
        if slots is not None:
            cached = slots.append(key_BTGtK, value_BTGtK)
            key_BGtSK, value_BGtSK = cached.key_BGSK, cached.value_BGSK
        query_BHtTK = query_BTHtK.transpose(1, 2)
        if self.softcap is not None:
            mixed_BHtTK = attend_softcapped(query_BHtTK, key_BGtSK, value_BGtSK, mask_BTS, self.scale, self.softcap)
        elif mask_BTS is None and not metadata.causal:
            mixed_BHtTK = attend_to_all(query_BHtTK, key_BGtSK, value_BGtSK, self.scale)
        else:
            mixed_BHtTK = attend(query_BHtTK, key_BGtSK, value_BGtSK, mask_BTS, self.scale)
        mixed_BTHtK = mixed_BHtTK.transpose(1, 2)
        if metadata.shares is not None:
            mixed_BTHtK = exchange_tokens(mixed_BTHtK, metadata.shares.axis)
        return mixed_BTHtK


class GroupedQueryAttention(CoreAttention):
    """Attention whose key and value heads serve groups of query heads. clip: of the model."""

    def __init__(self, config: ModelConfig, mixer: mixers.AttentionMixer, tensor: TensorAxis):
        super().__init__(config, mixer.window)
        self.tensor, self.head_dim, self.clip = tensor, config.head_dim, config.qkv_clip
        self.num_groups = max(1, config.num_kv_heads // tensor.size)
        self.rotates = mixer.rope
        query_width = config.heads * config.head_dim
        key_width = config.num_kv_heads * config.head_dim
        self.query = ColumnParallelLinear(tensor, config.width, query_width, config.projection_biases)
        self.key = ColumnParallelLinear(tensor, config.width, key_width, config.projection_biases, Sharding.KEY_VALUE)
        self.value = ColumnParallelLinear(tensor, config.width, key_width, config.projection_biases, Sharding.KEY_VALUE)
        self.output = RowParallelLinear(tensor, query_width, config.width, config.output_biases)
        self.query_norm = self.key_norm = None
        self.norms_width = config.qk_norm == "width"
        if self.norms_width:
            copies = tensor.size // math.gcd(config.num_kv_heads, tensor.size)
            self.query_norm = Norm(config, tensor, query_width, Sharding.OUTPUT)
            self.key_norm = Norm(config, tensor, key_width, Sharding.KEY_VALUE, copies)
        elif config.qk_norm:
            self.query_norm = Norm(config, tensor, config.head_dim, Sharding.REPLICATED_OVER_HEADS)
            self.key_norm = Norm(config, tensor, config.head_dim, Sharding.REPLICATED_OVER_HEADS)

    def forward(self, x_BTD: Tensor, metadata: AttentionMetadata, slots: SlotView | None = None) -> tuple[Tensor, None]:
        """The mixed tokens; their keys and values stay in the slots, where there are some."""
        projections = [self.query, self.key, self.value]
        query_BTF, key_BTF, value_BTF = column_parallel(self.tensor, x_BTD, projections, joint=True)
        query_BTHtK = self._heads(self._clipped(query_BTF), self.query_norm, metadata)
        key_BTGtK = self._heads(self._clipped(key_BTF), self.key_norm, metadata)
        value_BTGtK = self._clipped(value_BTF).unflatten(-1, (-1, self.head_dim))
        if not (torch.compiler.is_compiling() or _share_memory(query_BTHtK, value_BTGtK)):
            value_BTGtK = value_BTGtK.contiguous()  # else it would keep the memory of the joint product
        mixed_BTHtK = self.mixed((query_BTHtK, key_BTGtK, value_BTGtK), metadata, slots)
        return self.output(mixed_BTHtK.flatten(2)), None

    @property
    def cached_numbers(self) -> int:
        return 2 * self.num_groups * self.head_dim

    def _heads(self, flat_BTF: Tensor, norm: Norm | None, metadata: AttentionMetadata) -> Tensor:
        if norm is not None and self.norms_width:
            flat_BTF = norm(flat_BTF)
        x_BTHK = flat_BTF.unflatten(-1, (-1, self.head_dim))
        if norm is not None and not self.norms_width:
            x_BTHK = norm(x_BTHK)
        rotation_BTK = metadata.rotation_of(self.window) if self.rotates else None
        return x_BTHK if rotation_BTK is None else rotate(x_BTHK, rotation_BTK)

    def _clipped(self, x_BTF: Tensor) -> Tensor:
        return x_BTF if self.clip is None else x_BTF.clamp(-self.clip, self.clip)


def _share_memory(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _share_of_heads(query_BTHK: Tensor, key_BTGK: Tensor, value_BTGK: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """All tokens of this context rank's share of the heads. Key/value heads are copied until they divide evenly."""
    copies = axis.size // math.gcd(key_BTGK.shape[2], axis.size)
    if copies > 1:
        key_BTGK, value_BTGK = (part.repeat_interleave(copies, dim=2) for part in (key_BTGK, value_BTGK))
    return tuple(exchange_heads(part, axis) for part in (query_BTHK, key_BTGK, value_BTGK))


FEW_TOKENS = 64  # whose masks are smaller than the keys that are not copied


def attend(query_BHTK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, mask_BTS: Mask, scale: float) -> Tensor:
    """The backend is chosen here and nowhere else: torch's scaled_dot_product_attention, which picks a fused kernel;
    flex attention where the metadata has block masks (GPUs); matmuls over blocks where those are faster (CPUs)."""
    if isinstance(mask_BTS, BlockMask):
        flex = _flex(query_BHTK.device)
        return flex(query_BHTK, key_BGSK, value_BGSK, block_mask=mask_BTS, scale=scale, enable_gqa=True)
    mask = mask_BTS.unsqueeze(1) if mask_BTS is not None and mask_BTS.dim() == 3 else mask_BTS
    grouped = query_BHTK.shape[1] != key_BGSK.shape[1]
    few = query_BHTK.shape[2] <= FEW_TOKENS and not query_BHTK.requires_grad
    if grouped and few and mask is not None and mask.shape[1] == 1:
        # A few new tokens: the heads of a group are so many rows that look at the same keys, so nothing is copied.
        copies = query_BHTK.shape[1] // key_BGSK.shape[1]
        rows_BGRK = query_BHTK.reshape(*key_BGSK.shape[:2], -1, key_BGSK.shape[3])
        row_mask = mask if query_BHTK.shape[2] == 1 else mask.repeat(1, 1, copies, 1)
        return attend(rows_BGRK, key_BGSK, value_BGSK, row_mask, scale).reshape(*query_BHTK.shape[:3], -1)
    if grouped and query_BHTK.device.type == "cpu":  # torch 2.13's fused CPU kernel takes equal head counts only
        copies = query_BHTK.shape[1] // key_BGSK.shape[1]
        key_BGSK, value_BGSK = (part.repeat_interleave(copies, dim=1) for part in (key_BGSK, value_BGSK))
        grouped = False
    if mask is None and fits_blocks(query_BHTK):
        return causal_blocks(query_BHTK, key_BGSK, value_BGSK, scale)
    return F.scaled_dot_product_attention(
        query_BHTK, key_BGSK, value_BGSK, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def attend_softcapped(
    query_BHTK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, mask_BTS: Mask, scale: float, cap: float
) -> Tensor:
    """softmax(cap x tanh(scores / cap)) v, in flex attention where the metadata has block masks, else as matmuls with
    scores in float32 or better."""
    if isinstance(mask_BTS, BlockMask):
        flex = _flex(query_BHTK.device)

        def softcapped(score: Tensor, *_: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        return flex(
            query_BHTK,
            key_BGSK,
            value_BGSK,
            score_mod=softcapped,
            block_mask=mask_BTS,
            scale=scale,
            enable_gqa=True,
        )
    groups, tokens, all_tokens = key_BGSK.shape[1], query_BHTK.shape[2], key_BGSK.shape[2]
    if mask_BTS is None:
        mask_BTS = torch.ones(1, tokens, all_tokens, dtype=torch.bool, device=query_BHTK.device).tril()
    query_BGRTK = query_BHTK.unflatten(1, (groups, -1))
    scores_BGRTS = upcast(query_BGRTK) * scale @ upcast(key_BGSK).unsqueeze(2).mT
    scores_BGRTS = cap * torch.tanh(scores_BGRTS / cap)
    weights_BGRTS = scores_BGRTS.masked_fill(~mask_BTS[:, None, None], -torch.inf).softmax(dim=-1)
    return (weights_BGRTS.to(value_BGSK.dtype) @ value_BGSK.unsqueeze(2)).flatten(1, 2)


def attend_to_all(query_BHTK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, scale: float) -> Tensor:
    """Every token sees every token."""
    if query_BHTK.shape[1] != key_BGSK.shape[1]:
        copies = query_BHTK.shape[1] // key_BGSK.shape[1]
        key_BGSK, value_BGSK = (part.repeat_interleave(copies, dim=1) for part in (key_BGSK, value_BGSK))
    return F.scaled_dot_product_attention(query_BHTK, key_BGSK, value_BGSK, scale=scale)


def _flex(device: torch.device) -> Callable[..., Any]:
    """flex_attention is one kernel only when compiled."""
    flex: Any = fused(flex_attention) if device.type == "cuda" else flex_attention
    return flex  # type: ignore[no-any-return]


def attention_scale(config: ModelConfig) -> float:
    """The model's own, else 1 / sqrt(K); under muP 8 / K, equal to it at the usual K = 64 (arXiv 2203.03466, definition
    4.1)."""
    if config.scales.attention is not None:
        return config.scales.attention
    return 8 / config.head_dim if config.init_method == "mup" else config.head_dim**-0.5


# Plainly causal attention on the CPU, as matmuls over blocks of queries.
#
# torch 2.13's fused CPU kernel computes the backward pass of bfloat16 slower than that of float32. Matmuls of blocks
# take half its time there, and 0.8 of it in float32 (256 tokens, 48 heads of 48, one core of an EPYC 9004,
# 2026-11-21).

# B batch, H heads, Z = B x H, T tokens, K head width; N queries of a block, S keys up to the block's end

# BLOCK: queries of a block; the keys behind its end are never looked at. MAX_SCORES: of Z T^2; above it, keeping the
# weights for the backward pass would take more than 64 MB a layer in float32.


def fits_blocks(query_BHTK: Tensor) -> bool:
    """Whether `causal_blocks` is the better way: on the CPU, when a backward pass follows, for samples of some size."""
    batch, heads, tokens, _ = query_BHTK.shape
    trains = query_BHTK.requires_grad and torch.is_grad_enabled()
    return trains and query_BHTK.device.type == "cpu" and batch * heads * tokens**2 <= MAX_SCORES


def causal_blocks(query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T, causal) v, with scores and softmax in float32 or better."""
    return _CausalBlocks.apply(query_BHTK, key_BHTK, value_BHTK, scale)


class _CausalBlocks(torch.autograd.Function):
    """Products are torch.bmm, for `@` copies a transposed slice, and none goes into a slice, which takes a product for
    each head. What a block makes is changed in place."""

    @staticmethod
    def forward(ctx: Any, query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, scale: float) -> Tensor:
        query_ZTK, key_ZTK, value_ZTK = (part.flatten(0, 1) for part in (query_BHTK, key_BHTK, value_BHTK))
        exact_ZTK, exact_key_ZTK = upcast(query_ZTK), upcast(key_ZTK)
        mixed, weights = [], []
        for start, end in _blocks(query_ZTK.shape[1]):
            scores_ZNS = exact_ZTK.new_empty(len(exact_ZTK), end - start, end)
            scores_ZNS.baddbmm_(exact_ZTK[:, start:end], exact_key_ZTK[:, :end].mT, beta=0, alpha=scale)
            later_NN = torch.full((end - start, end - start), -math.inf, dtype=scores_ZNS.dtype).triu_(1)
            scores_ZNS[:, :, start:].add_(later_NN)
            weights.append(torch.softmax(scores_ZNS, dim=-1).to(value_ZTK.dtype))
            mixed.append(torch.bmm(weights[-1], value_ZTK[:, :end]))
        mixed_ZTK = torch.cat(mixed, dim=1)
        ctx.save_for_backward(query_ZTK, key_ZTK, value_ZTK, mixed_ZTK, *weights)
        ctx.scale = scale
        return mixed_ZTK.unflatten(0, query_BHTK.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        """The slope of a softmax: weights x (their gradient - its mean under the weights), and that mean is gradient .
        mixed (FlashAttention, arXiv 2205.14135, appendix B.2)."""
        query_ZTK, key_ZTK, value_ZTK, mixed_ZTK, *weights = ctx.saved_tensors
        gradient_ZTK = gradient_BHTK.flatten(0, 1)
        exact_ZTK, exact_value_ZTK = upcast(gradient_ZTK), upcast(value_ZTK)
        mean_ZT1 = (exact_ZTK * mixed_ZTK).sum(dim=-1, keepdim=True)
        by_query, by_value = [], torch.zeros_like(exact_value_ZTK)
        by_key = torch.zeros_like(key_ZTK, dtype=exact_ZTK.dtype)
        for (start, end), weights_ZNS in zip(_blocks(query_ZTK.shape[1]), weights, strict=True):
            # exact, for the mean is nearly as large
            slope_ZNS = torch.bmm(exact_ZTK[:, start:end], exact_value_ZTK[:, :end].mT)
            slope_ZNS = slope_ZNS.sub_(mean_ZT1[:, start:end]).mul_(weights_ZNS).to(weights_ZNS.dtype)
            by_query.append(torch.bmm(slope_ZNS, key_ZTK[:, :end]))
            by_key[:, :end].add_(torch.bmm(slope_ZNS.mT, query_ZTK[:, start:end]))
            by_value[:, :end].add_(torch.bmm(weights_ZNS.mT, gradient_ZTK[:, start:end]))
        by_query_ZTK = torch.cat(by_query, dim=1).mul_(ctx.scale)
        by_key.mul_(ctx.scale)
        samples = gradient_BHTK.shape[:2]
        parts = [part.unflatten(0, samples) for part in (by_query_ZTK, by_key, by_value)]
        return *_joint(parts, query_ZTK.dtype), None


def _joint(parts_BHTK: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies that lie as one product of query, key and value has them, [B, T, 3, H, K], for its backward pass; where
    values have another width, each by itself."""
    if parts_BHTK[0].shape != parts_BHTK[-1].shape:
        return [part.to(dtype) for part in parts_BHTK]
    batch, heads, tokens, width = parts_BHTK[0].shape
    joint_BT3HK = parts_BHTK[0].new_empty((batch, tokens, len(parts_BHTK), heads, width), dtype=dtype)
    for place, part in enumerate(parts_BHTK):
        joint_BT3HK[:, :, place].copy_(part.transpose(1, 2))
    return [part.transpose(1, 2) for part in joint_BT3HK.unbind(2)]


def _blocks(tokens: int) -> list[tuple[int, int]]:
    """150 -> [(0, 64), (64, 128), (128, 150)]."""
    return [(start, min(start + BLOCK, tokens)) for start in range(0, tokens, BLOCK)]
