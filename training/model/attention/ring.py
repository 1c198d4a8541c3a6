"""Attention over the context ranks: blocks of keys and values travel around the ring of ranks, and the results of the
blocks are merged by their log-sum-exp (Ring Attention, arXiv 2310.01889)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.training.model.attention.ring_plan import RingPlan, Tile
from gristmill.training.model.fused import fused
from gristmill.training.model.loss import upcast, upcast_dtype
from gristmill.training.parallel.context import around_the_ring, pass_on

# B batch, Tc tokens of this context rank, H query heads, G key/value heads, R = H / G, K head width
# N queries of a tile, S keys of it

GRADIENT = 1  # tag of the gradients, which travel beside the keys and values

CAUSAL_MASK: Final = "causal"  # each query of a tile sees the keys up to its own place
TileMask = Tensor | Literal["causal"] | None  # a tensor: the bias that is added to the scores


def ring_attention(
    query_BHTcK: Tensor,
    key_BGTcK: Tensor,
    value_BGTcK: Tensor,
    plan: RingPlan,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """[B, H, Tc, K]: what this rank's tokens see of all ranks' tokens, in float32 or better inside. softcap: scores
    become cap x tanh(scores / cap).

    One operator of its own, around which layers are compiled: its tiles and messages differ from batch to batch."""
    scoring = [scale] if softcap is None else [scale, softcap]
    mixed_BTcHK, _ = _ring_attention(query_BHTcK, key_BGTcK, value_BGTcK, plan.tensors, plan.group, scoring)
    return mixed_BTcHK.transpose(1, 2)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ScoreScale:
    """scale q k^T, soft-capped, plus a bias."""

    scale: float
    softcap: float | None = None

    def fuses(self, query: Tensor) -> bool:
        """Whether a fused kernel computes a tile: on GPUs in 32 bits or fewer, without a soft cap."""
        return query.device.type == "cuda" and query.dtype != torch.float64 and self.softcap is None

    def mask(self, plan: RingPlan, tile: Tile, source: int, streams: Sequence[Tensor]) -> "TileMask":
        """CAUSAL_MASK where a kernel takes that, else the bias. streams: query, key, value."""
        query, _, value = streams
        if tile.causal and plan.slopes_H is None and self.fuses(query) and flash_serves(query, value):
            return CAUSAL_MASK
        return plan.bias(tile, source, upcast_dtype(query))

    def scores(self, query_BHNK: Tensor, key_BGSK: Tensor) -> Tensor:
        """Without the bias, in float32 or better."""
        scores_BHNS = _product(upcast(query_BHNK) * self.scale, upcast(key_BGSK).mT)
        return scores_BHNS if self.softcap is None else self.softcap * torch.tanh(scores_BHNS / self.softcap)

    def slope(self, scores: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of q k^T from that of the scores, in place."""
        if self.softcap is not None:
            gradient.mul_(1 - (scores / self.softcap).square())
        return gradient.mul_(self.scale)


def attend_around_the_ring(
    query: Tensor, key: Tensor, value: Tensor, plan: RingPlan, scoring: ScoreScale
) -> tuple[Tensor, Tensor]:
    """(mixed [B, Tc, H, K], log-sum-exp of the scores [B, H, Tc])."""
    exact, tiles = upcast_dtype(query), plan.tiles
    batch, heads, tokens, width = query.shape
    mixed_BTcHK = torch.zeros(batch, tokens, heads, width, dtype=exact, device=query.device)
    mixed = mixed_BTcHK.transpose(1, 2)
    log_sum = torch.full(query.shape[:3], -torch.inf, dtype=exact, device=query.device)
    joined = fused(merge) if query.device.type == "cuda" else merge
    for source, (keys, values) in around_the_ring(torch.stack([key, value]), plan.axis):
        for tile in tiles[source]:
            rows, columns = (slice(None), slice(None), tile.queries), (slice(None), slice(None), tile.keys)
            mask = scoring.mask(plan, tile, source, (query, key, value))
            tile_result = attend_tile(query[rows], keys[columns], values[columns], mask, scoring)
            mixed[rows], log_sum[rows] = joined(mixed[rows], log_sum[rows], *tile_result)
    return mixed_BTcHK.to(query.dtype), log_sum


