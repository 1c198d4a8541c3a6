"""Merging depends on the documents and their order, never on the number of files."""

import numpy as np
import pytest

from gristmill.data_pipeline.indexed.dataset import append, merge, slice_documents
from gristmill.data_pipeline.indexed.draws import Permutation, key_of
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.foundation.errors import InputError
from tests.support.indexed_files import write_documents


def content(prefix) -> list[list[int]]:
    return [document.tolist() for document in IndexedReader(prefix).documents()]


def files(prefix) -> tuple[bytes, bytes]:
    return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()


def in_parts(tmp_path, documents, edges):
    prefixes = [tmp_path / f"part{number}of{len(edges)}" for number in range(len(edges) - 1)]
    for prefix, first, last in zip(prefixes, edges, edges[1:], strict=False):
        write_documents(prefix, documents[first:last], np.uint16)
    return prefixes


@pytest.mark.parametrize("tokens_at_once", [1, 7, 60, 1 << 19])  # most documents are longer than 1 and 7
def test_any_number_of_parts_gives_the_same_bytes(tmp_path, random_documents, monkeypatch, tokens_at_once):
    monkeypatch.setattr("gristmill.data_pipeline.indexed.dataset.GATHERED_TOKENS", tokens_at_once)
    documents = random_documents(0, 50, 20)
    write_documents(tmp_path / "whole", documents, np.uint16)
    for edges in ([0, 50], [0, 1, 50], [0, 20, 20, 35, 50]):
        merge(in_parts(tmp_path, documents, edges), tmp_path / "merged")
        assert files(tmp_path / "merged") == files(tmp_path / "whole")


def test_the_shuffle_is_the_keyed_permutation_whatever_the_parts(tmp_path, random_documents):
    documents = random_documents(0, 50, 20)
    key = key_of(7, "documents")
    expected = [documents[place] for place in Permutation(50, key).whole()]
    for edges in ([0, 50], [0, 20, 35, 50]):
        merge(in_parts(tmp_path, documents, edges), tmp_path / "merged", key)
        assert content(tmp_path / "merged") == expected != documents


def test_append_and_cut_out(tmp_path):
    write_documents(tmp_path / "a", [[1, 2], [3]], np.uint16)
    write_documents(tmp_path / "b", [[4], [5, 6]], np.uint16)
    append(tmp_path / "a", tmp_path / "b")
    assert content(tmp_path / "a") == [[1, 2], [3], [4], [5, 6]]
    slice_documents(tmp_path / "a", tmp_path / "middle", 1, 3)
    assert content(tmp_path / "middle") == [[3], [4]]
    with pytest.raises(InputError, match="documents 3 to 5 asked for, it has 4"):
        slice_documents(tmp_path / "a", tmp_path / "beyond", 3, 5)


def test_what_cannot_be_merged_is_refused(tmp_path):
    write_documents(tmp_path / "small", [[1]], np.uint16)
    write_documents(tmp_path / "large", [[1]], np.int32)
    with pytest.raises(InputError, match=r"large.bin holds int32, .*small.bin uint16"):
        merge([tmp_path / "small", tmp_path / "large"], tmp_path / "both")
    with pytest.raises(InputError, match="nothing to merge"):
        merge([], tmp_path / "none")
