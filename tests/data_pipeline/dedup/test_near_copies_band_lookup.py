"""Lookup of band keys: the documents that share a band, in a worked example and as a comparison of all pairs finds."""

import numpy as np

from gristmill.data_pipeline.dedup.near_copies import BandLookup


def test_documents_that_share_a_band():
    lookup = BandLookup.of(np.array([[7, 5, 7], [1, 2, 3]], np.uint64))  # 2 bands of 3 documents
    others = np.array([[7, 6], [9, 2]], np.uint64)
    places, documents = lookup.pairs(others)
    assert [*zip(places.tolist(), documents.tolist(), strict=True)] == [(0, 0), (0, 2), (1, 1)]
    places, firsts = lookup.first_matches(others)
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
    places, documents = BandLookup.of(keys).pairs(others)
    assert [*zip(places.tolist(), documents.tolist(), strict=True)] == sorted(expected)
    places, firsts = BandLookup.of(keys).first_matches(others)
    assert set(zip(places.tolist(), firsts.tolist(), strict=True)) <= expected
    assert set(places.tolist()) == {place for place, _ in expected}


def test_no_documents_match_nothing():
    places, documents = BandLookup.of(np.empty((2, 0), np.uint64)).pairs(np.zeros((2, 4), np.uint64))
    assert len(places) == len(documents) == 0
