"""DuckDB's view of signals, whose columns differ by source."""

import glob

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.corpus.document_history import create_views
from gristmill.foundation.errors import InputError

SHARDS = {
    "train/a-00000": {"doc_id": ["1"], "num_words": [5]},
    "train/a-00001": {"doc_id": ["2"], "num_words": [6]},
    "test/a-00000": {"doc_id": ["3"], "num_words": [7]},
    "train/a-1-00000": {"doc_id": ["4"], "cut_lines": [1], "num_words": [8]},
    "train/b-00000": {"doc_id": ["5"], "num_words": [9], "quality_mine": [0.5]},
    "train/c-100000": {"doc_id": ["6"], "num_words": [10]},
}


def test_signals_of_sources_with_other_columns_are_one_view(tmp_path):
    """As DuckDB's union_by_name, which reads the footers of all files, joins them; paths are no patterns."""
    folder = tmp_path / "it's [x]*"
    for name, columns in SHARDS.items():
        path = folder / "signals" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)
    connection = duckdb.connect()
    create_views(connection, glob.escape(str(folder)), str(folder), ("signals",))
    names = "doc_id, num_words, cut_lines, quality_mine"
    rows = connection.execute(f"SELECT {names}, split FROM signals ORDER BY doc_id").fetchall()
    pattern = (glob.escape(str(folder)) + "/signals/*/*.parquet").replace("'", "''")
    united = f"read_parquet('{pattern}', union_by_name = true, filename = true)"
    expected = f"SELECT {names}, split_part(filename, '/', -2) FROM {united} ORDER BY doc_id"
    assert rows == connection.execute(expected).fetchall() and len(rows) == len(SHARDS)


def test_a_corpus_without_signals_is_said(tmp_path):
    with pytest.raises(InputError, match=r"signals: .*`gristmill verify"):
        create_views(duckdb.connect(), str(tmp_path), str(tmp_path), ("signals",))
