"""The interface of a causal language model at inference: token ids to hidden states to logits."""

from typing import Any, Protocol

import torch
from torch import Tensor

# B rows, T tokens, S cached tokens and the new ones, D width, V vocabulary, N selected positions


class CausalLM(Protocol):
    """A causal language model in evaluation mode, on one device or sharded over several.

    sequence_length: the longest sequence it was built for. reads_trees: a row may be a tree of continuations; else it
    is one chain of tokens."""

    vocab_size: int
    sequence_length: int
    device: torch.device
    reads_trees: bool

    def hidden(
        self, tokens_BT: Tensor, positions_BT: Tensor | None = None, visible_BTT: Tensor | None = None
    ) -> Tensor:
        """Final hidden states [B, T, D]. Without positions and mask: causal attention, positions 0..T-1."""
        ...

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] over the whole vocabulary, on every rank."""
        ...

    def extend(self, tokens_BT: Tensor, positions_BT: Tensor, visible_BTS: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Hidden states [B, T, D] of tokens that follow `state` (such as KV caches; None: empty), and the new state."""
        ...
