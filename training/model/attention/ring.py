"""Attention over the context ranks: blocks of keys and values travel around the ring of ranks, and the results of the
blocks are merged by their log-sum-exp (Ring Attention, arXiv 2310.01889)."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gristmill.training.config.layout import ContextMethod
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.loss import upcast, upcast_dtype
from gristmill.training.parallel.context import (
    TokenShares,
    around_the_ring,
    balanced_shares,
    contiguous_shares,
    pass_on,
    token_shares,
    zigzag_shares,
)
from gristmill.training.parallel.mesh import Axis

# B batch, T tokens of a sample, Tc of this context rank, H query heads, G key/value heads, R = H / G, K head width
# N queries of a tile, S keys of it

QUERIES = 128  # of a tile; keys that none of them sees are not looked at
QUERIES_GPU = 2048  # of a tile of a fused kernel
GRADIENT = 1  # tag of the gradients, which travel beside the keys and values


@dataclass(frozen=True)
class VisibleTokens:
    """Each token sees the tokens from first to last: int64[B, T], or [1, T] where all rows are alike; on the CPU."""

    first_BT: Tensor
    last_BT: Tensor

    @property
    def work_T(self) -> Tensor:
        """Tokens that each token sees, over all rows: its FLOPs in attention are proportional to it."""
        return (self.last_BT - self.first_BT + 1).sum(dim=0)


def visible_tokens(tokens: int, documents_BT: Tensor | None, window: int | None, causal: bool) -> VisibleTokens:
    """documents [[0, 0, 1, 1]], causal -> first [[0, 0, 2, 2]], last [[0, 1, 2, 3]]."""
    place_T = torch.arange(tokens)
    first_BT, last_BT = torch.zeros(1, tokens, dtype=torch.int64), torch.full((1, tokens), tokens - 1)
    if documents_BT is not None:
        documents_BT = documents_BT.cpu()
        changes = documents_BT[:, 1:] != documents_BT[:, :-1]
        begins = torch.nn.functional.pad(changes, (1, 0), value=True)
        ends = torch.nn.functional.pad(changes, (0, 1), value=True)
        first_BT = torch.where(begins, place_T, 0).cummax(dim=1).values
        last_BT = torch.where(ends, place_T, tokens).flip(1).cummin(dim=1).values.flip(1)
    if causal:
        last_BT = place_T.unsqueeze(0)
    if window is not None:
        first_BT = first_BT.maximum(place_T - window + 1)
    return VisibleTokens(first_BT, last_BT)


@dataclass(frozen=True)
class Tile:
    """Queries and keys, as slices of the shares of this rank and of the rank that the keys come from. masked: some of
    the queries do not see some of the keys."""

    queries: slice
    keys: slice
    masked: bool


@dataclass(frozen=True)
class RingPlan:
    """Tiles and visibility bounds of the layers of one window. tiles: by the rank that the keys come from. first_BTc,
    last_BTc: the tokens that this rank's tokens see; index_CT: of the shares; slopes_H of ALiBi. All on the device."""

    shares: TokenShares
    tiles: Sequence[Sequence[Tile]]
    first_BTc: Tensor
    last_BTc: Tensor
    index_CT: Tensor
    slopes_H: Tensor | None

    def bias(self, tile: Tile, source: int, dtype: torch.dtype) -> Tensor | None:
        """Bias that is added to the scores: [B, 1, N, S] or, with ALiBi, [B, H, N, S]; None where nothing is."""
        key_S = self.index_CT[source, tile.keys]
        bias = None
        if self.slopes_H is not None:
            back_NS = self.shares.own_T[tile.queries].unsqueeze(1) - key_S
            bias = -self.slopes_H.to(dtype).view(1, -1, 1, 1) * back_NS
        if tile.masked:
            first_BN1, last_BN1 = (
                bound_BTc[:, tile.queries].unsqueeze(2) for bound_BTc in (self.first_BTc, self.last_BTc)
            )
            hidden_BNS = (key_S < first_BN1) | (key_S > last_BN1)
            nothing = key_S.new_zeros((), dtype=dtype) if bias is None else bias
            bias = nothing.masked_fill(hidden_BNS.unsqueeze(1), -torch.inf)
        return bias


def ring_plan(visible: VisibleTokens, shares: TokenShares, slopes_H: Tensor | None) -> RingPlan:
    own_T, device = shares.index_CT[shares.axis.rank], shares.own_T.device
    first_BTc, last_BTc = (bound_BT.index_select(1, own_T) for bound_BT in (visible.first_BT, visible.last_BT))
    seen = first_BTc.numpy(), last_BTc.numpy()
    queries = QUERIES if device.type == "cpu" else QUERIES_GPU
    begins = _begins(own_T.numpy(), queries)
    tiles = [_tiles(begins, len(own_T), keys_T.numpy(), *seen) for keys_T in shares.index_CT]
    return RingPlan(shares, tiles, first_BTc.to(device), last_BTc.to(device), shares.index_CT.to(device), slopes_H)


