"""Copies follow their document: worked examples."""

from pathlib import Path

import numpy as np
import pytest
from planted import engine

from gristmill.data_pipeline.dedup import duplicates as module
from gristmill.data_pipeline.dedup.duplicates import DUPLICATE, reassign_copies, table_of
from gristmill.foundation.shuffle import Shuffle


def duplicates(prefix: Path, *rows: tuple[int, int, float]) -> Shuffle:
    """Of (document, kept document, similarity); the documents are rows of one file, with their numbers as ids."""
    records = np.zeros(len(rows), DUPLICATE)
    for place, (document, kept, similarity) in enumerate(rows):
        records[place] = (0, document, (0, document), (0, kept), similarity)
    shuffle = Shuffle(prefix, DUPLICATE, 1, 1)
    shuffle.write_sorted(0, records, records["file"])
    return shuffle


def rows_of(found: Shuffle) -> list[tuple[int, int, float]]:
    records = found.read(0)
    assert records["row"].tolist() == records["id"][:, 1].tolist()
    rows = zip(records["row"].tolist(), records["duplicate_of"][:, 1].tolist(), records["value"].tolist(), strict=True)
    return sorted(rows)


@pytest.mark.parametrize("ranges", [1, 3])
def test_a_copy_falls_with_its_document_and_names_the_one_that_is_kept(tmp_path, monkeypatch, ranges):
    monkeypatch.setattr(module, "ranges_for", lambda _: ranges)
    copies = duplicates(tmp_path / "e", (3, 2, 1.0), (5, 4, 1.0))
    exact, near = reassign_copies(copies, duplicates(tmp_path / "n", (2, 1, 0.9)), tmp_path / "work", engine())
    assert rows_of(exact) == [(5, 4, 1.0)]
    assert rows_of(near) == [(2, 1, 0.9), (3, 1, 0.9)]


def test_nothing_to_follow(tmp_path):
    copies, none = duplicates(tmp_path / "e", (3, 2, 1.0)), duplicates(tmp_path / "n")
    exact, near = reassign_copies(copies, none, tmp_path / "work", engine())
    assert rows_of(exact) == [(3, 2, 1.0)] and rows_of(near) == []


def test_the_table_is_sorted_by_id(tmp_path):
    assert table_of(duplicates(tmp_path / "e", (3, 2, 1.0), (1, 0, 0.9))).to_pylist() == [
        {"doc_id": f"{1:032x}", "duplicate_of": f"{0:032x}", "similarity": 0.9},
        {"doc_id": f"{3:032x}", "duplicate_of": f"{2:032x}", "similarity": 1.0},
    ]
