"""Which tokens each context rank has, which tokens they see, and the tiles of queries and keys that its ring attention
computes."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from gristmill.training.config.layout import ContextMethod
from gristmill.training.config.model import ModelConfig
from gristmill.training.parallel.context import (
    TokenShares,
    balanced_shares,
    contiguous_shares,
    copy_to,
    token_shares,
    zigzag_shares,
)
from gristmill.training.parallel.mesh import Axis

# B batch, T tokens of a sample, C context ranks, Tc tokens of a context rank, H query heads
# N queries of a tile, S keys of it

QUERIES = 128  # of a tile; keys that none of them sees are not looked at
QUERIES_GPU = 2048  # of a tile of a fused kernel
MIN_DOCUMENT = 256  # tokens of a mean document, from which on tiles begin where documents do

SEEN, MASKED, CAUSAL = range(3)  # what the queries of a tile see of its keys: all, some, those up to themselves


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
    """documents [[0, 0, 1, 1]], causal -> first [[0, 0, 2, 2]], last [[0, 1, 2, 3]]. documents_BT: on the CPU."""
    place_T = torch.arange(tokens)
    first_BT, last_BT = torch.zeros(1, tokens, dtype=torch.int64), torch.full((1, tokens), tokens - 1)
    if documents_BT is not None:
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
    the queries do not see some of the keys; causal: because each query sees the keys up to itself."""

    queries: slice
    keys: slice
    masked: bool
    causal: bool


@dataclass(frozen=True)
class RingPlan:
    """Tiles and visibility bounds of the layers of one window, in tensors alone, which compiled layers take as inputs.

    tiles_N6: int64 on the CPU, the tiles of all sources one after another: source (the rank that the keys come from),
    first and last + 1 of the queries, of the keys, what they see (SEEN, MASKED, CAUSAL). first_BTc, last_BTc: the
    tokens that this rank's tokens own_T see; index_CT: of the shares; slopes_H of ALiBi. Those are on the device.
    group: name of the process group."""

    tiles_N6: Tensor
    own_T: Tensor
    first_BTc: Tensor
    last_BTc: Tensor
    index_CT: Tensor
    slopes_H: Tensor | None
    group: str

    @classmethod
    def of(cls, tensors: Sequence[Tensor], group: str) -> "RingPlan":
        """From what `tensors` gives."""
        tiles_N6, own_T, first_BTc, last_BTc, index_CT, *slopes = tensors
        return cls(tiles_N6, own_T, first_BTc, last_BTc, index_CT, slopes[0] if slopes else None, group)

    @property
    def tensors(self) -> list[Tensor]:
        tensors = [self.tiles_N6, self.own_T, self.first_BTc, self.last_BTc, self.index_CT]
        return tensors if self.slopes_H is None else [*tensors, self.slopes_H]

    @property
    def tiles(self) -> list[list[Tile]]:
        """By source."""
        tiles: list[list[Tile]] = [[] for _ in self.index_CT]
        for source, start, stop, key_start, key_stop, seen in self.tiles_N6.tolist():
            tiles[source].append(Tile(slice(start, stop), slice(key_start, key_stop), seen != SEEN, seen == CAUSAL))
        return tiles

    @property
    def axis(self) -> Axis:
        group = distributed_c10d._resolve_process_group(self.group)  # type: ignore[arg-type]
        return Axis(dist.get_world_size(group), dist.get_rank(group), group)

    def bias(self, tile: Tile, source: int, dtype: torch.dtype) -> Tensor | None:
        """Bias that is added to the scores: [B, 1, N, S] or, with ALiBi, [B, H, N, S]; None where nothing is."""
        key_S = self.index_CT[source, tile.keys]
        bias = None
        if self.slopes_H is not None:
            back_NS = self.own_T[tile.queries].unsqueeze(1) - key_S
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
    queries = QUERIES if device.type == "cpu" else QUERIES_GPU
    own, bounds_BTc = own_T.numpy(), (first_BTc.numpy(), last_BTc.numpy())
    begins = _begins(own, bounds_BTc[0], queries)
    tiles = [_tiles(begins, source, keys_T.numpy(), *bounds_BTc) for source, keys_T in enumerate(shares.index_CT)]
    tiles[shares.axis.rank] = _with_causal(tiles[shares.axis.rank], own, *bounds_BTc)
    tiles_N6 = torch.from_numpy(np.concatenate(tiles))
    torch._dynamo.maybe_mark_dynamic(tiles_N6, 0)  # as many as the documents make
    name = "" if shares.axis.group is None else shares.axis.group.group_name
    bounds = copy_to(first_BTc, device), copy_to(last_BTc, device)
    return RingPlan(tiles_N6, shares.own_T, *bounds, copy_to(shares.index_CT, device), slopes_H, name)