def _tiles(
    begins: np.ndarray, tokens: int, keys_T: np.ndarray, first_BTc: np.ndarray, last_BTc: np.ndarray
) -> list[Tile]:
    """The tokens that a token sees are neighbours, so the keys that the queries of a tile see are a slice of a rising
    share. begins: of the tiles."""
    first_TcM, last_TcM = ((bound_BTc.min(axis=0), bound_BTc.max(axis=0)) for bound_BTc in (first_BTc, last_BTc))
    start = np.searchsorted(keys_T, np.minimum.reduceat(first_TcM[0], begins))
    end = np.searchsorted(keys_T, np.maximum.reduceat(last_TcM[1], begins), side="right")
    all_begun, none_ended = np.maximum.reduceat(first_TcM[1], begins), np.minimum.reduceat(last_TcM[0], begins)
    tiles = []
    for tile in np.flatnonzero(start < end).tolist():
        queries = slice(int(begins[tile]), int(begins[tile + 1]) if tile + 1 < len(begins) else tokens)
        keys = slice(int(start[tile]), int(end[tile]))
        masked = keys_T[keys.start] < all_begun[tile] or keys_T[keys.stop - 1] > none_ended[tile]
        tiles.append(Tile(queries, keys, bool(masked)))
    return tiles


def _begins(index_T: np.ndarray, queries: int) -> np.ndarray:
    """Where the tiles of a share begin: runs of neighbouring tokens, at most so long. [0, 1, 6, 7] -> [0, 2]."""
    runs = [0, *(np.flatnonzero(np.diff(index_T) != 1) + 1).tolist(), len(index_T)]
    return np.concatenate([np.arange(*run, queries) for run in itertools.pairwise(runs)])


