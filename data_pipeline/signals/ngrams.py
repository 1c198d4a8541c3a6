"""Gopher's n-gram repetition, 2 to 10 words, by a cascade.

An n-gram can stand twice only if the (n-1)-grams at its first and second word both do, so each n looks at the
survivors of n-1 alone. The first place of an n-gram is its name; the pair of names of its two (n-1)-grams is its key,
so no n-gram is ever hashed from its words."""

import numpy as np

from gristmill.data_pipeline.signals.tables import first_place, table_bits
from gristmill.foundation.cached_njit import cached_njit

TOP_SIZES = (2, 3, 4)
DUP_SIZES = (5, 6, 7, 8, 9, 10)
_HALF = np.uint64(32)


@cached_njit(nogil=True)
def ngram_chars(keys, lengths, num_words, names, counts, survivors, marks, entries, stamp, chars):
    """Fills chars: int64[9], the characters of the top 2- to 4-grams and the duplicate 5- to 10-grams.

    keys: uint64[words], the words' hashes, overwritten. names, counts, survivors, marks: int32[words]; all are work
    space, marks and entries kept between calls. Uses stamps stamp + 1 to stamp + 10."""
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
    for size in range(2, 11):
        _name(survivors, alive, keys, names, counts, entries, stamp + size)
        if size <= 4:
            chars[size - 2] = _top(survivors, alive, names, counts, lengths, num_words, size)
        else:
            chars[size - 2] = _duplicate(survivors, alive, names, counts, lengths, marks, stamp + size, size)
        alive = _survive(survivors, alive, names, counts)


@cached_njit(nogil=True, inline="always")
def _name(survivors, alive, keys, names, counts, entries, stamp):
    """names and counts of the n-grams at the survivors, from those of the (n-1)-grams at each and the next word.

    In place: the places are walked upwards, and a place's own old name and its neighbour's are all that is read."""
    bits = table_bits(alive)
    for k in range(alive):
        i = np.int64(survivors[k])
        keys[i] = np.uint64(names[i]) << _HALF | np.uint64(names[i + 1])
        counts[i] = 1
        first = first_place(entries, bits, stamp, keys, i)
        names[i] = first
        counts[first] += first != i


@cached_njit(nogil=True, inline="always")
def _survive(survivors, alive, names, counts):
    """Keeps the places where this n-gram stands twice and the next one does; returns how many there are."""
    left, last = 0, np.int64(-2)  # last: the latest place whose n-gram stands twice
    for k in range(alive):
        i = np.int64(survivors[k])
        if counts[names[i]] > 1:
            if last == i - 1:
                survivors[left] = last
                left += 1
            last = i
    return left


@cached_njit(nogil=True, inline="always")
def _top(survivors, alive, names, counts, lengths, num_words, size):
    if num_words < size:
        return 0
    best, at = 1, np.int64(0)  # where nothing stands twice, the first n-gram is the commonest
    for k in range(alive):
        i = np.int64(survivors[k])
        if counts[i] > best and names[i] == i:
            best, at = counts[i], i
    chars = size - 1
    for i in range(at, at + size):
        chars += lengths[i]
    return chars * best


@cached_njit(nogil=True, inline="always")
def _duplicate(survivors, alive, names, counts, lengths, marks, stamp, size):
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
