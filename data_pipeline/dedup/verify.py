"""Exact Jaccard similarity of shingle sets, and the greedy choice of what is kept."""

from itertools import pairwise

import numpy as np

from gristmill.data_pipeline.dedup.folding import fold_texts
from gristmill.data_pipeline.dedup.kernels import text_shingles
from gristmill.data_pipeline.dedup.shingles import Unit
from gristmill.foundation.cached_njit import cached_njit


def shingle_sets(data: np.ndarray, offsets: np.ndarray, ngram: int, unit: Unit) -> list[np.ndarray]:
    """The set of each text's shingles as ascending 64-bit hashes. The texts are raw UTF-8, as `utf8_of` gives them."""
    values, bounds = joined_shingle_sets(data, offsets, ngram, unit)
    return [values[start:stop] for start, stop in pairwise(bounds.tolist())]


def joined_shingle_sets(data: np.ndarray, offsets: np.ndarray, ngram: int, unit: Unit) -> tuple[np.ndarray, np.ndarray]:
    """The sets one after the other, uint64[], and int64[texts + 1] bounds of each."""
    folded, ends = fold_texts(data, offsets, unit)
    longest = int(np.diff(ends).max(initial=0))
    most = int(ends[-1] - ends[0]) // (2 if unit == "word" else 1)  # a word and the space behind it are two bytes
    units, keys = np.empty(longest + 64, np.uint64), np.empty(most + longest + 64, np.uint64)
    bounds = np.zeros(len(ends), np.int64)
    _all_shingles(folded, ends, ngram, unit == "word", units, keys, bounds)
    for start, stop in pairwise(bounds.tolist()):
        keys[start:stop].sort()
    _drop_repeats(keys, bounds)
    return keys[: bounds[-1]].copy(), bounds


@cached_njit(nogil=True)
def _all_shingles(folded, ends, ngram, words, units, keys, bounds):
    for text in range(len(ends) - 1):
        start = bounds[text]
        bounds[text + 1] = start + text_shingles(folded, ends[text], ends[text + 1], ngram, words, units, keys[start:])


@cached_njit(nogil=True)
def _drop_repeats(keys, bounds):
    """Moves the distinct values of each ascending set to the front of `keys`, and the bounds with them."""
    start = at = 0
    for text in range(len(bounds) - 1):
        stop = bounds[text + 1]
        for place in range(start, stop):
            if place == start or keys[place] != keys[place - 1]:
                value = keys[place]
                keys[at] = value
                at += 1
        start = stop
        bounds[text + 1] = at


@cached_njit(nogil=True)
def overlap(left, right, needed):
    """How many values two ascending sets share, or -1 once fewer than `needed` are certain."""
    spare_left, spare_right = len(left) - needed, len(right) - needed
    i = j = both = 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            both += 1
            i += 1
            j += 1
        elif left[i] < right[j]:
            i += 1
            if i - both > spare_left:
                return -1
        else:
            j += 1
            if j - both > spare_right:
                return -1
    return both


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    """Shared values over all values of two ascending sets; 0 if both are empty. {1, 2, 3}, {2, 3, 4} -> 0.5."""
    both = overlap(left, right, 0)
    either = len(left) + len(right) - both
    return both / either if either else 0.0


@cached_njit(nogil=True)
def keep_first(bucket_of, num_buckets, protected, sets, bounds, threshold, keepers, boths):
    """Decides documents in keep-order: one is removed if it is similar to a kept one in any of its buckets.

    bucket_of: int64[documents, bands], -1 for no bucket. sets[bounds[i]:bounds[i + 1]] is document i's. protected
    documents are kept unasked. Fills keepers (the most similar kept document, the earliest of equals; -1: kept)
    and boths (the shingles the two share)."""
    documents, bands = bucket_of.shape
    newest = np.full(num_buckets, -1, np.int64)
    older = np.full((documents, bands), -1, np.int64)
    compared_with = np.full(documents, -1, np.int64)
    for document in range(documents):
        keepers[document] = -1
        if not protected[document]:
            mine = sets[bounds[document] : bounds[document + 1]]
            best = -1.0
            for band in range(bands):
                bucket = bucket_of[document, band]
                other = newest[bucket] if bucket >= 0 else -1
                while other >= 0:
                    if compared_with[other] != document:
                        compared_with[other] = document
                        theirs = sets[bounds[other] : bounds[other + 1]]
                        total = len(mine) + len(theirs)
                        # both / (total - both) >= threshold; one less than needed, so that rounding never decides.
                        both = overlap(mine, theirs, np.int64(threshold / (1.0 + threshold) * total) - 1)
                        similarity = both / (total - both) if both > 0 else 0.0
                        better = similarity > best or (similarity == best and other < keepers[document])
                        if similarity >= threshold and better:
                            best, keepers[document], boths[document] = similarity, other, both
                    other = older[other, band]
        if keepers[document] < 0:
            for band in range(bands):
                bucket = bucket_of[document, band]
                if bucket >= 0:
                    older[document, band] = newest[bucket]
                    newest[bucket] = document
