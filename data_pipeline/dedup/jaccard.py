"""Exact Jaccard similarity of shingle sets, and the greedy choice of what is kept."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gristmill.data_pipeline.dedup.folding import fold_texts
from gristmill.data_pipeline.dedup.kernels import text_shingles
from gristmill.data_pipeline.dedup.minhash import Unit
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit


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


@dataclass(frozen=True)
class Decisions:
    """Decisions on the documents of a batch, which are in keep-order.

    bucket_of: int64[documents, bands], -1 for no bucket. protected: they are kept unasked. newest, older: of each
    bucket the last kept document, of each kept document the one before it in its bucket. keepers: the most similar kept
    document, the earliest of equals, -1 while there is none; boths: the shingles the two share; best: similarity."""

    bucket_of: np.ndarray
    protected: np.ndarray
    newest: np.ndarray
    older: np.ndarray
    compared_with: np.ndarray
    keepers: np.ndarray
    boths: np.ndarray
    best: np.ndarray

    @classmethod
    def of(cls, buckets: tuple[int, np.ndarray], protected: np.ndarray) -> "Decisions":
        """buckets: how many there are, bucket_of."""
        num_buckets, bucket_of = buckets
        size = len(bucket_of)
        return cls(
            bucket_of,
            np.ascontiguousarray(protected),
            newest=np.full(num_buckets, -1, np.int64),
            older=np.full(bucket_of.shape, -1, np.int64),
            compared_with=np.full(size, -1, np.int64),
            keepers=np.full(size, -1, np.int64),
            boths=np.zeros(size, np.int64),
            best=np.full(size, -1.0),
        )


def compare_blocks(
    decided: Decisions,
    block: tuple[int, int],
    block_sets: tuple[np.ndarray, np.ndarray],
    before: tuple[int, int],
    earlier_sets: tuple[np.ndarray, np.ndarray],
    threshold: float,
) -> None:
    """Compares the documents of a block with the kept ones of an earlier block, or of its own, which decides it.

    mine, theirs: the blocks' sets, one after the other, and int64[documents of the batch, 2]: first and last + 1."""
    _compare(*vars(decided).values(), *block, *block_sets, *before, *earlier_sets, threshold)


@cached_njit(nogil=True)
def _compare(
    bucket_of, protected, newest, older, compared_with, keepers, boths, best,
    start, stop, sets, places, first, last, other_sets, other_places, threshold,
):  # fmt: skip
    bands = bucket_of.shape[1]
    for document in range(start, stop):
        if not protected[document]:
            shingles = sets[places[document, 0] : places[document, 1]]
            for band in range(bands):
                bucket = bucket_of[document, band]
                other = newest[bucket] if bucket >= 0 else -1
                while other >= first:
                    if other < last and compared_with[other] != document:
                        compared_with[other] = document
                        other_shingles = other_sets[other_places[other, 0] : other_places[other, 1]]
                        total = len(shingles) + len(other_shingles)
                        # both / (total - both) >= threshold; one less than needed, so that rounding never decides.
                        both = overlap(shingles, other_shingles, np.int64(threshold / (1.0 + threshold) * total) - 1)
                        similarity = both / (total - both) if both > 0 else 0.0
                        better = similarity > best[document] or (
                            similarity == best[document] and other < keepers[document]
                        )
                        if similarity >= threshold and better:
                            best[document], keepers[document], boths[document] = similarity, other, both
                    other = older[other, band]
        if keepers[document] < 0 and first == start:
            for band in range(bands):
                bucket = bucket_of[document, band]
                if bucket >= 0:
                    older[document, band] = newest[bucket]
                    newest[bucket] = document
