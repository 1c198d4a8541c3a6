"""The decoding cache of a model: KV slots of its attention layers, states of the running batch of its other mixers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gristmill.training.model.attention import CoreAttention
from gristmill.training.model.decoding_state import join_rows, take_rows
from gristmill.training.model.kv_slots import KVSlots, SlotRows


class SlotCache:
    """mixers: of this rank's layers, None for a layer without one."""

    def __init__(self, mixers: Sequence[nn.Module | None], slots: int):
        self._layers = [KVSlots(slots) if isinstance(mixer, CoreAttention) else None for mixer in mixers]
        self._stateful = [mixer is not None and not isinstance(mixer, CoreAttention) for mixer in mixers]
        self._states: list[Any] = [None] * len(mixers)

    def copy(self, source: int, target: int, tokens: int) -> None:
        for layer in self._layers:
            if layer is not None:
                layer.copy(source, target, tokens)

    def clear(self, slot: int) -> None:
        for layer in self._layers:
            if layer is not None:
                layer.clear(slot)

    def swap(self, first: int, second: int, tokens: int) -> None:
        for layer in self._layers:
            if layer is not None:
                layer.swap(first, second, tokens)

    def select(self, rows: Sequence[int]) -> None:
        for index, state in enumerate(self._states):
            if state is not None:
                self._states[index] = take_rows(state, torch.as_tensor(rows, dtype=torch.long)) if rows else None

    def states(self, rows: SlotRows) -> tuple[Any, ...]:
        """What each layer's mixer is given in a pass over these rows."""
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
