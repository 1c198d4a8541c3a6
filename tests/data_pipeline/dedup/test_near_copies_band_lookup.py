"""Lookup of band keys: the documents that share a band, in a worked example and as a comparison of all pairs finds."""

import numpy as np

from gristmill.data_pipeline.dedup.minhash import band_keys
from gristmill.data_pipeline.dedup.near_copies import BandLookup, joined_bands


def of_all(keys):
    """Places and keys of uint64[bands, N], as a lookup takes them."""
    return np.tile(np.arange(keys.shape[1]), len(keys)), joined_bands(keys)


def lookup_of(keys):
    """Of documents with keys uint64[bands, N] of one hash."""
    return BandLookup.of(keys, np.zeros(keys.shape, np.uint32), 1)


def test_documents_that_share_a_band():
    lookup = lookup_of(np.array([[7, 5, 7], [1, 2, 3]], np.uint64))  # 2 bands of 3 documents
    others = np.array([[7, 6], [9, 2]], np.uint64)
    places, documents = lookup.pairs(*of_all(others))
    assert [*zip(places.tolist(), documents.tolist(), strict=True)] == [(0, 0), (0, 2), (1, 1)]
    places, firsts = lookup.first_matches(*of_all(others))
    assert [*zip(places.tolist(), firsts.tolist(), strict=True)] == [(0, 0), (1, 1)]


def test_pairs_are_those_of_comparing_all():
    generator = np.random.default_rng(3)
    keys = generator.integers(0, 40, (4, 50)).astype(np.uint64) << np.uint64(57)
    others = generator.integers(0, 40, (4, 30)).astype(np.uint64) << np.uint64(57)
    expected = {
        (place, document)
        for place in range(30)
        for document in range(50)
        if (others[:, place] == keys[:, document]).any()
    }
    places, documents = lookup_of(keys).pairs(*of_all(others))
    assert [*zip(places.tolist(), documents.tolist(), strict=True)] == sorted(expected)
    places, firsts = lookup_of(keys).first_matches(*of_all(others))
    assert set(zip(places.tolist(), firsts.tolist(), strict=True)) <= expected
    assert set(places.tolist()) == {place for place, _ in expected}


def test_no_documents_match_nothing():
    places, documents = lookup_of(np.empty((2, 0), np.uint64)).pairs(*of_all(np.zeros((2, 4), np.uint64)))
    assert len(places) == len(documents) == 0


def test_keys_of_signatures_that_a_document_has_are_found():
    generator = np.random.default_rng(4)
    signatures = generator.integers(0, 12, (300, 12)).astype(np.uint32)
    salt = np.uint64(5)
    keys = band_keys(signatures, 4, 3, salt)
    lookup = BandLookup.of(keys[:, :40].copy(), signatures[:40, ::3].T, 3)
    places, found = lookup.keys_like(signatures, salt)
    assert set(zip(*lookup.pairs(places, found), strict=True)) == set(zip(*lookup.pairs(*of_all(keys)), strict=True))
    assert len(places) < 300


def test_of_most_bands_the_first_hash_says_that_no_document_has_them():
    generator = np.random.default_rng(5)
    signatures = generator.integers(0, 1 << 32, (1000, 12)).astype(np.uint32)
    signatures[700, 3:6] = signatures[7, 3:6]
    keys = band_keys(signatures, 4, 3, np.uint64(0))
    lookup = BandLookup.of(keys[:, :40].copy(), signatures[:40, ::3].T, 3)
    places, found = lookup.keys_like(signatures[40:], np.uint64(0))
    assert [*zip(*(values.tolist() for values in lookup.pairs(places, found)), strict=True)] == [(660, 7)]
    ending = np.uint32(8 * lookup.endings.shape[1] - 1)
    is_known = [np.isin(signatures[40:, 3 * band] & ending, signatures[:40, 3 * band] & ending) for band in range(4)]
    assert 0 < np.sum(is_known) < 4 * 960 / 8
