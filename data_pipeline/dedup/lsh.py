"""Locality-sensitive hashing: documents that agree in a whole band of their signatures share a bucket."""

import numpy as np

from gristmill.data_pipeline.dedup.kernels import MULTIPLY_GROUP, MULTIPLY_UNIT, ONE, U6, U29, U32, U63
from gristmill.foundation.cached_njit import cached_njit

LONG_RUN = 1000  # keys of a run from which on insertion would take longer than NumPy's sort
KEY_BITS = 8  # bits of the bit map of `repeated_keys` for each key


def candidate_probability(similarity: float, bands: int, rows: int) -> float:
    """The probability that two documents share a bucket: 1 - (1 - s**rows)**bands.

    s = 0.8 with 16 bands of 8 rows: 0.947 (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, 3.4.2)."""
    return 1.0 - (1.0 - similarity**rows) ** bands


@cached_njit(nogil=True)
def band_keys(signatures, bands, rows, salt):
    """uint64[bands, documents] of signatures uint32[documents, >= bands * rows]: a 64-bit hash of each band.

    Two bands with equal keys but other values are possible (2**-64 a pair) and harmless: candidates are verified.
    salt parts pools that must never meet."""
    keys = np.empty((bands, len(signatures)), np.uint64)
    for document in range(len(signatures)):
        for band in range(bands):
            value = salt
            for row in range(band * rows, band * rows + rows):
                value = (value ^ np.uint64(signatures[document, row])) * MULTIPLY_GROUP
                value ^= value >> U32
            value *= MULTIPLY_UNIT
            keys[band, document] = value ^ (value >> U29)
    return keys


def key_order(keys: np.ndarray) -> np.ndarray:
    """int64[]: places of the keys in ascending order, of equals the first first. Keys are hashes.

    By their upper bits into runs of about eight, then by insertion: 20 ns a key, a quarter of NumPy's stable sort."""
    order, held = np.empty(len(keys), np.int64), np.empty(len(keys), np.uint64)
    if _sort_runs(np.ascontiguousarray(keys), max((len(keys) // 8).bit_length(), 1), order, held):
        return order
    return np.argsort(keys, kind="stable")


@cached_njit(nogil=True)
def _sort_runs(keys, bits, order, held):
    """Whether all runs are short enough to be sorted by insertion."""
    shift = np.uint64(64 - bits)
    ends = np.zeros((1 << bits) + 1, np.int64)
    for key in keys:
        ends[np.int64(key >> shift) + 1] += 1
    for run in range(1, len(ends)):
        if ends[run] > LONG_RUN:
            return False
        ends[run] += ends[run - 1]
    filled = ends[:-1].copy()
    for place in range(len(keys)):
        mine = np.int64(keys[place] >> shift)
        order[filled[mine]], held[filled[mine]] = place, keys[place]
        filled[mine] += 1
    for run in range(len(ends) - 1):
        _insertion_sort(held, order, ends[run], ends[run + 1])
    return True


@cached_njit(nogil=True)
def _insertion_sort(keys, order, start, stop):
    for i in range(start + 1, stop):
        key, place = keys[i], order[i]
        j = i
        while j > start and keys[j - 1] > key:
            keys[j], order[j] = keys[j - 1], order[j - 1]
            j -= 1
        keys[j], order[j] = key, place


def repeated_keys(keys: np.ndarray) -> np.ndarray:
    """int64[]: ascending positions of all keys that occur more than once, and of one other key in eight at most.

    Keys are hashes. Memory: at most 4 bytes a key, and 8 for each that is found."""
    bits = 1 << max((KEY_BITS * len(keys) - 1).bit_length(), 6)
    once, twice = np.zeros(bits // 64, np.uint64), np.zeros(bits // 64, np.uint64)
    _count_bits(keys, once, twice)
    positions = np.empty(_count_repeated(keys, twice), np.int64)
    _fill_positions(keys, twice, positions)
    return positions


@cached_njit(nogil=True)
def _count_bits(keys, once, twice):
    mask = np.uint64(64 * len(once) - 1)
    for key in keys:
        bit = key & mask
        flag = ONE << (bit & U63)
        twice[bit >> U6] |= once[bit >> U6] & flag
        once[bit >> U6] |= flag


@cached_njit(nogil=True)
def _count_repeated(keys, twice):
    mask = np.uint64(64 * len(twice) - 1)
    count = np.int64(0)
    for key in keys:
        bit = key & mask
        count += np.int64((twice[bit >> U6] >> (bit & U63)) & ONE)
    return count


@cached_njit(nogil=True)
def _fill_positions(keys, twice, positions):
    mask = np.uint64(64 * len(twice) - 1)
    count = 0
    for at in range(len(keys)):
        bit = keys[at] & mask
        if (twice[bit >> U6] >> (bit & U63)) & ONE:
            positions[count] = at
            count += 1


def buckets(keys: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bucket int64, member int64) of every member that shares its key with another, ordered by bucket and member.

    Keys [7, 5, 7, 9], members [0, 1, 2, 3] -> ([0, 0], [0, 2]). Memory: 12 bytes a key."""
    chosen = repeated_keys(keys)
    keys, members = keys[chosen], members[chosen]
    order = np.lexsort((members, keys))
    ordered = keys[order]
    same_as_next = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(keys), bool)
    shared[1:] |= same_as_next
    shared[:-1] |= same_as_next
    positions = np.flatnonzero(shared)
    found = ordered[positions]
    starts = np.ones(len(found), bool)
    starts[1:] = found[1:] != found[:-1]
    return np.cumsum(starts) - 1, members[order[positions]]


@cached_njit(nogil=True)
def union_pairs(parents, lefts, rights):
    """Unites each pair in the forest `parents` int64[nodes]; the root of a tree is its lowest node."""
    for i in range(len(lefts)):
        left, right = find_root(parents, lefts[i]), find_root(parents, rights[i])
        if left < right:
            parents[right] = left
        elif right < left:
            parents[left] = right


@cached_njit(nogil=True)
def find_root(parents, node):
    """The root of a node's tree; halves the path to it."""
    while parents[node] != node:
        parents[node] = parents[parents[node]]
        node = parents[node]
    return node


@cached_njit(nogil=True)
def find_roots(parents):
    """The root of every node."""
    found = np.empty_like(parents)
    for node in range(len(parents)):
        found[node] = find_root(parents, node)
    return found
