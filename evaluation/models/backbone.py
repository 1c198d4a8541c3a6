"""What evaluation asks of a model, whatever made it."""

from typing import Any, Protocol

import torch
from torch import Tensor

# B rows, T tokens, S tokens before them and they, D width, V vocabulary, N picked positions


class Backbone(Protocol):
    """A causal language model in evaluation mode, whole on one device or cut over several.

    sequence_length: the longest sequence it was built for."""

    vocab_size: int
    sequence_length: int
    device: torch.device

    def hidden(
        self, tokens_BT: Tensor, positions_BT: Tensor | None = None, visible_BTT: Tensor | None = None
    ) -> Tensor:
        """h_BTD before the head. Without positions and mask: plain causal, positions 0..T-1."""
        ...

    def head(self, hidden_ND: Tensor) -> Tensor:
        """logits_NV, all columns on every rank."""
        ...

    def extend(self, tokens_BT: Tensor, positions_BT: Tensor, visible_BTS: Tensor, state: Any) -> tuple[Tensor, Any]:
        """h_BTD of tokens that follow those in `state` (None: nothing yet), and the state with them added."""
        ...
