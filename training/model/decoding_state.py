"""Rows of decoding states: take some, join those of several batches. For every mixer but attention."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill.training.model.ring_buffer import RingBuffer


def take_rows(state: Any, rows: Tensor) -> Any:
    """The state of the given batch rows, in that order. A state is a tensor whose first dimension are the rows, a ring
    buffer, or a tuple or dataclass of them. Raises TypeError for another."""
    if isinstance(state, Tensor):
        return state[rows]
    if isinstance(state, RingBuffer):
        return state.take(rows)
    return _of_parts(state, [take_rows(part, rows) for part in _parts(state)])


def join_rows(states: Sequence[Any]) -> Any:
    """One state with the rows of all, in order. Raises TypeError as `take_rows` does."""
    if isinstance(states[0], Tensor):
        return torch.cat(list(states))
    if isinstance(states[0], RingBuffer):
        return RingBuffer.of(torch.cat([each.in_order() for each in states]))
    parts = zip(*(_parts(state) for state in states), strict=True)
    return _of_parts(states[0], [join_rows(each) for each in parts])


def _parts(state: Any) -> list[Any]:
    if is_dataclass(state):
        return [getattr(state, field.name) for field in fields(state)]
    if isinstance(state, tuple):
        return list(state)
    raise TypeError(
        f"a decoding state of type {type(state).__name__} has no rows; make it a tensor, a tuple or a dataclass of them"
    )


def _of_parts(like: Any, parts: list[Any]) -> Any:
    return tuple(parts) if type(like) is tuple else type(like)(*parts)
