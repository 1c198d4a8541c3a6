"""Attention metadata of one forward pass: positions, document boundaries, masks, rotary angles.

Built once for all layers."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from gristmill.training.model.attention.ring_plan import RingPlan
from gristmill.training.model.modules import Dropout
from gristmill.training.parallel.collectives import gather_tokens
from gristmill.training.parallel.context import TokenShares, copy_to

# Routing metadata of a training pass: what routers need to know about the batch.

# B samples, T tokens of a sample


@dataclass(frozen=True)
class RoutingMetadata:
    """samples_B: the samples' numbers, from which dropped tokens are drawn. weights_BT: of the tokens in the loss; side
    losses are averaged with the same weights. factor: what the sum of all losses is multiplied by before the backward
    pass. seed: of the run. shares: the tokens of each context rank, None without a context axis. documents_BT: int64 of
    all tokens of a sample, equal for the tokens of a document, which are neighbours; None: one document a sample."""

    samples_B: Tensor
    weights_BT: Tensor
    factor: float | Tensor
    seed: int
    shares: TokenShares | None = None
    documents_BT: Tensor | None = None


# The tokens of a context rank as runs of consecutive tokens, for mixers that read the tokens before theirs.
#
# The ring's shares are not contiguous (zig-zag: two runs a rank), so each run is a row of its own, which receives
# what it needs of the runs before it: the last tokens of them (halo), or the state behind them.

# B rows, T tokens of a sample, C context ranks, Tc tokens of a context rank, n runs of L tokens on each rank
# R = B x n: every run of every row; S = C x n: runs of a sample in their order


class Segments:
    """documents_BT: of whole samples; None: one document a row. A sample's runs are equally long. Which
    of them are this rank's is a tensor: a layer compiled for one batch computes the next, whose shares are others."""

    def __init__(self, shares: TokenShares, documents_BT: Tensor | None):
        self.shares, self.documents_BT = shares, documents_BT
        index_CT = shares.index_CT
        share = index_CT.shape[1]
        self.number = next(number for number in range(1, share + 1) if _are_runs(index_CT, number))
        self.length = share // self.number
        place_Cn = index_CT.unflatten(1, (self.number, -1))[:, :, 0] // self.length
        device = shares.own_T.device
        self.own_n, self.order_S = (
            copy_to(place_Cn[shares.axis.rank], device),
            copy_to(place_Cn.flatten().argsort(), device),
        )

    def split(self, x_BTcX: Tensor) -> Tensor:
        """[B, Tc, ...] -> [R, L, ...]."""
        return x_BTcX.unflatten(1, (self.number, -1)).flatten(0, 1)

    def join(self, x_RLX: Tensor) -> Tensor:
        """The inverse of `split`."""
        return x_RLX.unflatten(0, (-1, self.number)).flatten(1, 2)

    def own(self, per_token_BT: Tensor) -> Tensor:
        """[R, L]: of what every rank knows of all tokens, that of its runs."""
        return self.split(self.shares.own(per_token_BT))

    @property
    def documents_RL(self) -> Tensor | None:
        return None if self.documents_BT is None else self.own(self.documents_BT)

    def known_before(self, per_token_BT: Tensor, count: int, fill: int) -> Tensor:
        """[R, count]: of what every rank knows of all tokens, that of the tokens before each run; `fill` before the
        first token of all."""
        padded_BT = F.pad(per_token_BT, (count, 0), value=fill)
        first_n1 = (self.own_n * self.length).unsqueeze(1)
        return padded_BT[:, first_n1 + torch.arange(count, device=first_n1.device)].flatten(0, 1)

    def before(self, x_RLX: Tensor, count: int) -> Tensor:
        """[R, count, X]: the tokens before each run, from the ranks that have them; zero where they are of another
        document than the run's first token."""
        if not count:
            return x_RLX[:, :0]
        runs = -(-count // self.length)
        tails_BSKX = self.gather(x_RLX[:, self.length - min(count, self.length) :])
        padded_BSKX = F.pad(tails_BSKX, (0, 0, 0, 0, runs, 0))
        place_nr = self.own_n.unsqueeze(1) + torch.arange(runs, device=self.own_n.device)
        before_RKX = padded_BSKX[:, place_nr].flatten(0, 1).flatten(1, 2)
        before_RKX = before_RKX[:, before_RKX.shape[1] - count :]
        if self.documents_BT is None:
            return before_RKX
        first_R1 = self.own(self.documents_BT)[:, :1]
        same_RK = self.known_before(self.documents_BT, count, fill=-1) == first_R1
        return before_RKX * same_RK.unsqueeze(-1).to(before_RKX.dtype)

    def state_before(self, kept_RX: Tensor, added_RX: Tensor) -> Tensor:
        """The state before each run of a recurrence state = kept x state + added, which restarts where a document
        does. kept_RX, added_RX: of each run, broadcast against one another."""
        kept_BSX, added_BSX = self.gather(kept_RX), self.gather(added_RX)
        continues_BS = self._continues(added_BSX)
        # Zero, but a result of both, so that the backward passes of all ranks have the same collectives.
        state_BX, states = added_BSX[:, :0].sum(dim=1) + kept_BSX[:, :0].sum(dim=1), []
        for run in range(added_BSX.shape[1]):
            if run:
                state_BX = state_BX * kept_BSX[:, run - 1] + added_BSX[:, run - 1]
            if continues_BS is not None:
                state_BX = state_BX * continues_BS[:, run].view(-1, *[1] * (state_BX.dim() - 1))
            states.append(state_BX)
        return torch.stack(states, dim=1).index_select(1, self.own_n).flatten(0, 1)

    def gather(self, x_RX: Tensor) -> Tensor:
        """[B, S, ...]: of every run of the sample in its order; backward, each rank gets the sum of the gradients of
        its runs."""
        x_BnX = x_RX.unflatten(0, (-1, self.number))
        flat_BSF = gather_tokens(x_BnX.flatten(2), self.shares.axis.group)
        return flat_BSF.index_select(1, self.order_S).unflatten(2, x_RX.shape[1:])

    def _continues(self, like: Tensor) -> Tensor | None:
        """[B, S]: 1 where a run begins inside a document."""
        if self.documents_BT is None:
            return None
        starts = self.documents_BT[:, :: self.length]
        before = F.pad(self.documents_BT[:, self.length - 1 :: self.length][:, :-1], (1, 0), value=-1)
        return (starts == before).to(like.dtype)


def _are_runs(index_CT: Tensor, number: int) -> bool:
    """Whether each share is so many runs of consecutive tokens."""
    if index_CT.shape[1] % number:
        return False
    return bool((index_CT.unflatten(1, (number, -1)).diff(dim=2) == 1).all())


Mask = Tensor | BlockMask | None  # None: all before a token, or all tokens in a bidirectional model

# B batch, T tokens (queries), S tokens looked at (the past, then T), K head width


class LayerHook:
    """Surroundings of the computation of a layer, without effect here. A layer calls its hook at three places, and
    the hooks of `layer_hook.py` override those they need. Hooks need no random state: dropout masks are hashes."""

    def around_layer(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        """Around the whole layer: compute(x_BTD, metadata, state)."""
        return compute(*inputs)

    def around_mixer(self, mix: Callable[..., Any], *inputs: Any) -> Any:
        """Around the mixer and the norm before it: mix(x_BTD, metadata, state)."""
        return mix(*inputs)

    def around_token_mixing(self, function: Callable[..., Tensor], *streams: Tensor) -> Tensor:
        """Around all in a layer that is not computed token by token: function(*streams) [B, T, ...] of tensors
        [B, T, ...], such as attention of queries, keys and values, scans and routed experts. A hook may replace the
        result without calling the function. Called on the hook of the pass, `AttentionMetadata.hook`."""
        return function(*streams)


NO_HOOK = LayerHook()


@dataclass(frozen=True)
class AttentionMetadata:
    """masks_BTS: for each window that some layer has, which tokens each token sees; None needs no mask: plainly causal,
    or everything where causal is false. With ALiBi they are numbers to add instead, float[B, Ht, T, S]. rotation_BTK:
    cosine and sine of the rotary angles, or None; window_rotation_BTK: those of layers with a window, where they are
    others. keep_state: mixers return their state. routing: what routers need in training; None elsewhere.
    documents_BT: int64, equal for the tokens of a document, which are neighbours; of these tokens only, for mixers that
    carry a state; None: one document a row.

    shares: the tokens of each context rank, of which positions_BT and rotation_BTK hold this rank's; None without a
    context axis. Attention then has masks_BTS of all tokens, for its share of the heads, or a ring for each window, and
    mixers that carry a state have segments, the runs of this rank's tokens.
    hook: of the pass, around all in a layer that is not computed token by token.
    wanted_N: int64, of the tokens [B x T] those whose hidden states are wanted in inference; None: all."""

    positions_BT: Tensor
    masks_BTS: Mapping[int | None, Mask]
    rotation_BTK: tuple[Tensor, Tensor] | None = None
    dropout: Dropout | None = None
    keep_state: bool = False
    routing: RoutingMetadata | None = None
    causal: bool = True
    documents_BT: Tensor | None = None
    window_rotation_BTK: tuple[Tensor, Tensor] | None = None
    shares: TokenShares | None = None
    segments: Segments | None = None
    ring: Mapping[int | None, RingPlan] | None = None
    hook: LayerHook = NO_HOOK
    wanted_N: Tensor | None = None

    def rotation_of(self, window: int | None) -> tuple[Tensor, Tensor] | None:
        """The rotary angles of a layer with this window."""
        return self.rotation_BTK if window is None or self.window_rotation_BTK is None else self.window_rotation_BTK

    def mix(self, function: Callable[..., Tensor], *streams: Tensor) -> Tensor:
        """function(*streams) [B, T, ...] of tensors [B, T, ...], which is not computed token by token."""
        return self.hook.around_token_mixing(function, *streams)

    def of_tokens(self, first: int, shards: int = 1) -> "AttentionMetadata":
        """For what is computed token by token, over the tokens from `first` on of each of so many shards."""

        def rest(x: Tensor) -> Tensor:
            return x.unflatten(1, (shards, -1))[:, :, first:].flatten(1, 2)

        def last(parts: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
            return None if parts is None else (rest(parts[0]), rest(parts[1]))

        dropout = self.dropout
        if dropout is not None:
            dropout = replace(dropout, positions_T=dropout.positions_T[first:])
        return replace(
            self,
            positions_BT=rest(self.positions_BT),
            masks_BTS={},
            rotation_BTK=last(self.rotation_BTK),
            window_rotation_BTK=last(self.window_rotation_BTK),
            dropout=dropout,
        )

    def tensors(self) -> list[Tensor]:
        """Those that all layers share."""
        shared = [self.positions_BT, *(self.rotation_BTK or ()), *(self.window_rotation_BTK or ())]
        shared += [mask for mask in self.masks_BTS.values() if isinstance(mask, Tensor)]
        return shared if self.documents_BT is None else [*shared, self.documents_BT]

    def drop(self, x_BTD: Tensor, layer: int, site: int) -> Tensor:
        return x_BTD if self.dropout is None else self.dropout(x_BTD, layer, site)


def causal_masks(
    windows: Iterable[int | None], tokens: int, documents_BT: Tensor | None, device: torch.device
) -> dict[int | None, Mask]:
    """A mask for each window. Token t sees itself and the window - 1 before it, in its own document where documents are
    given (int64[B, T], equal numbers are one document).

    tokens 3, window 2 -> [[1, 0, 0], [1, 1, 0], [0, 1, 1]]."""
    windows = set(windows)
    masks: dict[int | None, Mask] = {}
    if documents_BT is None:  # nothing of size T x T is made for those
        masks = {window: None for window in windows if window is None or window >= tokens}
    if len(masks) == len(windows):
        return masks
    back_TS = _distances(tokens, device)
    same_BTS = None if documents_BT is None else documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
    for window in windows - masks.keys():
        seen_TS = back_TS >= 0 if window is None else (back_TS >= 0) & (back_TS < window)
        masks[window] = seen_TS.unsqueeze(0) if same_BTS is None else seen_TS & same_BTS
    return masks


def document_masks(documents_BT: Tensor | None) -> dict[int | None, Mask]:
    """The mask of bidirectional attention: each token sees all tokens of its own document."""
    if documents_BT is None:
        return {None: None}
    return {None: documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)}


def alibi_masks(masks: Mapping[int | None, Mask], tokens: int, slopes_H: Tensor) -> dict[int | None, Mask]:
    """The masks as numbers to add: for each head, minus its slope for every token of distance (arXiv 2108.12409)."""
    back_TS = _distances(tokens, slopes_H.device)
    visible = {
        window: mask if isinstance(mask, Tensor) else back_TS.unsqueeze(0) >= 0 for window, mask in masks.items()
    }
    return {window: alibi_bias(mask_BTS, back_TS.unsqueeze(0), slopes_H) for window, mask_BTS in visible.items()}


def explicit_masks(
    windows: Iterable[int | None],
    positions_BT: Tensor,
    key_positions_BS: Tensor,
    visible_BTS: Tensor,
    slopes_H: Tensor | None,
) -> dict[int | None, Mask]:
    """A mask for each window from an arbitrary mask, with ALiBi's bias where slopes are given.

    Windows and ALiBi count distance in positions, not in columns: in a tree, neighbouring columns may differ in depth
    by more than one."""
    windows = set(windows)
    if slopes_H is None and windows <= {None}:
        return dict.fromkeys(windows, visible_BTS)
    back_BTS = positions_BT.unsqueeze(2) - key_positions_BS.unsqueeze(1)
    masks = {window: visible_BTS if window is None else visible_BTS & (back_BTS < window) for window in windows}
    if slopes_H is None:
        return dict(masks)
    return {window: alibi_bias(mask_BTS, back_BTS, slopes_H) for window, mask_BTS in masks.items()}


def documents_of_chains(visible_BTT: Tensor) -> Tensor:
    """int64[B, T]: 1 for the tokens that are read, 0 for padding on their left, of rows that are chains.
    Raises ValueError for a tree."""
    index_T = torch.arange(visible_BTT.shape[1], device=visible_BTT.device)
    read_BT = visible_BTT[:, -1]
    chain_BTT = read_BT.unsqueeze(1) & (index_T <= index_T.unsqueeze(1))
    expected_BTT = torch.where(read_BT.unsqueeze(2), chain_BTT, index_T == index_T.unsqueeze(1))
    if not torch.equal(visible_BTT, expected_BTT) or (read_BT[:, 1:] < read_BT[:, :-1]).any():
        raise ValueError("layers that carry a state read one chain of tokens a row, not a tree; give each its own row")
    return read_BT.long()


def alibi_bias(seen_BTS: Tensor, back_BTS: Tensor, slopes_H: Tensor) -> Tensor:
    """[B, H, T, S]: -slope x distance where a token is seen, minus infinity elsewhere."""
    bias_BHTS = -slopes_H.view(-1, 1, 1) * back_BTS.unsqueeze(1).to(slopes_H.dtype)
    return bias_BHTS.masked_fill(~seen_BTS.unsqueeze(1), -torch.inf)


def alibi_slopes(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """2**(-8/n), 2**(-16/n), ... for a power of two n; other counts take every second slope of 2n for the rest, as the
    paper's own code does. 8 heads -> 1/2, 1/4, ... 1/256."""
    power = 2 ** math.floor(math.log2(heads))
    number = torch.arange(heads, dtype=torch.float64, device=device)  # made on the device: no copy is waited for
    exponent = torch.where(number < power, number + 1, number - power + 0.5) * (-8 / power)
    return exponent.exp2().to(dtype)


def _distances(tokens: int, device: torch.device) -> Tensor:
    """Distance in tokens from each query back to each key: int64[T, T]."""
    return torch.arange(tokens, device=device).unsqueeze(1) - torch.arange(tokens, device=device)


# Masks for the flex kernels of GPUs, which skip blocks of tokens that see nothing of each other.
#
# The blocks follow from where each document begins, so that nothing of size tokens x tokens is made: for B samples of T
# tokens in blocks of 128, B (T / 128)^2 bits.


# B batch (1 where all samples are alike), T tokens, Q blocks of queries, S blocks of keys

BLOCK = 128  # tokens of a block, the default of the kernels


def block_masks(
    windows: Iterable[int | None],
    tokens: int,
    documents_BT: Tensor | None,
    device: torch.device,
    plain: bool = True,
) -> dict[int | None, BlockMask | None]:
    """The masks of `causal_masks` by window, for whole samples only; equal documents must be neighbours. plain: no mask
    for plainly causal attention, which another kernel computes."""
    masks: dict[int | None, BlockMask | None] = {}
    for window in set(windows):
        if documents_BT is not None:
            masks[window] = _block_mask(window, tokens, documents_BT, device)
        elif plain and (window is None or window >= tokens):
            masks[window] = None
        else:
            masks[window] = _mask_of_shape(window, tokens, device)
    return masks


@lru_cache(maxsize=16)
def _mask_of_shape(window: int | None, tokens: int, device: torch.device) -> BlockMask:
    return _block_mask(window, tokens, None, device)


def _block_mask(window: int | None, tokens: int, documents_BT: Tensor | None, device: torch.device) -> BlockMask:
    """Partly seen blocks, and those of which every query sees every key."""
    begin_BT = document_begins(documents_BT, tokens, device)
    first_Q = torch.arange(0, tokens, BLOCK, device=device)
    last_Q = (first_Q + BLOCK - 1).clamp(max=tokens - 1)
    first_Q1, last_Q1 = first_Q.unsqueeze(1), last_Q.unsqueeze(1)
    # The first query of a block looks furthest back; its last one least.
    begin_BQ1 = begin_BT[:, first_Q].unsqueeze(2)
    seen_BQS = (first_Q <= last_Q1) & (last_Q >= begin_BQ1)
    full_BQS = (last_Q <= first_Q1) & (first_Q >= begin_BT[:, last_Q].unsqueeze(2))
    full_BQS = full_BQS & (first_Q1 + BLOCK <= tokens)  # the last block may be shorter
    if window is not None:
        seen_BQS = seen_BQS & (first_Q1 - last_Q < window)
        full_BQS = full_BQS & (last_Q1 - first_Q < window)
    full_BQS = full_BQS & seen_BQS
    some, full = _ordered(seen_BQS & ~full_BQS), _ordered(full_BQS)
    sees = _seen(window, documents_BT)
    return BlockMask.from_kv_blocks(*some, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tokens, tokens))


def document_begins(documents_BT: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """The place where each token's document begins. [7, 7, 9] -> [0, 0, 2]."""
    if documents_BT is None:
        return torch.zeros(1, tokens, dtype=torch.int64, device=device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    place_T = torch.arange(tokens, device=device)
    return torch.where(begins_BT, place_T, 0).cummax(dim=1).values


def _ordered(blocks_BQS: Tensor) -> tuple[Tensor, Tensor]:
    """(number of key blocks of each block of queries, their numbers first) for all heads."""
    count_BQ = blocks_BQS.sum(dim=-1, dtype=torch.int32)
    index_BQS = blocks_BQS.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count_BQ.unsqueeze(1), index_BQS.unsqueeze(1)


def _seen(window: int | None, documents_BT: Tensor | None) -> Callable[..., Tensor]:
    def sees(row: Tensor, head: Tensor, asking: Tensor, seen: Tensor) -> Tensor:
        allowed = asking >= seen
        if window is not None:
            allowed = allowed & (asking - seen < window)
        if documents_BT is not None:
            allowed = allowed & (documents_BT[row, asking] == documents_BT[row, seen])
        return allowed

    return sees