def gradients_around_the_ring(
    gradient: Tensor, streams: Sequence[Tensor], results: Sequence[Tensor], plan: RingPlan, scoring: ScoreScale
) -> tuple[Tensor, Tensor]:
    """(the gradient of the queries, those of keys and values [2, B, G, Tc, K]). streams: query, key, value; results:
    mixed [B, Tc, H, K] and its log-sum-exp. Keys and values go around once more, and their gradients behind them, which
    end where they began."""
    (query, key, value), (mixed_BTcHK, log_sum) = streams, results
    gradient, mixed = gradient.transpose(1, 2), mixed_BTcHK.transpose(1, 2)
    exact, axis, tiles = log_sum.dtype, plan.axis, plan.tiles
    query_gradient = torch.zeros(query.shape, dtype=exact, device=query.device)
    passing = None
    travelling = torch.zeros((2, *key.shape), dtype=exact, device=key.device)
    for source, (keys, values) in around_the_ring(torch.stack([key, value]), axis):
        own = torch.zeros_like(travelling)
        for tile in tiles[source]:
            rows, columns = (slice(None), slice(None), tile.queries), (slice(None), slice(None), tile.keys)
            gradients = tile_gradients(
                TileResult(query[rows], keys[columns], values[columns], mixed[rows], log_sum[rows]),
                gradient[rows],
                scoring.mask(plan, tile, source, streams),
                scoring,
            )
            query_gradient[rows] += gradients[0]
            own[0][columns] += gradients[1]
            own[1][columns] += gradients[2]
        travelling = own if passing is None else passing.wait() + own
        passing = pass_on(travelling, axis, GRADIENT)
    assert passing is not None
    return query_gradient.to(query.dtype), passing.wait().to(key.dtype)


@torch.library.custom_op("gristmill::ring_attention", mutates_args=())
def _ring_attention(
    query_BHTcK: Tensor,
    key_BGTcK: Tensor,
    value_BGTcK: Tensor,
    plan: Sequence[Tensor],
    group: str,
    scoring: Sequence[float],
) -> tuple[Tensor, Tensor]:
    return attend_around_the_ring(query_BHTcK, key_BGTcK, value_BGTcK, RingPlan.of(plan, group), ScoreScale(*scoring))


