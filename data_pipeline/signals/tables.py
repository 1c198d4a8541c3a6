"""A hash table of places, emptied by a stamp: which of many equal things stood first, and how many there are."""

import numba
import numpy as np

SPREAD = np.uint64(0x9E3779B97F4A7C15)


@numba.njit(cache=True, nogil=True, inline="always")
def table_bits(items):
    """Bits of a table in which `items` fill at most half."""
    bits = 4
    while (1 << bits) < 2 * items:
        bits += 1
    return bits


@numba.njit(cache=True, nogil=True, inline="always")
def first_place(keys, places, bits, stamp, key, place):
    """The place that `key` was first given under this stamp; `place` itself if it was not given before.

    keys uint64[2**bits or more], places int64 the same: stamp << 32 | place. Another stamp is an empty table."""
    slot = np.int64((key * SPREAD) >> np.uint64(64 - bits))
    mask = (1 << bits) - 1
    while True:
        entry = places[slot]
        if entry >> 32 != stamp:
            keys[slot] = key
            places[slot] = stamp << 32 | place
            return place
        if keys[slot] == key:
            return entry & 0xFFFFFFFF
        slot = (slot + 1) & mask
