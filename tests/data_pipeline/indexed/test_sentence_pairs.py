"""Pairs of text segments from sentence-split data: worked examples, and laws on random documents."""

import numpy as np
import pytest

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.dataset import Dataset, IndexedSource, merge
from gristmill.data_pipeline.indexed.format import IndexedReader, indexed_writer
from gristmill.data_pipeline.indexed.sentence_pairs import (
    SentencePairs,
    require_sentences,
    sentence_runs,
    trimmed_lengths,
)
from gristmill.foundation.errors import InputError

END = 1


def write_sentences(prefix, documents):
    """documents: lists of sentences, which are lists of tokens."""
    with indexed_writer(prefix, np.uint16) as writer:
        for sentences in documents:
            lengths = np.array([len(sentence) for sentence in sentences])
            writer.add_many(np.concatenate(sentences), lengths, np.array([len(sentences)]))


def random_documents(count=40):
    """Every token is its own number, so that a place in a pair is known; each document ends with END."""
    generator, number, documents = np.random.default_rng(0), 2, []
    for _ in range(count):
        sentences = []
        for length in generator.integers(1, 9, generator.integers(1, 12)).tolist():
            sentences.append(list(range(number, number + length)))
            number += length
        sentences[-1].append(END)
        documents.append(sentences)
    return documents


def flat(sentences):
    return [token for sentence in sentences for token in sentence]


def pairs_of(prefix, max_tokens=20, seed=3):
    dataset = Dataset(
        vocab_size=5000,
        end_of_document=END,
        dtype="uint16",
        fim=None,
        sources=(IndexedSource(name="all", weight=1.0, tokenizer="t", splits={}),),
    )
    return SentencePairs(dataset, {"all": IndexedReader(prefix)}, max_tokens, seed, IndexConfig(), "identity")


def test_runs_by_hand():
    lengths, bounds = np.array([3, 4, 5, 2, 6], np.int32), np.array([0, 4, 5])
    assert sentence_runs(lengths, bounds, 6).tolist() == [[0, 2], [2, 4]]
    assert sentence_runs(lengths, bounds, 100).tolist() == [[0, 4]]
    # one sentence would be left over, so it joins the run
    assert sentence_runs(lengths[:3], np.array([0, 3]), 6).tolist() == [[0, 3]]


def test_trimming_by_hand():
    assert trimmed_lengths(3, 2, 6) == (3, 2)
    assert trimmed_lengths(7, 2, 6) == (4, 2)
    assert trimmed_lengths(2, 7, 6) == (2, 4)
    assert trimmed_lengths(7, 5, 6) == (3, 3)
    assert trimmed_lengths(7, 7, 5) == (3, 2)


def test_every_pair_is_two_neighbouring_segments_of_a_document(tmp_path):
    documents = random_documents()
    write_sentences(tmp_path / "all", documents)
    pairs = pairs_of(tmp_path / "all")
    document_of = {token: number for number, sentences in enumerate(documents) for token in flat(sentences)}
    swapped = 0
    for k in range(400):
        pair = pairs.pair(k)
        first, second = (pair.second, pair.first) if pair.swapped else (pair.first, pair.second)
        assert len(first) and len(second) and len(first) + len(second) <= 20
        assert END not in first and END not in second
        assert (np.diff(first) == 1).all() and (np.diff(second) == 1).all() and first[-1] < second[0]
        assert document_of[first[0]] == document_of[second[-1]]
        swapped += pair.swapped
    assert 150 < swapped < 250  # 200 +- 5 deviations of 10


def test_an_epoch_has_each_run_once_and_k_alone_decides(tmp_path):
    write_sentences(tmp_path / "all", random_documents())
    pairs, again = pairs_of(tmp_path / "all"), pairs_of(tmp_path / "all")
    epoch = pairs.drawn(1)[0].epoch_samples
    runs = sentence_runs(IndexedReader(tmp_path / "all").lengths, IndexedReader(tmp_path / "all").bounds, 20)
    assert epoch == len(runs)
    assert sorted(pairs._order(0, 1)(index) for index in range(epoch)) == list(range(epoch))
    for k in (7, 3, epoch + 2):
        one, other = pairs.pair(k), again.pair(k)
        assert (one.first == other.first).all() and (one.second == other.second).all() and one.swapped == other.swapped
    assert any(len(pairs.pair(k).first) != len(pairs_of(tmp_path / "all", seed=4).pair(k).first) for k in range(20))


def test_merging_keeps_the_sentences(tmp_path):
    documents = random_documents(6)
    write_sentences(tmp_path / "one", documents[:2])
    write_sentences(tmp_path / "two", documents[2:])
    merge([tmp_path / "one", tmp_path / "two"], tmp_path / "both")
    reader = IndexedReader(tmp_path / "both")
    assert [reader.sentence_lengths(number).tolist() for number in range(6)] == [
        [len(sentence) for sentence in sentences] for sentences in documents
    ]
    assert reader.document(5).tolist() == flat(documents[5])


def test_data_without_sentences_is_refused(tmp_path):
    with indexed_writer(tmp_path / "whole", np.uint16) as writer:
        writer.add([5, 6, 7])
    with pytest.raises(InputError, match=r"set index\.sentences: true and run `gristmill index` again"):
        require_sentences(IndexedReader(tmp_path / "whole"))


def test_the_pieces_of_a_pair_are_its_tokens_and_a_document_names_its_pairs(tmp_path):
    documents = random_documents()
    write_sentences(tmp_path / "all", documents)
    pairs, num_samples = pairs_of(tmp_path / "all"), 300  # several epochs
    read_by: dict[int, set[tuple[int, int]]] = {}
    for k in range(num_samples):
        _, epoch, pieces = pairs.pieces_of(k)
        pair = pairs.pair(k)
        parts = [flat(documents[piece.document])[piece.start : piece.stop] for piece in pieces]
        assert [pair.first.tolist(), pair.second.tolist()] == (parts[::-1] if pair.swapped else parts)
        read_by.setdefault(pieces[0].document, set()).add((k, epoch))
    for document in range(len(documents)):
        assert pairs.samples_with("all", document, num_samples) == sorted(read_by.get(document, ()))
