"""Fill-in-the-middle: the pieces put back in order are the document, and each sample decides for itself."""

import itertools

import numpy as np
import pytest

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.samples import open_samples

PREFIX, MIDDLE, SUFFIX = 2, 3, 4


def put_back(ids: list[int]) -> list[int]:
    """The document that was rearranged: "<P> a <S> c <M> b" or "<P> <S> c <M> a b" -> a b c."""
    if PREFIX not in ids:
        return ids
    suffix, middle = ids.index(SUFFIX), ids.index(MIDDLE)
    before, after, rest = ids[1:suffix], ids[suffix + 1 : middle], ids[middle + 1 :]
    return before + rest + after if before else rest + after


@pytest.mark.parametrize("suffix_first", [0.0, 1.0])
def test_documents_put_back_in_order_are_the_documents(make_dataset, random_documents, suffix_first):
    documents = random_documents(0, 40, 12)
    folder = make_dataset({"code": (1.0, documents)}, fim=True)
    config = IndexConfig(packing="best_fit", fim_rate=1.0, fim_suffix_first=suffix_first, mask_documents=True)
    samples = open_samples(folder, "train", 63, 5, config)
    seen = 0
    for k in range(samples.samples_of("code")):
        sample = samples.sample(k)
        bounds = sample["document_bounds"].tolist()
        for start, end in itertools.pairwise(bounds[:-1]):  # the last may have lost its end
            ids = sample["tokens"][start:end].tolist()
            if ids[-1] == 1 and len(ids) > 1 and ids[0] != 1:
                assert put_back(ids[:-1]) in documents
                seen += PREFIX in ids
    assert seen > 20


def test_the_rate_and_the_sources_decide(make_dataset, random_documents):
    sources = {"code": (0.5, random_documents(0, 200, 12)), "prose": (0.5, random_documents(1, 200, 12))}
    folder = make_dataset(sources, fim=True)
    config = IndexConfig(fim_rate=0.3, fim_sources=("code",), mask_documents=True)
    samples = open_samples(folder, "train", 64, 5, config)
    marks = {"code": 0, "prose": 0}
    documents = {"code": 0, "prose": 0}
    for k in range(200):
        sample = samples.sample(k)
        marks[samples.source_of(k)] += int((sample["tokens"] == PREFIX).sum())
        documents[samples.source_of(k)] += len(sample["document_bounds"]) - 1
    assert marks["prose"] == 0
    assert 0.2 < marks["code"] / documents["code"] < 0.4


def test_the_same_sample_every_time_and_the_shape_stays(make_dataset, random_documents):
    folder = make_dataset({"code": (1.0, random_documents(0, 100, 12))}, fim=True)
    config = IndexConfig(fim_rate=0.5, mask_documents=True)
    first, second = (open_samples(folder, "train", 32, 5, config) for _ in range(2))
    for k in range(100):
        sample, again = first.sample(k), second.sample(k)
        assert all(np.array_equal(sample[name], again[name]) for name in sample)
        assert sample["tokens"].shape == sample["targets"].shape == sample["positions"].shape == (32,)
        assert sample["document_bounds"][0] == 0
        assert sample["document_bounds"][-1] == 32
        assert (np.diff(sample["document_bounds"]) > 0).all()
