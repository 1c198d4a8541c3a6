"""MinHash signatures straight from UTF-8 bytes, value for value those of datasketch 2 in its default scheme.

datasketch.MinHash(num_perm, seed, hashfunc=ShingleHash(unit)) over `shingles_of(folded text)` is the definition:
scheme "affine32" (datasketch/minhash.py, 2.0.0): value k is the minimum over all shingles of
a[k] * fmix32(hash) + b[k] modulo 2**32, where fmix32 is the finalizer of MurmurHash3; with no shingle, 2**32 - 1."""

import numpy as np

from gristmill.data_pipeline.dedup.folding import fold_texts
from gristmill.data_pipeline.dedup.kernels import LARGEST_HASH, sign_all
from gristmill.data_pipeline.dedup.shingles import Unit

SCHEME = "affine32"


def permutations(hashes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors (odd) and summands of the permutations, uint32[hashes] each, as datasketch draws them."""
    generator = np.random.RandomState(seed)
    factors = generator.randint(0, 1 << 31, hashes, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return factors, generator.randint(0, 1 << 32, hashes, dtype=np.uint32)


def sign(folded: np.ndarray, ends: np.ndarray, ngram: int, unit: Unit, hashes: int, seed: int):
    """(signatures uint32[texts, hashes], shingles int64[texts]) of folded texts, as `fold_texts` gives them.

    shingles counts them with repetition; 0 for a text without a word, whose signature means nothing."""
    factors, summands = permutations(hashes, seed)
    signatures = np.full((len(ends) - 1, hashes), LARGEST_HASH, np.uint32)
    shingles = np.zeros(len(ends) - 1, np.int64)
    capacity = _capacity(ends)
    units, keys = np.empty(capacity, np.uint64), np.empty(capacity, np.uint64)
    sign_all(folded, ends, ngram, unit == "word", factors, summands, units, keys, signatures, shingles)
    return signatures, shingles


def signatures_of(data: np.ndarray, offsets: np.ndarray, ngram: int, unit: Unit, hashes: int, seed: int):
    """As `sign`, from the raw UTF-8 of the texts."""
    folded, ends = fold_texts(data, offsets, unit)
    return sign(folded, ends, ngram, unit, hashes, seed)


def _capacity(ends: np.ndarray) -> int:
    """Units in the longest text at most, with padding for whole vectors."""
    return int(np.diff(ends).max(initial=0)) + 64
