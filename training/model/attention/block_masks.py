"""Masks for the flex kernels of GPUs, which skip blocks of tokens that see nothing of each other.

The blocks follow from where each document begins, so that nothing of size tokens x tokens is made: for B samples of T
tokens in blocks of 128, B (T / 128)^2 bits."""

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

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
