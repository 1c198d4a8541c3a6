"""Decoding piece by piece with the cache that generation uses."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.training.model.decoding_cache import SlotRows
from gristmill.training.model.transformer import Transformer


def decoded(
    model: Transformer, tokens_BT: Tensor, padding_B: Tensor, pieces: Iterable[tuple[int, int]]
) -> Iterator[tuple[Tensor, Any]]:
    """(logits of tokens first to end - 1, the states of the layers' mixers after them) of each piece (first, end).
    padding: columns on the left of each row that hold no tokens."""
    causal_lm = LocalCausalLM(model, tokens_BT.shape[1])
    cache = causal_lm.new_cache(len(tokens_BT))
    for first, end in pieces:
        positions_BT = (torch.arange(first, end) - padding_B[:, None]).clamp(min=-1)
        hidden_BTD = causal_lm.read(tokens_BT[:, first:end], SlotRows.of_batch(positions_BT, causal_lm.device), cache)
        after = SlotRows.of_batch(end - padding_B[:, None], causal_lm.device)
        yield model.head(hidden_BTD), cache.states(after)


def read_in_pieces(causal_lm: CausalLM, tokens_BT: Tensor, ends: Iterable[int]) -> Tensor:
    """Hidden states [B, T, D] of the tokens up to each end, read one piece after another."""
    cache, first, pieces = causal_lm.new_cache(len(tokens_BT)), 0, []
    for end in ends:
        positions_BT = torch.arange(first, end).expand(len(tokens_BT), -1)
        rows = SlotRows.of_batch(positions_BT, causal_lm.device)
        pieces.append(causal_lm.read(tokens_BT[:, first:end], rows, cache))
        first = end
    return torch.cat(pieces, dim=1)
