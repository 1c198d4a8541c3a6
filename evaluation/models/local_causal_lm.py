"""The training Transformer at inference: any positions, any mask, a KV cache."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.models.slot_cache import SlotCache
from gristmill.training.model.attention import CoreAttention
from gristmill.training.model.attention_metadata import AttentionMetadata
from gristmill.training.model.kv_slots import SlotRows
from gristmill.training.model.layer import Layer
from gristmill.training.model.transformer import Transformer

# B rows, T tokens, D width, V vocabulary, N selected positions


class LocalCausalLM:
    """The model in one process, in eval mode and without gradients. vocab_size: of the tokenizer, where the model's
    table has rows of padding behind it; None: the model's."""

    def __init__(self, model: Transformer, sequence_length: int, vocab_size: int | None = None):
        self.model = model.eval().requires_grad_(False)
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size or model.vocab_size
        self.device = model.head.weight.device
        self.reads_trees = not model.config.stateful_mixers

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        visible_BTT: Tensor | None = None,
        wanted_N: Tensor | None = None,
    ) -> Tensor:
        if positions_BT is None or visible_BTT is None:
            metadata = self.model.attention_metadata(tokens_BT, flex=False)
        else:
            metadata = self.model.masked_attention_metadata(positions_BT, visible_BTT)
        if wanted_N is None:
            return self._hidden_states(tokens_BT, metadata, None)[0]
        hidden_1ND, _ = self._hidden_states(tokens_BT, replace(metadata, wanted_N=wanted_N), None)
        return hidden_1ND[0]

    def head(self, hidden_ND: Tensor) -> Tensor:
        return self.model.head(hidden_ND.unsqueeze(0))[0]

    def new_cache(self, slots: int) -> SlotCache:
        return SlotCache([layer.mixer for layer in self._layers()], slots)

    def slot_token_bytes(self) -> int:
        mixers = (layer.mixer for layer in self._layers())
        numbers = sum(mixer.cached_numbers for mixer in mixers if isinstance(mixer, CoreAttention))
        return numbers * torch.empty(0, dtype=self.model.dtype).element_size()

    def read(self, tokens_BT: Tensor, rows: SlotRows, cache: SlotCache) -> Tensor:
        metadata = self.model.slot_attention_metadata(rows)
        if rows.last_only:
            every_N = torch.arange(tokens_BT.numel(), device=self.device)
            metadata = replace(metadata, wanted_N=every_N.view_as(tokens_BT)[:, -1])
        hidden_BTD, states = self._hidden_states(tokens_BT, metadata, cache.states(rows))
        cache.keep(states, rows)
        return hidden_BTD.transpose(0, 1) if rows.last_only else hidden_BTD

    def _layers(self) -> Iterable[Layer]:
        """The layers of this rank, in the order of their states."""
        return self.model.layers.values()

    def _hidden_states(
        self, tokens_BT: Tensor, metadata: AttentionMetadata, caches: tuple[Any, ...] | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        return self.model.hidden_states(tokens_BT, metadata, caches)
