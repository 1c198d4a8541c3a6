"""The interface of a causal language model at inference: token ids to hidden states to logits."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gristmill.training.model.decoding_cache import SlotRows

# B rows, T tokens, D width, V vocabulary, N selected positions


class DecodingCache(Protocol):
    """The tokens that sequences have read, one slot a sequence. The slots 0, 1, ... are the running batch."""

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the keys and values of the first tokens of one slot to another."""
        ...

    def release(self, slot: int, tokens: int) -> None:
        """Forgets what is behind the first tokens of a slot, and gives its memory back where it can. Without any left
        nothing of the slot is read again, so its keys and values may not have been finite."""
        ...

    def swap(self, first: int, second: int, first_tokens: int, second_tokens: int) -> None:
        """Exchanges two slots, of which so many tokens are kept."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Makes the states of mixers that carry one those of these rows of the running batch, in that order."""
        ...


class CausalLM(Protocol):
    """A causal language model in evaluation mode, on one device or sharded over several.

    vocab_size: of the tokenizer; rows of the table behind it are padding, which counts in the sum of the softmax, as in
    training, and is never generated. sequence_length: the longest sequence it was built for. reads_trees: a row may be
    a tree of continuations; else it is one chain of tokens. skips_padding: tokens that pad rows of `read` cost
    nothing."""

    vocab_size: int
    sequence_length: int
    device: torch.device
    reads_trees: bool
    skips_padding: bool

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        visible_BTT: Tensor | None = None,
        wanted_N: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states [B, T, D]; with wanted_N, int64 places among the B x T tokens, those of these [N, D].
        Without positions and mask: causal attention, positions 0..T-1."""
        ...

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, rows of the table], on every rank: of the whole vocabulary and of the padding behind it."""
        ...

    def new_cache(self, slots: int) -> DecodingCache: ...

    @property
    def paged_cache(self) -> bool:
        """Whether the memory of a cache follows the tokens in it; else every slot has as much as the longest."""
        ...

    def slot_token_bytes(self) -> int:
        """Bytes that a token of a sequence takes in the cache of this rank."""
        ...

    def read(self, tokens_BT: Tensor, rows: SlotRows, cache: Any) -> Tensor:
        """Hidden states [B, T, D] of tokens, which are added to the cache; at least the last ones where the rows want
        no others. Mixers with a state read rows that are all new (the batch grows by them), or one token of each row of
        the batch."""
        ...
