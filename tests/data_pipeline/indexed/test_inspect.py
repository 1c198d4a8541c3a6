"""The histogram worked by hand."""

import numpy as np

from gristmill.data_pipeline.indexed.inspect import inspect, lines
from tests.support.indexed_files import write_documents


def test_lengths_fall_into_powers_of_two(tmp_path):
    write_documents(tmp_path / "d", [[7], [8, 9], [1, 2, 3], [4] * 7], np.uint16)
    found = inspect(tmp_path / "d", num_documents=2)
    assert (found.documents, found.tokens, found.shortest, found.longest, found.mean) == (4, 13, 1, 7, 3.25)
    assert [(b.first, b.last, b.documents, b.tokens) for b in found.lengths] == [
        (1, 1, 1, 1),
        (2, 3, 2, 5),
        (4, 7, 1, 7),
    ]
    assert found.first_documents == ("7", "8 9")
    assert found.bin_bytes == 26


def test_documents_are_shown_decoded(tmp_path):
    write_documents(tmp_path / "d", [[72, 105], [33]], np.uint16)
    found = inspect(tmp_path / "d", decode=lambda ids: bytes(ids).decode())
    assert found.first_documents == ("Hi", "!")
    printed = "\n".join(lines(found))
    assert "2 documents, 2 sequences, 3 tokens" in printed
    assert "document 0: 'Hi'" in printed


def test_an_empty_file_has_nothing_to_show(tmp_path):
    write_documents(tmp_path / "d", [], np.uint16)
    found = inspect(tmp_path / "d")
    assert (found.documents, found.tokens, found.lengths, found.first_documents) == (0, 0, (), ())
    assert "0 documents" in lines(found)[0]