def ring_attention(
    query_BHTcK: Tensor,
    key_BGTcK: Tensor,
    value_BGTcK: Tensor,
    plan: RingPlan,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """[B, H, Tc, K]: what this rank's tokens see of all ranks' tokens, in float32 or better inside. softcap: scores
    become cap x tanh(scores / cap)."""
    return _RingAttention.apply(query_BHTcK, key_BGTcK, value_BGTcK, plan, ScoreScale(scale, softcap))


@dataclass(frozen=True)
class ScoreScale:
    """scale q k^T, soft-capped, plus a bias."""

    scale: float
    softcap: float | None = None

    def fuses(self, query: Tensor) -> bool:
        """Whether a fused kernel computes a tile: on GPUs in 32 bits or fewer, without a soft cap."""
        return query.device.type == "cuda" and query.dtype != torch.float64 and self.softcap is None

    def scores(self, query_BHNK: Tensor, key_BGSK: Tensor) -> Tensor:
        """Without the bias, in float32 or better."""
        scores_BHNS = _product(upcast(query_BHNK) * self.scale, upcast(key_BGSK).mT)
        return scores_BHNS if self.softcap is None else self.softcap * torch.tanh(scores_BHNS / self.softcap)

    def slope(self, scores: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of q k^T from that of the scores, in place."""
        if self.softcap is not None:
            gradient.mul_(1 - (scores / self.softcap).square())
        return gradient.mul_(self.scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: RingPlan, scoring: ScoreScale) -> Tensor:
        axis, exact = plan.shares.axis, upcast_dtype(query)
        batch, heads, tokens, width = query.shape
        mixed = torch.zeros(batch, tokens, heads, width, dtype=exact, device=query.device).transpose(1, 2)
        log_sum = torch.full(query.shape[:3], -torch.inf, dtype=exact, device=query.device)
        for source, (keys, values) in around_the_ring(torch.stack([key, value]), axis):
            for tile in plan.tiles[source]:
                rows, bias = (slice(None), slice(None), tile.queries), plan.bias(tile, source, exact)
                tile_result = attend_tile(query[rows], keys[:, :, tile.keys], values[:, :, tile.keys], bias, scoring)
                mixed[rows], log_sum[rows] = merge(mixed[rows], log_sum[rows], *tile_result)
        result = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, log_sum)
        ctx.plan, ctx.scoring = plan, scoring
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Keys and values go around once more, and their gradients behind them, which end where they began."""
        query, key, value, mixed, log_sum = ctx.saved_tensors
        plan, axis = ctx.plan, ctx.plan.shares.axis
        exact = log_sum.dtype
        query_gradient = torch.zeros_like(query, dtype=exact)
        passing = None
        travelling = torch.zeros((2, *key.shape), dtype=exact, device=key.device)
        for source, (keys, values) in around_the_ring(torch.stack([key, value]), axis):
            own = torch.zeros_like(travelling)
            for tile in plan.tiles[source]:
                rows, columns = (slice(None), slice(None), tile.queries), (slice(None), slice(None), tile.keys)
                gradients = tile_gradients(
                    TileResult(query[rows], keys[columns], values[columns], mixed[rows], log_sum[rows]),
                    gradient[rows],
                    plan.bias(tile, source, exact),
                    ctx.scoring,
                )
                query_gradient[rows] += gradients[0]
                own[0][columns] += gradients[1]
                own[1][columns] += gradients[2]
            travelling = own if passing is None else passing.wait() + own
            passing = pass_on(travelling, axis, GRADIENT)
        assert passing is not None
        key_gradient, value_gradient = passing.wait().to(key.dtype)
        return query_gradient.to(query.dtype), key_gradient, value_gradient, None, None


def attend_tile(
    query_BHNK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, bias: Tensor | None, scoring: ScoreScale
) -> tuple[Tensor, Tensor]:
    """(softmax(scores + bias) v, log-sum-exp of the scores [B, H, N]); rows that see nothing: (0, -inf)."""
    if scoring.fuses(query_BHNK):
        return fused_tile(query_BHNK, key_BGSK, value_BGSK, bias, scoring.scale)
    scores_BHNS = _plus(scoring.scores(query_BHNK, key_BGSK), bias)
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
    tile: TileResult, gradient_BHNK: Tensor, bias: Tensor | None, scoring: ScoreScale
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (FlashAttention, arXiv 2205.14135, appendix B.2)."""
    if scoring.fuses(tile.query_BHNK):
        inputs, results = (tile.query_BHNK, tile.key_BGSK, tile.value_BGSK), (tile.mixed_BHNK, tile.log_sum_BHN)
        return fused_tile_gradients(inputs, results, gradient_BHNK, bias, scoring.scale)
    gradient_BHNK = upcast(gradient_BHNK)
    mean_BHN1 = (gradient_BHNK * tile.mixed_BHNK).sum(dim=-1, keepdim=True)
    scores_BHNS = scoring.scores(tile.query_BHNK, tile.key_BGSK)
    weights_BHNS = (_plus(scores_BHNS, bias) - tile.log_sum_BHN.unsqueeze(-1)).exp_()
    slope_BHNS = _product(gradient_BHNK, upcast(tile.value_BGSK).mT) - mean_BHN1
    slope_BHNS = scoring.slope(scores_BHNS, slope_BHNS.mul_(weights_BHNS))
    groups = tile.key_BGSK.shape[1]
    slope_BGMS, weights_BGMS = _by_group(slope_BHNS, groups), _by_group(weights_BHNS, groups)
    query_gradient = _product(slope_BHNS, upcast(tile.key_BGSK))
    key_gradient = slope_BGMS.mT @ _by_group(upcast(tile.query_BHNK), groups)
    return query_gradient, key_gradient, weights_BGMS.mT @ _by_group(gradient_BHNK, groups)


def _plus(scores: Tensor, bias: Tensor | None) -> Tensor:
    return scores if bias is None else scores + bias


def _product(left_BHNX: Tensor, right_BGXY: Tensor) -> Tensor:
    """Each head with the key/value head of its group: [B, H, N, Y]."""
    product_BGMY = _by_group(left_BHNX, right_BGXY.shape[1]) @ right_BGXY
    return product_BGMY.unflatten(2, (-1, left_BHNX.shape[2])).flatten(1, 2)


def _by_group(x_BHNX: Tensor, groups: int) -> Tensor:
    """[B, G, R x N, X]: the heads of a group as so many rows more."""
    return x_BHNX.unflatten(1, (groups, -1)).flatten(2, 3)


# A tile of ring attention by torch's fused kernels, which hold no scores: memory-efficient attention on GPUs, and the
# CPU's flash kernel, on which the tests run.

# B batch, H query heads, G key/value heads, N queries, S keys, K head width

ALIGNED = 8  # keys: a bias row of GPUs begins at a multiple of 16 bytes
PADDED = 32  # queries: the log-sum-exps that GPU kernels return and take


def fused_tile(
    query_BHNK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(softmax(scale q k^T + bias) v, log-sum-exp of the scores [B, H, N]); rows that see nothing: (0, -inf)."""
    heads, queries = query_BHNK.shape[1:3]
    key, value, mask = _copies(key_BGSK, heads), _copies(value_BGSK, heads), _bias(bias, query_BHNK, key_BGSK)
    if query_BHNK.device.type == "cpu":
        mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_BHNK, key, value, attn_mask=mask, scale=scale
        )
    else:
        mixed, log_sum, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query_BHNK, key, value, mask, True, scale=scale
        )
        log_sum = log_sum[:, :, :queries]
    if bias is None:
        return mixed, log_sum
    blind = (bias == -torch.inf).all(dim=-1)
    return mixed.masked_fill(blind.unsqueeze(-1), 0), log_sum.masked_fill(blind, -torch.inf)


