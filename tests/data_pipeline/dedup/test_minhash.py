"""Signatures against datasketch, value for value."""

import numpy as np
import pytest
from datasketch import MinHash
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.data_pipeline.dedup.kernels import LARGEST_HASH
from gristmill.data_pipeline.dedup.minhash import signatures_of
from gristmill.data_pipeline.dedup.shingles import ShingleHash, Unit, shingles_of

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
