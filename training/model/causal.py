"""Plainly causal attention on the CPU, as matmuls over blocks of queries.

torch 2.13's fused CPU kernel computes the backward pass of bfloat16 slower than that of float32. Matmuls of blocks take
half its time there, and 0.8 of it in float32 (256 tokens, 48 heads of 48, one core of an EPYC 9004, 2026-11-21)."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gristmill.training.loss import upcast
from gristmill.training.mixers.attention import BLOCK, MAX_SCORES

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
