"""Texts of single rows of annotated files: those that reading whole row groups gives, from the page or without it."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.annotate.annotate import open_annotated
from gristmill.data_pipeline.dedup import folding as module
from gristmill.data_pipeline.dedup.folding import DOCUMENT_KEY, has_picked_texts, picked_texts, write_keys

TEXTS = [f"text {number} é\n" * (number % 7) for number in range(100)]


def written(path, readable=lambda number: True):
    """An annotated file of TEXTS in two row groups, "" where a record could not be read, with its keys."""
    texts = [text if readable(number) else "" for number, text in enumerate(TEXTS)]
    with open_annotated(path, pa.schema([("text", pa.string()), ("num_bytes", pa.int64())])) as file:
        sizes = [len(text.encode()) for text in texts]
        file.write_table(pa.table({"text": texts, "num_bytes": sizes}), row_group_size=60)
    keys = np.zeros(len(texts), DOCUMENT_KEY)
    keys["bytes"], keys["readable"] = sizes, [readable(number) for number in range(len(texts))]
    write_keys(path, keys)
    return texts


def picked(path, rows):
    parts = list(picked_texts(path, rows))
    assert [row for some, _ in parts for row in some.tolist()] == list(rows)
    return [text for _, of_group in parts for text in of_group.to_pylist()]


@pytest.mark.parametrize("unreadable", [(), (3, 59, 60, 99)])
def test_single_texts_are_read_without_their_row_group(tmp_path, unreadable, monkeypatch):
    path = tmp_path / "s-0.parquet"
    assert not has_picked_texts(path)
    texts = written(path, lambda number: number not in unreadable)
    assert has_picked_texts(path)
    rows = [0, 3, 7, 8, 58, 61, 98]
    monkeypatch.setattr(module.pq.ParquetFile, "read_row_group", None)
    assert picked(path, rows) == [texts[row] for row in rows]


def test_texts_are_read_a_bounded_number_at_a_time(tmp_path, monkeypatch):
    path = tmp_path / "s-0.parquet"
    texts = written(path)
    monkeypatch.setattr(module, "PICKED_BYTES", 500)
    assert picked(path, range(100)) == texts
    sizes = [sum(len(text.as_py().encode()) for text in of_part) for _, of_part in picked_texts(path, range(100))]
    assert len(sizes) > 5 and max(sizes) < 500 + max(map(len, TEXTS)) + 10
    assert list(picked_texts(path, [])) == []


def test_texts_elsewhere_than_their_lengths_say_are_read_with_their_row_group(tmp_path):
    path = tmp_path / "s-0.parquet"
    texts = written(path)
    for options in ({"compression": "zstd"}, {"compression": "none", "data_page_size": 50, "use_dictionary": False}):
        pq.write_table(pa.table({"text": texts}), path, row_group_size=60, **options)
        assert picked(path, [1, 30, 99]) == [texts[row] for row in (1, 30, 99)]