def _tiles(
    begins: np.ndarray, source: int, keys_T: np.ndarray, first_BTc: np.ndarray, last_BTc: np.ndarray
) -> np.ndarray:
    """Rows of `RingPlan.tiles_N6`. The tokens that a token sees are neighbours, so the keys that the queries of a tile
    see are a slice of a rising share. begins: of the tiles."""
    first_TcM, last_TcM = ((bound_BTc.min(axis=0), bound_BTc.max(axis=0)) for bound_BTc in (first_BTc, last_BTc))
    start = np.searchsorted(keys_T, np.minimum.reduceat(first_TcM[0], begins))
    end = np.searchsorted(keys_T, np.maximum.reduceat(last_TcM[1], begins), side="right")
    all_begun, none_ended = np.maximum.reduceat(first_TcM[1], begins), np.minimum.reduceat(last_TcM[0], begins)
    number = np.flatnonzero(start < end)
    start, end = start[number], end[number]
    masked = (keys_T[start] < all_begun[number]) | (keys_T[end - 1] > none_ended[number])
    queries_end = np.append(begins, first_BTc.shape[1])[number + 1]
    return np.stack([np.full_like(start, source), begins[number], queries_end, start, end, masked], axis=1)


def _with_causal(tiles_N6: np.ndarray, own_T: np.ndarray, first_BTc: np.ndarray, last_BTc: np.ndarray) -> np.ndarray:
    """The tiles of a rank's own keys, in two where that makes the first one causal: the queries' own tokens, and the
    keys before them. Flash kernels take no other masks. Every query sees itself, and `merge` wants a first result that
    is not empty."""
    tiles = []
    for source, start, stop, key_start, key_stop, seen in tiles_N6.tolist():
        span = slice(start, stop)
        up_to_itself = stop == key_stop and (last_BTc[:, span] == own_T[span]).all()
        last_begun = first_BTc[:, span].max()
        if not up_to_itself or last_begun > own_T[start]:
            tiles.append((source, start, stop, key_start, key_stop, seen))
            continue
        tiles.append((source, start, stop, start, stop, CAUSAL))
        if key_start < start:
            before = MASKED if own_T[key_start] < last_begun else SEEN
            tiles.append((source, start, stop, key_start, start, before))
    return np.array(tiles, dtype=tiles_N6.dtype).reshape(-1, tiles_N6.shape[1])


def _begins(index_T: np.ndarray, first_BTc: np.ndarray, queries: int) -> np.ndarray:
    """Where the tiles of a share begin: runs of neighbouring tokens, at most so long, and of one document where
    documents are long. [0, 1, 6, 7] -> [0, 2]."""
    new_document = (first_BTc == index_T).any(axis=0)
    cut = new_document if new_document.sum() * MIN_DOCUMENT <= len(index_T) else np.zeros_like(new_document)
    cut[1:] |= np.diff(index_T) != 1
    cut[0] = True
    runs = [*np.flatnonzero(cut).tolist(), len(index_T)]
    return np.concatenate([np.arange(*run, queries) for run in itertools.pairwise(runs)])


def context_metadata(
    config: ModelConfig, axis: Axis, method: ContextMethod, host_documents_BT: Tensor | None, x: Tensor, tokens: int
) -> tuple[TokenShares, dict[int | None, VisibleTokens]]:
    """The shares, and for the ring which tokens each token sees, by window. All stages of a pipeline get the same from
    the same documents. host_documents_BT: on the CPU. x: on the device of the model."""
    if method == "all_to_all":
        return token_shares(axis, contiguous_shares(tokens, axis.size), x.device), {}
    causal, windows = config.attention == "causal", config.attention_windows
    if not windows:
        return token_shares(axis, contiguous_shares(tokens, axis.size), x.device), {}
    visible = {window: visible_tokens(tokens, host_documents_BT, window, causal) for window in set(windows)}
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
