"""The training Transformer at inference: any positions, any mask, a KV cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.training.model.attention.attention import CoreAttention
from gristmill.training.model.attention.metadata import AttentionMetadata
from gristmill.training.model.decoding_cache import KVSlots, SlotRows, join_rows, pages_slots, take_rows
from gristmill.training.model.flat_pass import FlatLayers, FlatTokens
from gristmill.training.model.heads import Head
from gristmill.training.model.layer import Layer
from gristmill.training.model.transformer import Transformer

# The decoding cache of a model: KV slots of its attention layers, states of the running batch of its other mixers.


class SlotCache:
    """mixers: of this rank's layers, None for a layer without one. columns: of the longest sequence. renames: slots are
    exchanged by their numbers in `places`, not by their numbers in memory; who reads them looks there."""

    def __init__(self, mixers: Sequence[nn.Module | None], slots: int, columns: int, renames: bool = False):
        self.places, self._renames = np.arange(slots), renames  # of slots in memory
        self._layers = [KVSlots(slots, columns) if isinstance(mixer, CoreAttention) else None for mixer in mixers]
        self._stateful = [mixer is not None and not isinstance(mixer, CoreAttention) for mixer in mixers]
        self._states: list[Any] = [None] * len(mixers)

    @property
    def kv_slots(self) -> list[KVSlots]:
        """Slots of all layers, each of which has attention."""
        return [layer for layer in self._layers if layer is not None]

    def copy(self, source: int, target: int, tokens: int) -> None:
        for layer in self._layers:
            if layer is not None:
                layer.copy(int(self.places[source]), int(self.places[target]), tokens)

    def release(self, slot: int, tokens: int) -> None:
        for layer in self._layers:
            if layer is not None:
                layer.release(int(self.places[slot]), tokens)

    def swap(self, first: int, second: int, first_tokens: int, second_tokens: int) -> None:
        if self._renames:
            self.places[[first, second]] = self.places[[second, first]]
            return
        for layer in self._layers:
            if layer is not None:
                layer.swap(first, second, first_tokens, second_tokens)

    def select(self, rows: Sequence[int]) -> None:
        for index, state in enumerate(self._states):
            if state is not None:
                self._states[index] = take_rows(state, torch.as_tensor(rows, dtype=torch.long)) if rows else None

    def states(self, rows: SlotRows) -> tuple[Any, ...]:
        """States that each layer's mixer is given in a pass over these rows."""
        return tuple(
            layer.at(rows) if layer is not None else (None if rows.fresh else state)
            for layer, state in zip(self._layers, self._states, strict=True)
        )

    def keep(self, states: Sequence[Any], rows: SlotRows) -> None:
        """Takes over what the mixers returned: new rows are appended to the running batch."""
        for index, (is_stateful, state) in enumerate(zip(self._stateful, states, strict=True)):
            if is_stateful:
                before = self._states[index]
                self._states[index] = join_rows([before, state]) if rows.fresh and before is not None else state


# B rows, T tokens, D width, V vocabulary, N selected positions


def head_of(model: Transformer) -> Head:
    """The vocabulary head of a model whose last layer is here."""
    if model.head is None:
        raise ValueError("this part of the model has no head; score on the last pipeline stage")
    return model.head


def layers_of(model: Transformer) -> Iterable[Layer]:
    return cast(Iterable[Layer], model.layers.values())


@dataclass
class DividedPass:
    """A pass over tokens that runs some layers at a time. x: tokens, then the hidden states behind `layers_done`."""

    x: Tensor
    layers_done: int = 0
    metadata: AttentionMetadata | None = None


class LocalCausalLM:
    """The model in one process, in eval mode and without gradients. vocab_size: of the tokenizer, where the model's
    table has rows of padding behind it; None: the model's."""

    def __init__(self, model: Transformer, sequence_length: int, vocab_size: int | None = None):
        self.model = model.eval().requires_grad_(False)
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size or model.vocab_size
        self.device = head_of(model).weight.device
        self.reads_trees = not model.config.stateful_mixers
        self._flat = FlatLayers.of(model)
        self.skips_padding = self._flat is not None

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
        return head_of(self.model)(hidden_ND.unsqueeze(0))[0]

    def new_cache(self, slots: int) -> SlotCache:
        mixers = [layer.mixer for layer in self._layers()]
        return SlotCache(mixers, slots, self.sequence_length, renames=self._flat is not None)

    @property
    def paged_cache(self) -> bool:
        return pages_slots(self.device)

    def slot_token_bytes(self) -> int:
        mixers = (layer.mixer for layer in self._layers())
        numbers = sum(mixer.cached_numbers for mixer in mixers if isinstance(mixer, CoreAttention))
        return numbers * torch.empty(0, dtype=self.model.dtype).element_size()

    def read(self, tokens_BT: Tensor, rows: SlotRows, cache: SlotCache) -> Tensor:
        if self._flat is not None:
            return self._flat.hidden(tokens_BT, FlatTokens.of(rows, cache.places), cache.kv_slots)
        metadata = self.model.slot_attention_metadata(rows)
        if rows.last_only:
            every_N = torch.arange(tokens_BT.numel(), device=self.device)
            metadata = replace(metadata, wanted_N=every_N.view_as(tokens_BT)[:, -1])
        hidden_BTD, states = self._hidden_states(tokens_BT, metadata, cache.states(rows))
        cache.keep(states, rows)
        return hidden_BTD.transpose(0, 1) if rows.last_only else hidden_BTD

    @property
    def layer_count(self) -> int:
        """Layers that `read_some` counts; 1 where a pass is not divided."""
        return 1 if self._flat is not None or self.model.config.stateful_mixers else len(self.model.layers)

    def read_some(self, part: DividedPass, rows: SlotRows, cache: Any, layers: int) -> Tensor | None:
        """Runs the next layers of a pass that wants the last token of each row; its hidden states once all have run,
        as `read` gives them. rows: the same in each call but for the slots, whose columns may have moved."""
        if self.layer_count == 1:
            return self.read(part.x, rows, cache)
        if part.metadata is None:
            every_N = torch.arange(part.x.numel(), device=self.device)
            wanted_N = every_N.view_as(part.x)[:, -1]
            part.metadata = replace(self.model.slot_attention_metadata(rows), wanted_N=wanted_N)
        some = range(part.layers_done, min(part.layers_done + layers, self.layer_count))
        part.x, _ = self.model.hidden_states(part.x, part.metadata, cache.states(rows), some=some)
        part.layers_done = some.stop
        return part.x.transpose(0, 1) if part.layers_done == self.layer_count else None

    def _layers(self) -> Iterable[Layer]:
        """The layers of this rank, in the order of their states."""
        return layers_of(self.model)

    def _hidden_states(
        self, tokens_BT: Tensor, metadata: AttentionMetadata, caches: tuple[Any, ...] | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        return self.model.hidden_states(tokens_BT, metadata, caches)
