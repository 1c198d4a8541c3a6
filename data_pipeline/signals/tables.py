"""Hash table that finds the first of equal keys; a new stamp empties it without writing to it."""

import numpy as np

from gristmill.data_pipeline.signals.intrinsics import folded_product
from gristmill.foundation.cached_njit import cached_njit

# Folded, because a plain product would send pairs of neighbours to neighbouring slots: the low half of this factor is
# 0.497 of 2**32, and sequences of words have keys that are such pairs.
SPREAD = np.uint64(0x9E3779B97F4A7C15)
LAST_STAMP = 0xFFFF  # a table must be filled with zeros before stamps begin anew
_TAG = np.uint64(0xFFFF)
_TAG_SHIFT, _STAMP_SHIFT, _LABEL_SHIFT = np.uint64(16), np.uint64(48), np.uint64(32)
_PLACE = np.uint64(0xFFFFFFFF)


@cached_njit(nogil=True, forceinline=True)
def table_bits(items):
    """Bits of the size of a table that `items` entries fill to at most half."""
    bits = 4
    while (1 << bits) < 2 * items:
        bits += 1
    return bits


@cached_njit(nogil=True, forceinline=True)
def first_place(entries, bits, stamp, keys, place):
    """The first place with the key keys[place] under this stamp; `place` itself if it is the first.

    entries: uint64[2**bits or more], each stamp << 48 | tag << 32 | place. The tag is 16 bits of the key: the key
    itself is only read where they are equal. Another stamp is an empty table. Stamps from 1 to LAST_STAMP, places below
    2**32."""
    key = keys[place]
    spread = folded_product(key, SPREAD)
    slot = np.int64(spread >> np.uint64(64 - bits))
    label = np.uint64(stamp) << _TAG_SHIFT | (spread >> _TAG_SHIFT) & _TAG
    entry = entries[slot]
    is_held = entry >> _LABEL_SHIFT == label
    first = np.int64(entry & _PLACE) if is_held else place
    if keys[first] != key or (entry >> _STAMP_SHIFT == np.uint64(stamp) and not is_held):
        return _next_place(entries, (1 << bits) - 1, slot, label, (keys, place))
    # no branch on whether the key is new, which the processor could not guess: a held entry is written again
    entries[slot] = label << _LABEL_SHIFT | np.uint64(first)
    return first


@cached_njit(nogil=True)
def _next_place(entries, mask, slot, label, key_place):
    """first_place if another key has the first slot."""
    keys, place = key_place
    while True:
        slot = (slot + 1) & mask
        entry = entries[slot]
        if entry >> _LABEL_SHIFT == label:
            first = np.int64(entry & _PLACE)
            if keys[first] == keys[place]:
                return first
        elif entry >> _STAMP_SHIFT != label >> _TAG_SHIFT:
            entries[slot] = label << _LABEL_SHIFT | np.uint64(place)
            return place
