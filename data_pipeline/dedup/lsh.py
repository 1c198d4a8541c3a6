"""Locality-sensitive hashing: documents that agree in a whole band of their signatures share a bucket."""

import numpy as np

from gristmill.data_pipeline.dedup.kernels import MULTIPLY_GROUP, MULTIPLY_UNIT, U29, U32
from gristmill.foundation.cached_njit import cached_njit


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


def buckets(keys: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bucket int64, member int64) of every member that shares its key with another, ordered by bucket and member.

    Keys [7, 5, 7, 9], members [0, 1, 2, 3] -> ([0, 0], [0, 2]). Memory: 24 bytes a key."""
    order = np.argsort(keys)
    ordered = keys[order]
    same_as_next = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(keys), bool)
    shared[1:] |= same_as_next
    shared[:-1] |= same_as_next
    positions = np.flatnonzero(shared)
    found, owners = ordered[positions], members[order[positions]]
    starts = np.ones(len(found), bool)
    starts[1:] = found[1:] != found[:-1]
    bucket = np.cumsum(starts) - 1
    by_member = np.lexsort((owners, bucket))
    return bucket, owners[by_member]


@cached_njit(nogil=True)
def union_buckets(parents, bucket, member):
    """Unites all members of each bucket in the forest `parents` int64[documents]; the root is the lowest of a tree."""
    for i in range(1, len(bucket)):
        if bucket[i] == bucket[i - 1]:
            left, right = find_root(parents, member[i - 1]), find_root(parents, member[i])
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
