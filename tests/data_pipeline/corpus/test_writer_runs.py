"""Consecutive shards are written by one task, and a row group in which two ranges meet is read once."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.shards import ShardFormat, ShardTask
from gristmill.data_pipeline.corpus.writer import _runs
from gristmill.data_pipeline.ledger.document_file import RowGroups, RowRange, row_groups_of_range


def shard(source: str, number: int, split: str = "train") -> ShardTask:
    return ShardTask(Path("corpus"), split, f"{source}-{number:05}.parquet", ShardFormat(source, (), None, False), ())


def test_runs_are_consecutive_shards_of_one_source_and_split():
    tasks = [*(shard("a", number) for number in range(9)), shard("b", 0), shard("b", 0, "test")]
    assert [len(run) for run in _runs(tasks, 1)] == [4, 4, 1, 1, 1]
    assert [len(run) for run in _runs(tasks, 2)] == [1] * 11
    many = [shard("a", number) for number in range(17)]
    assert [len(run) for run in _runs(many, 2)] == [2] * 8 + [1]
    assert [len(run) for run in _runs([*many, *many], 2)] == [4] * 8 + [2]
    assert [task for run in _runs(tasks, 1) for task in run] == tasks and not _runs([], 2)


def test_a_row_group_between_two_ranges_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": np.arange(10), "m": np.arange(10)}), path, row_group_size=4)
    read: list[int] = []
    read_row_group = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda file, group, **options: read.append(group) or read_row_group(file, group, **options),
    )
    reader, found = RowGroups(["n"]), []
    for rows in ([0, 2, 5], [6, 7, 9]):
        row_range = RowRange.of_rows(path, np.array(rows))
        for table, first in row_groups_of_range(row_range, reader):
            found += table.filter(pa.array(row_range.mask[first : first + len(table)])).column("n").to_pylist()
            assert table.column_names == ["n"]
    assert found == [0, 2, 5, 6, 7, 9] and read == [0, 1, 2]
