"""Signatures against datasketch, value for value."""

import numpy as np
import pytest
from datasketch import MinHash
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.data_pipeline.dedup.kernels import LARGEST_HASH
from gristmill.data_pipeline.dedup.minhash import (
    ShingleHash,
    Unit,
    band_keys,
    buckets,
    candidate_probability,
    find_roots,
    key_order,
    repeated_keys,
    shingles_of,
    signatures_of,
    union_pairs,
)

NAMES = ["a", "be", "sea", "deed", "sixteen_letters__", "seventeen_letters", "ñandú", "中文", "ไทย", "x1"]
WORDS = st.lists(st.sampled_from(NAMES))
TEXTS = WORDS.map(" ".join) | st.text(st.characters(exclude_categories=["Cs"]))


def buffer(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    raw = [text.encode() for text in texts]
    return np.frombuffer(b"".join(raw) or b" ", np.uint8), np.cumsum([0, *map(len, raw)]).astype(np.int64)


def by_datasketch(text: str, ngram: int, unit: Unit, hashes: int, seed: int) -> np.ndarray:
    minhash = MinHash(hashes, seed, hashfunc=ShingleHash(unit), scheme="affine32")
    minhash.update_batch(shingles_of(fold_text(text, unit), ngram, unit))
    return minhash.hashvalues


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=4), st.integers(1, 7), st.sampled_from(["word", "character"]), st.integers(0, 9))
def test_signatures_are_those_of_datasketch(texts: list[str], ngram: int, unit: Unit, seed: int):
    signatures, shingles = signatures_of(*buffer(texts), ngram, unit, 16, seed)
    for text, signature, count in zip(texts, signatures, shingles, strict=True):
        assert signature.tolist() == by_datasketch(text, ngram, unit, 16, seed).tolist()
        assert count == len(shingles_of(fold_text(text, unit), ngram, unit))


def test_the_default_scheme_of_datasketch_is_meant():
    text = "the quick brown fox jumps over the lazy dog"
    minhash = MinHash(128, hashfunc=ShingleHash())
    minhash.update_batch(shingles_of(text, 5))
    assert minhash.scheme == "affine32"
    assert signatures_of(*buffer([text]), 5, "word", 128, 1)[0][0].tolist() == minhash.hashvalues.tolist()


def test_short_and_empty_texts():
    signatures, shingles = signatures_of(*buffer(["one two", "", "...", "one two"]), 5, "word", 8, 1)
    assert shingles.tolist() == [1, 0, 0, 1]
    assert (signatures[1] == LARGEST_HASH).all()
    assert (signatures[0] == signatures[3]).all()


@pytest.mark.parametrize(
    ("folded", "ngram", "unit", "expected"),
    [
        ("a b c", 2, "word", [b"a b", b"b c"]),
        ("a", 2, "word", [b"a"]),
        ("", 2, "word", []),
        ("ab c", 3, "character", [b"ab ", b"b c"]),
    ],
)
def test_shingles_by_hand(folded: str, ngram: int, unit: Unit, expected: list[bytes]):
    assert shingles_of(folded, ngram, unit) == expected


# Banding: the published curve, buckets by hand, and candidates in planted pairs of known similarity.


@pytest.mark.parametrize(
    ("similarity", "bands", "rows", "probability"),
    # Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, figure 3.8 (b = 20, r = 5).
    [(0.2, 20, 5, 0.006), (0.3, 20, 5, 0.047), (0.4, 20, 5, 0.186), (0.5, 20, 5, 0.470), (0.8, 20, 5, 0.9996)],
)
def test_the_curve_of_the_textbook(similarity: float, bands: int, rows: int, probability: float):
    assert candidate_probability(similarity, bands, rows) == pytest.approx(probability, abs=5e-4)


def test_buckets_by_hand():
    bucket, member = buckets(np.array([7, 5, 7, 9, 5], np.uint64), np.array([10, 4, 2, 3, 1]))
    assert (bucket.tolist(), member.tolist()) == ([0, 0, 1, 1], [1, 4, 2, 10])
    assert [len(a) for a in buckets(np.empty(0, np.uint64), np.empty(0, np.int64))] == [0, 0]


def test_every_key_that_repeats_is_found_and_few_others():
    keys = np.random.default_rng(3).integers(1 << 63, size=20_000, dtype=np.uint64)
    keys[::10] = keys[1::10]
    found = repeated_keys(keys)
    values, counts = np.unique(keys, return_counts=True)
    repeated = np.flatnonzero(np.isin(keys, values[counts > 1]))
    assert (np.diff(found) > 0).all() and np.isin(repeated, found).all()
    assert len(found) - len(repeated) < len(keys) / 8


@pytest.mark.parametrize("size", [0, 1, 15, 16, 5000])
@pytest.mark.parametrize("repeats", [1, 40])
def test_the_order_of_keys_is_that_of_a_stable_sort(size: int, repeats: int):
    keys = np.random.default_rng(size).integers(1 << 64, size=size, dtype=np.uint64)
    keys = keys[np.random.default_rng(repeats).integers(max(size // repeats, 1), size=size)] if size else keys
    assert (key_order(keys) == np.argsort(keys, kind="stable")).all()


def test_joined_groups_are_named_by_their_lowest():
    parents = np.arange(6)
    union_pairs(parents, np.array([1, 4]), np.array([4, 5]))
    union_pairs(parents, np.array([2]), np.array([3]))
    assert find_roots(parents).tolist() == [0, 1, 2, 2, 1, 1]


@pytest.mark.parametrize(("bands", "rows"), [(16, 8), (32, 4), (20, 6)])
def test_candidates_follow_the_curve(bands: int, rows: int):
    # A signature value of two sets agrees with probability s, independently: the definition of MinHash.
    generator = np.random.default_rng(1)
    pairs = 20_000
    for similarity in (0.3, 0.5, 0.7, 0.8, 0.9):
        left = generator.integers(1 << 32, size=(pairs, bands * rows), dtype=np.uint32)
        other = generator.integers(1 << 32, size=left.shape, dtype=np.uint32)
        right = np.where(generator.random(left.shape) < similarity, left, other)
        keys = [band_keys(side, bands, rows, np.uint64(0)) for side in (left, right)]
        met = (keys[0] == keys[1]).any(axis=0).mean()
        expected = candidate_probability(similarity, bands, rows)
        assert abs(met - expected) < 5 * np.sqrt(expected * (1 - expected) / pairs) + 1e-9