def fused_tile_gradients(
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    gradient_BHNK: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. results: mixed [B, H, N, K] and log-sum-exp [B, H, N] over all keys, not of
    this tile, which is all that the kernels need to give this tile's share."""
    query, key_BGSK, value_BGSK = inputs
    mixed, log_sum = results
    heads, groups = query.shape[1], key_BGSK.shape[1]
    key, value, mask = _copies(key_BGSK, heads), _copies(value_BGSK, heads), _bias(bias, query, key_BGSK)
    gradient_BHNK = gradient_BHNK.to(query.dtype)
    if query.device.type == "cpu":
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient_BHNK, query, key, value, mixed, log_sum, 0.0, False, attn_mask=mask, scale=scale
        )
    else:
        padded = F.pad(log_sum, (0, -log_sum.shape[-1] % PADDED), value=torch.inf).contiguous()
        none = torch.empty(0, dtype=torch.int64, device=query.device)
        gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient_BHNK, query, key, value, mask, mixed, padded, none, none, 0.0, [True] * 3 + [False], scale=scale
        )
    query_gradient, *copied = gradients[:3]
    key_gradient, value_gradient = (part.unflatten(1, (groups, -1)).sum(dim=2) for part in copied)
    return query_gradient, key_gradient, value_gradient


def _copies(x_BGSK: Tensor, heads: int) -> Tensor:
    """A key/value head for each query head."""
    copies = heads // x_BGSK.shape[1]
    return x_BGSK if copies == 1 else x_BGSK.repeat_interleave(copies, dim=1)


def _bias(bias: Tensor | None, query_BHNK: Tensor, key_BGSK: Tensor) -> Tensor | None:
    """The bias in the dtype of the queries; on GPUs [B, H, N, S] with rows at multiples of 16 bytes."""
    if bias is None:
        return None
    bias = bias.to(query_BHNK.dtype)
    if query_BHNK.device.type == "cpu":
        return bias
    keys = key_BGSK.shape[2]
    aligned = F.pad(bias, (0, -keys % ALIGNED))[..., :keys]
    return aligned.expand(*query_BHNK.shape[:3], keys)


# The context axis in the attention metadata: which tokens each context rank has, and what its attention computes.

# B batch, T tokens of a sample, C context ranks, Tc tokens of a context rank


def context_metadata(
    config: ModelConfig, axis: Axis, method: ContextMethod, documents_BT: Tensor | None, x: Tensor, tokens: int
) -> tuple[TokenShares, dict[int | None, VisibleTokens]]:
    """The shares, and for the ring which tokens each token sees, by window. All stages of a pipeline get the same from
    the same documents. x: on the device of the model."""
    if method == "all_to_all":
        return token_shares(axis, contiguous_shares(tokens, axis.size), x.device), {}
    causal, windows = config.attention == "causal", config.attention_windows
    if not windows:
        return token_shares(axis, contiguous_shares(tokens, axis.size), x.device), {}
    visible = {window: visible_tokens(tokens, documents_BT, window, causal) for window in set(windows)}
    work_T = torch.stack([visible[window].work_T for window in windows]).sum(dim=0)
    return token_shares(axis, ring_shares(work_T, axis.size), x.device), visible


def ring_shares(work_T: Tensor, ranks: int) -> Tensor:
    """Zig-zag shares, or balanced ones where those are better: int64[C, Tc]. work_T: of each token."""
    choices = [zigzag_shares(len(work_T), ranks), balanced_shares(work_T, ranks)]
    return min(choices, key=lambda index_CT: work_imbalance(work_T, index_CT))


def work_imbalance(work_T: Tensor, index_CT: Tensor) -> float:
    """The work of the busiest rank over the mean. work [1, 2, 3, 4], shares [[0, 1], [2, 3]] -> 1.4."""
    loads_C = work_T[index_CT].double().sum(dim=1)
    return (loads_C.max() / loads_C.mean()).item()


def ring_plans(
    visible: Mapping[int | None, VisibleTokens], shares: TokenShares, slopes_H: Tensor | None
) -> dict[int | None, RingPlan] | None:
    """Ring plan of each window; None without a ring."""
    return {window: ring_plan(visibility, shares, slopes_H) for window, visibility in visible.items()} or None
