"""The histogram worked by hand."""

import numpy as np
import pytest

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.inspect import inspect, lines, packing_report, rows
from gristmill.data_pipeline.indexed.samples import open_samples
from gristmill.foundation.errors import InputError
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


# Cuts and padding worked by hand, and held to the windows themselves.


def test_worked_by_hand(make_dataset):
    # With their ends: 3, 2, 4 tokens. Concat, windows of 3 inputs: |a a 1|b 1 c|c c 1|: the third document is cut.
    folder = make_dataset({"books": (1.0, [[10, 11], [20], [30, 31, 32]])})
    concat, best_fit = packing_report(folder, "train", 3)
    assert (concat.documents, concat.cut, concat.windows, concat.padding) == (3, 1, 2, 0)
    # Best fit, windows of 4: the third, the first, the second: 4 | 3 + . | 2 + . .
    assert (best_fit.cut, best_fit.windows, best_fit.padding) == (0, 3, 3)
    assert best_fit.padding_share == 3 / 12
    assert [row[1] for row in rows([concat, best_fit])] == ["packing", "concat", "best_fit"]
    with pytest.raises(InputError, match=r"has no split trian; it has .*train"):
        packing_report(folder, "trian", 3)


def test_padding_is_what_the_samples_leave_out(make_dataset, random_documents):
    folder = make_dataset({"books": (1.0, random_documents(0, 300, 40))})
    best_fit = packing_report(folder, "train", 16)[1]
    samples = open_samples(folder, "train", 16, 0, IndexConfig(packing="best_fit"))
    learned = sum(np.count_nonzero(samples.sample(k)["weights"]) for k in range(samples.samples_of("books")))
    assert best_fit.windows == samples.samples_of("books")
    assert learned == best_fit.windows * 16 - best_fit.padding
