"""Decoding piece by piece with the caches of the layers, as generation does."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gristmill.training.model.transformer import Transformer


def decoded(
    model: Transformer, tokens_BT: torch.Tensor, padding_B: torch.Tensor, pieces: Iterable[tuple[int, int]]
) -> Iterator[tuple[torch.Tensor, Any]]:
    """(logits of tokens first to end - 1, the layers' caches after them) of each piece (first, end). padding: columns
    on the left of each row that hold no tokens."""
    keys, caches = None, None
    for first, end in pieces:
        columns = torch.arange(end)
        positions = (columns[first:] - padding_B[:, None]).clamp(0)
        visible = (columns[None] <= columns[first:, None])[None] & (columns >= padding_B[:, None])[:, None]
        visible = visible | (columns[None] == columns[first:, None])
        keys = positions if keys is None else torch.cat([keys, positions], dim=1)
        metadata = model.masked_attention_metadata(positions, keys, visible, keep_state=True)
        hidden, caches = model.hidden_states(tokens_BT[:, first:end], metadata, caches)
        yield model.head(hidden), caches