@_ring_attention.register_fake
def _(query_BHTcK: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, width = query_BHTcK.shape
    mixed_BTcHK = query_BHTcK.new_empty(batch, tokens, heads, width)
    return mixed_BTcHK, query_BHTcK.new_empty(batch, heads, tokens, dtype=upcast_dtype(query_BHTcK))


@torch.library.custom_op("gristmill::ring_attention_gradients", mutates_args=())
def _ring_gradients(
    gradient_BTcHK: Tensor,
    streams: Sequence[Tensor],
    results: Sequence[Tensor],
    plan: Sequence[Tensor],
    group: str,
    scoring: Sequence[float],
) -> tuple[Tensor, Tensor]:
    return gradients_around_the_ring(gradient_BTcHK, streams, results, RingPlan.of(plan, group), ScoreScale(*scoring))


@_ring_gradients.register_fake
def _(_: Tensor, streams: Sequence[Tensor], *others: Any) -> tuple[Tensor, Tensor]:
    query_BHTcK, key_BGTcK, _value = streams
    return query_BHTcK.new_empty(query_BHTcK.shape), key_BGTcK.new_empty((2, *key_BGTcK.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *streams, plan, ctx.group, ctx.scoring = inputs
    ctx.save_for_backward(*streams, *output, *plan)


def _backward(ctx: Any, gradient_BTcHK: Tensor, _: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    gradients = _ring_gradients(gradient_BTcHK, saved[:3], saved[3:5], saved[5:], ctx.group, ctx.scoring)
    query_gradient, (key_gradient, value_gradient) = gradients
    return query_gradient, key_gradient, value_gradient, [None] * len(saved[5:]), None, None


_ring_attention.register_autograd(_backward, setup_context=_save)
RING_OPERATOR = torch.ops.gristmill.ring_attention.default


def attend_tile(
    query_BHNK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, mask: TileMask, scoring: ScoreScale
) -> tuple[Tensor, Tensor]:
    """(softmax(scores + bias) v, log-sum-exp of the scores [B, H, N]); rows that see nothing: (0, -inf)."""
    if scoring.fuses(query_BHNK):
        return fused_tile(query_BHNK, key_BGSK, value_BGSK, mask, scoring.scale)
    scores_BHNS = _plus(scoring.scores(query_BHNK, key_BGSK), mask)
    highest_BHN1 = scores_BHNS.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(scores_BHNS.dtype).min)
    weights_BHNS = (scores_BHNS - highest_BHN1).exp_()
    total_BHN1 = weights_BHNS.sum(dim=-1, keepdim=True)
    mixed_BHNK = _product(weights_BHNS, upcast(value_BGSK)) / total_BHN1.clamp_min(1.0)
    return mixed_BHNK, (total_BHN1.log() + highest_BHN1).squeeze(-1)


def merge(mixed: Tensor, log_sum: Tensor, new_mixed: Tensor, new_log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """The result over two sets of keys: means by the sums of their exponentials."""
    total = torch.logaddexp(log_sum, new_log_sum)
    old_weight, new_weight = ((logsum - total).exp().unsqueeze(-1) for logsum in (log_sum, new_log_sum))
    return mixed * old_weight + new_mixed * new_weight, total


@dataclass(frozen=True)
class TileResult:
    """Results of a tile that its backward pass needs. mixed and log_sum, the log-sum-exp of the scores, are over all
    keys."""

    query_BHNK: Tensor
    key_BGSK: Tensor
    value_BGSK: Tensor
    mixed_BHNK: Tensor
    log_sum_BHN: Tensor


def tile_gradients(
    tile: TileResult, gradient_BHNK: Tensor, mask: TileMask, scoring: ScoreScale
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (FlashAttention, arXiv 2205.14135, appendix B.2)."""
    if scoring.fuses(tile.query_BHNK):
        inputs, results = (tile.query_BHNK, tile.key_BGSK, tile.value_BGSK), (tile.mixed_BHNK, tile.log_sum_BHN)
        return fused_tile_gradients(inputs, results, gradient_BHNK, mask, scoring.scale)
    gradient_BHNK = upcast(gradient_BHNK)
    mean_BHN1 = (gradient_BHNK * tile.mixed_BHNK).sum(dim=-1, keepdim=True)
    scores_BHNS = scoring.scores(tile.query_BHNK, tile.key_BGSK)
    weights_BHNS = (_plus(scores_BHNS, mask) - tile.log_sum_BHN.unsqueeze(-1)).exp_()
    slope_BHNS = _product(gradient_BHNK, upcast(tile.value_BGSK).mT) - mean_BHN1
    slope_BHNS = scoring.slope(scores_BHNS, slope_BHNS.mul_(weights_BHNS))
    groups = tile.key_BGSK.shape[1]
    slope_BGMS, weights_BGMS = _by_group(slope_BHNS, groups), _by_group(weights_BHNS, groups)
    query_gradient = _product(slope_BHNS, upcast(tile.key_BGSK))
    key_gradient = slope_BGMS.mT @ _by_group(upcast(tile.query_BHNK), groups)
    return query_gradient, key_gradient, weights_BGMS.mT @ _by_group(gradient_BHNK, groups)


def _plus(scores: Tensor, mask: TileMask) -> Tensor:
    """Only kernels are given CAUSAL_MASK."""
    assert mask is not CAUSAL_MASK
    return scores + mask if isinstance(mask, Tensor) else scores


def _product(left_BHNX: Tensor, right_BGXY: Tensor) -> Tensor:
    """Each head with the key/value head of its group: [B, H, N, Y]."""
    product_BGMY = _by_group(left_BHNX, right_BGXY.shape[1]) @ right_BGXY
    return product_BGMY.unflatten(2, (-1, left_BHNX.shape[2])).flatten(1, 2)


def _by_group(x_BHNX: Tensor, groups: int) -> Tensor:
    """[B, G, R x N, X]: the heads of a group as so many rows more."""
    return x_BHNX.unflatten(1, (groups, -1)).flatten(2, 3)


# A tile of ring attention by torch's fused kernels, which hold no scores: on GPUs the flash kernel, and with a bias
# memory-efficient attention; on CPUs their flash kernel, on which the tests run.

# B batch, H query heads, G key/value heads, N queries, S keys, K head width

ALIGNED = 8  # keys: a bias row of GPUs begins at a multiple of 16 bytes
PADDED = 32  # queries: the log-sum-exps that the memory-efficient kernel returns and takes
FLASH_WIDTHS, MAX_FLASH_WIDTH = 8, 256  # head widths: a multiple of 8 up to 256


def flash_serves(query: Tensor, value: Tensor) -> bool:
    """Whether there is a flash kernel for tiles without a bias. GPUs': 16 bits, values as wide as keys, sm_80."""
    if query.device.type == "cpu":
        return True
    width = query.shape[-1]
    fits = value.shape[-1] == width and width % FLASH_WIDTHS == 0 and width <= MAX_FLASH_WIDTH
    return fits and query.dtype.itemsize == 2 and _has_flash(query.device)


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def fused_tile(
    query_BHNK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, mask: TileMask, scale: float
) -> tuple[Tensor, Tensor]:
    """(softmax(scale q k^T + bias) v, log-sum-exp of the scores [B, H, N]); rows that see nothing: (0, -inf)."""
    heads, queries, causal = query_BHNK.shape[1], query_BHNK.shape[2], mask is CAUSAL_MASK
    if not isinstance(mask, Tensor) and query_BHNK.device.type != "cpu" and flash_serves(query_BHNK, value_BGSK):
        mixed, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query_BHNK, key_BGSK, value_BGSK, 0.0, causal, scale=scale
        )
        return mixed, log_sum
    key, value, bias = _copies(key_BGSK, heads), _copies(value_BGSK, heads), _bias(mask, query_BHNK, key_BGSK)
    if query_BHNK.device.type == "cpu":
        mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_BHNK, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
    else:
        mixed, log_sum, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query_BHNK, key, value, bias, True, scale=scale
        )
        log_sum = log_sum[:, :, :queries]
    if not isinstance(mask, Tensor):
        return mixed, log_sum
    blind = (mask == -torch.inf).all(dim=-1)
    return mixed.masked_fill(blind.unsqueeze(-1), 0), log_sum.masked_fill(blind, -torch.inf)


def fused_tile_gradients(
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    gradient_BHNK: Tensor,
    mask: TileMask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. results: mixed [B, H, N, K] and log-sum-exp [B, H, N] over all keys, not of
    this tile, which is all that the kernels need to give this tile's share."""
    query, key_BGSK, value_BGSK = inputs
    mixed, log_sum = results
    heads, groups, causal = query.shape[1], key_BGSK.shape[1], mask is CAUSAL_MASK
    gradient_BHNK = gradient_BHNK.to(query.dtype)
    if not isinstance(mask, Tensor) and query.device.type != "cpu" and flash_serves(query, value_BGSK):
        return _flash_gradients(inputs, results, gradient_BHNK, causal, scale)
    key, value, bias = _copies(key_BGSK, heads), _copies(value_BGSK, heads), _bias(mask, query, key_BGSK)
    if query.device.type == "cpu":
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient_BHNK, query, key, value, mixed, log_sum, 0.0, causal, attn_mask=bias, scale=scale
        )
    else:
        padded = F.pad(log_sum, (0, -log_sum.shape[-1] % PADDED), value=torch.inf).contiguous()
        none = torch.empty(0, dtype=torch.int64, device=query.device)
        gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient_BHNK, query, key, value, bias, mixed, padded, none, none, 0.0, [True] * 3 + [False], scale=scale
        )
    query_gradient, *copied = gradients[:3]
    key_gradient, value_gradient = (part.unflatten(1, (groups, -1)).sum(dim=2) for part in copied)
    return query_gradient, key_gradient, value_gradient


def _flash_gradients(
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    gradient_BHNK: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As torch's own derivative of the flash operator calls it: lengths are undefined for samples of one length
    (pytorch, attention_backward.cu, _flash_attention_backward), and the random state is read with dropout only
    (flash_api.cpp, mha_bwd), which also takes the log-sum-exp as contiguous without a check."""
    mixed, log_sum = results
    queries, keys = inputs[0].shape[2], inputs[1].shape[2]
    random = torch.empty(2, dtype=torch.uint64, device=log_sum.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        gradient_BHNK,
        *inputs,
        mixed,
        log_sum.contiguous(),
        None,
        None,
        queries,
        keys,
        0.0,
        causal,
        random,
        random[:1],
        scale=scale,
    )


def _copies(x_BGSK: Tensor, heads: int) -> Tensor:
    """A key/value head for each query head."""
    copies = heads // x_BGSK.shape[1]
    return x_BGSK if copies == 1 else x_BGSK.repeat_interleave(copies, dim=1)


def _bias(mask: TileMask, query_BHNK: Tensor, key_BGSK: Tensor) -> Tensor | None:
    """The bias in the dtype of the queries; on GPUs [B, H, N, S] with rows at multiples of 16 bytes."""
    if not isinstance(mask, Tensor):
        return None
    bias = mask.to(query_BHNK.dtype)
    if query_BHNK.device.type == "cpu":
        return bias
    keys = key_BGSK.shape[2]
    aligned = F.pad(bias, (0, -keys % ALIGNED))[..., :keys]
    return aligned.expand(*query_BHNK.shape[:3], keys)
