"""Gopher's eight English stop words, found in a table without collisions."""

import numpy as np

from gristmill.data_pipeline.signals.bits import bytes_below
from gristmill.data_pipeline.signals.intrinsics import load64
from gristmill.data_pipeline.signals.reference import STOP_WORDS
from gristmill.foundation.cached_njit import cached_njit

STOP_SHIFT = np.uint64(60)


def _stop_slots() -> tuple[np.uint64, np.ndarray, np.ndarray]:
    """(factor, slots, sizes): each word as a group of eight bytes, in slot group * factor >> 60, and its bytes."""
    groups = [int.from_bytes(word.encode(), "little") for word in STOP_WORDS]
    factor = 0x9E3779B97F4A7C15
    while len({(group * factor % 2**64) >> 60 for group in groups}) < len(groups):
        factor = (factor * 0xD1342543DE82EF95 + 1) % 2**64 | 1
    slots, sizes = np.zeros(16, np.uint64), np.zeros(16, np.int64)
    for group, word in zip(groups, STOP_WORDS, strict=True):
        slots[(group * factor % 2**64) >> 60] = group
        sizes[(group * factor % 2**64) >> 60] = len(word)
    return np.uint64(factor), slots, sizes


STOP_FACTOR, STOP_SLOTS, STOP_SIZES = _stop_slots()


@cached_njit(nogil=True, forceinline=True)
def stop_word_bit(text, first, stop):
    """The bit of the stop word text[first:stop], which is 1 << its slot; 0 for other words. There is no branch."""
    size = stop - first
    group = load64(text, first) & bytes_below(min(size, 8))
    slot = np.int64((group * STOP_FACTOR) >> STOP_SHIFT)
    return np.int64((STOP_SLOTS[slot] == group) & (STOP_SIZES[slot] == size)) << slot
