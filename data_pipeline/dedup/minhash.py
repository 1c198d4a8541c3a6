"""MinHash signatures straight from UTF-8 bytes, value for value those of datasketch 2 in its default scheme.

datasketch.MinHash(num_perm, seed, hashfunc=ShingleHash(unit)) over `shingles_of(folded text)` is the definition:
scheme "affine32" (datasketch/minhash.py, 2.0.0): value k is the minimum over all shingles of
a[k] * fmix32(hash) + b[k] modulo 2**32, where fmix32 is the finalizer of MurmurHash3; with no shingle, 2**32 - 1."""

import numba
import numpy as np

from gristmill.data_pipeline.dedup.folding import fold_texts
from gristmill.data_pipeline.dedup.shingles import Unit, character_hashes, shingle_hashes, word_hashes

SCHEME = "affine32"
EMPTY = np.uint32(0xFFFFFFFF)


def permutations(hashes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors (odd) and summands of the permutations, uint32[hashes] each, as datasketch draws them."""
    generator = np.random.RandomState(seed)
    factors = generator.randint(0, 1 << 31, hashes, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return factors, generator.randint(0, 1 << 32, hashes, dtype=np.uint32)


def sign(folded: np.ndarray, ends: np.ndarray, ngram: int, unit: Unit, hashes: int, seed: int):
    """(signatures uint32[texts, hashes], shingles int64[texts]) of folded texts, as `fold_texts` gives them.

    shingles counts them with repetition; 0 for a text without a word, whose signature means nothing."""
    factors, summands = permutations(hashes, seed)
    signatures = np.full((len(ends) - 1, hashes), EMPTY, np.uint32)
    shingles = np.zeros(len(ends) - 1, np.int64)
    room = _room(ends)
    units, keys = np.empty(room, np.uint64), np.empty(room, np.uint64)
    _sign_all(folded, ends, ngram, unit == "word", factors, summands, units, keys, signatures, shingles)
    return signatures, shingles


def signatures_of(data: np.ndarray, offsets: np.ndarray, ngram: int, unit: Unit, hashes: int, seed: int):
    """As `sign`, from the raw UTF-8 of the texts."""
    folded, ends = fold_texts(data, offsets, unit)
    return sign(folded, ends, ngram, unit, hashes, seed)


def _room(ends: np.ndarray) -> int:
    """Units in the longest text at most, with padding for whole vectors."""
    return int(np.diff(ends).max(initial=0)) + 64


@numba.njit(cache=True, nogil=True)
def _sign_all(folded, ends, ngram, words, factors, summands, units, keys, signatures, shingles) -> None:
    mixed = np.empty(len(keys), np.uint32)
    for text in range(len(ends) - 1):
        if words:
            count = word_hashes(folded, ends[text], ends[text + 1], units)
        else:
            count = character_hashes(folded, ends[text], ends[text + 1], units)
        count = shingle_hashes(units, count, ngram, keys)
        shingles[text] = count
        for i in range(count):
            mixed[i] = _fmix32(np.uint32(keys[i] >> np.uint64(32)))
        _minima(mixed, count, factors, summands, signatures[text])


@numba.njit(cache=True, nogil=True, inline="always")
def _fmix32(value):
    # numba widens uint32 * uint32 to uint64: cast after every step, or the values differ in silence.
    value = np.uint32(value ^ (value >> np.uint32(16)))
    value = np.uint32(value * np.uint32(0x85EBCA6B))
    value = np.uint32(value ^ (value >> np.uint32(13)))
    value = np.uint32(value * np.uint32(0xC2B2AE35))
    return np.uint32(value ^ (value >> np.uint32(16)))


@numba.njit(cache=True, nogil=True)
def _minima(mixed, count, factors, summands, signature) -> None:
    for k in range(len(signature)):
        factor, summand = factors[k], summands[k]
        lowest = EMPTY
        for i in range(count):
            lowest = min(lowest, np.uint32(np.uint32(factor * mixed[i]) + summand))
        signature[k] = lowest
