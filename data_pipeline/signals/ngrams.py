"""Gopher's n-gram repetition for 2 to 10 words.

An n-gram can occur twice only if the (n-1)-grams at its first and second word both do, so each n reads only the
places that are left of n-1. The first place of an n-gram is its name, and the pair of names of its two (n-1)-grams is
its key, so no n-gram is hashed from its words."""

from typing import Any, NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.bits import ONE, TOP, ZERO
from gristmill.data_pipeline.signals.intrinsics import folded_product
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

_HALF = np.uint64(32)


class NgramWork(NamedTuple):
    """Pointers. keys: uint64[words], the hashes of the words, overwritten; lengths: int32[words]. The others are work
    space: names, counts, survivors, marks int32[words]; entries: see tables.first_place. marks and entries are kept
    between calls. filters: uint64[words / 2 + 8]."""

    keys: Any
    lengths: Any
    names: Any
    counts: Any
    survivors: Any
    marks: Any
    entries: Any
    filters: Any


@cached_njit(nogil=True)
def ngram_chars(work, num_words, stamp, chars):
    """Fills chars: int64[9], the characters of the top 2- to 4-grams and the duplicate 5- to 10-grams. Uses stamps
    stamp + 1 to stamp + 10."""
    keys, _, names, counts, survivors, _, entries, _ = work
    bits = table_bits(num_words)
    for i in range(num_words):
        counts[i] = 1
        first = first_place(entries, bits, stamp + 1, keys, i)
        names[i] = first
        counts[first] += first != i
    alive, before = 0, False
    for i in range(num_words):
        repeats = counts[names[i]] > 1
        survivors[alive] = i - 1
        alive += repeats and before
        before = repeats
    alive = _filter_pairs(work, alive)
    for size in range(2, 11):
        _name(work, alive, stamp + size)
        if size <= 4:
            chars[size - 2] = _top(work, alive, num_words, size)
        else:
            chars[size - 2] = _duplicate(work, alive, stamp + size, size)
        alive = _survive(work, alive)


@cached_njit(nogil=True, forceinline=True)
def _filter_pairs(work, alive):
    """Keep the places whose pair of words may occur twice, and one in eight of the others at most; returns how many.

    Most pairs occur once, and a bit map is much smaller than the table in which the others are counted."""
    names, survivors, filters = work.names, work.survivors, work.filters
    bits = max(table_bits(4 * alive), 6)  # eight places a pair or more, with two bits each
    for word in range(1 << (bits - 5)):
        filters[word] = ZERO
    for k in range(alive):
        word, bit = _pair_bit(names, np.int64(survivors[k]), bits)
        filters[word + 1] |= filters[word] & (ONE << bit)  # seen twice
        filters[word] |= ONE << bit
    left = 0
    for k in range(alive):
        i = np.int64(survivors[k])
        word, bit = _pair_bit(names, i, bits)
        survivors[left] = i
        left += np.int64(filters[word + 1] >> bit & ONE)
    return left


@cached_njit(nogil=True, forceinline=True)
def _pair_bit(names, i, bits):
    """(word of the bit map, bit) of the pair of words at place i."""
    spread = folded_product(np.uint64(names[i]) << _HALF | np.uint64(names[i + 1]), SPREAD) >> np.uint64(64 - bits)
    return np.int64(spread >> np.uint64(6)) << 1, spread & TOP


@cached_njit(nogil=True, forceinline=True)
def _name(work, alive, stamp):
    """Replace names and counts of the (n-1)-grams by those of the n-grams at the survivors, in ascending order: only a
    place's own old name and that of the next place are read."""
    keys, _, names, counts, survivors, _, entries, _ = work
    bits = table_bits(alive)
    for k in range(alive):
        i = np.int64(survivors[k])
        keys[i] = np.uint64(names[i]) << _HALF | np.uint64(names[i + 1])
        counts[i] = 1
        first = first_place(entries, bits, stamp, keys, i)
        names[i] = first
        counts[first] += first != i


@cached_njit(nogil=True, forceinline=True)
def _survive(work, alive):
    """Keep the places where this n-gram and the next one occur twice; returns how many there are."""
    names, counts, survivors = work.names, work.counts, work.survivors
    left, last = 0, np.int64(-2)  # last: the latest place whose n-gram occurs twice
    for k in range(alive):
        i = np.int64(survivors[k])
        if counts[names[i]] > 1:
            if last == i - 1:
                survivors[left] = last
                left += 1
            last = i
    return left


@cached_njit(nogil=True, forceinline=True)
def _top(work, alive, num_words, size):
    _, lengths, names, counts, survivors, _, _, _ = work
    if num_words < size:
        return 0
    best, at = 1, np.int64(0)  # if nothing occurs twice, the first n-gram is the most frequent
    for k in range(alive):
        i = np.int64(survivors[k])
        if counts[i] > best and names[i] == i:
            best, at = counts[i], i
    chars = size - 1
    for i in range(at, at + size):
        chars += lengths[i]
    return chars * best


@cached_njit(nogil=True, forceinline=True)
def _duplicate(work, alive, stamp, size):
    _, lengths, names, counts, survivors, marks, _, _ = work
    chars, behind = 0, np.int64(0)
    for k in range(alive):
        i = np.int64(survivors[k])
        if i < behind or counts[names[i]] < 2:
            continue
        if marks[names[i]] == stamp:
            for j in range(i, i + size):
                chars += lengths[j]
            behind = i + size
        else:
            marks[names[i]] = stamp
    return chars


# Hash table that finds the first of equal keys; a new stamp empties it without writing to it.

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
