"""Rows of annotated files, read and regrouped in bounded memory, and the split of rows into shards of a given size."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True)
class RowRange:
    """Rows of one Parquet file: of the rows from `start` on, those whose value in mask (bool[N]) is True."""

    path: Path
    start: int
    mask: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """int64[]: the row numbers, ascending."""
        return self.start + np.flatnonzero(self.mask)

    @classmethod
    def span(cls, path: Path, start: int, stop: int) -> "RowRange":
        """All rows start..stop - 1."""
        return cls(path, start, np.ones(stop - start, bool))

    @classmethod
    def of_rows(cls, path: Path, rows: np.ndarray) -> "RowRange":
        """The range of these ascending row numbers."""
        mask = np.zeros(int(rows[-1] - rows[0]) + 1 if len(rows) else 0, bool)
        mask[rows - rows[:1]] = True
        return cls(path, int(rows[0]) if len(rows) else 0, mask)


def spans_of_runs(sizes: Sequence[int], runs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """Spans of each run (start, stop) of the rows of files with so many rows: (file, first, last + 1) in each
    file that it has rows of. Sizes [2, 0, 3], runs [(1, 4)] -> [[(0, 1, 2), (2, 0, 2)]]."""
    starts = np.cumsum([0, *sizes]).tolist()
    spans_of = []
    for start, stop in runs:
        first, last = max(bisect_right(starts, start) - 1, 0), bisect_left(starts, stop)
        spans = [
            (file, max(start - starts[file], 0), min(stop - starts[file], sizes[file])) for file in range(first, last)
        ]
        spans_of.append([span for span in spans if span[2] > span[1]])
    return spans_of


def read_rows(row_range: RowRange, columns: Sequence[str]) -> pa.Table:
    """The rows of the range. Row groups that hold none of them are not read."""
    tables = list(row_range_groups(row_range, columns))
    if tables:
        return pa.concat_tables(tables)
    return pq.read_schema(row_range.path).empty_table().select(list(columns))


class RowGroups:
    """Reads columns of row groups and holds the last one, in which the next range to be read often begins."""

    def __init__(self, columns: Sequence[str]):
        self._columns = list(columns)
        self._last: tuple[Path, int] | None = None
        self._table: pa.Table | None = None

    def read(self, file: pq.ParquetFile, path: Path, group: int) -> pa.Table:
        if self._table is None or self._last != (path, group):
            self._table = None  # so that two are never in memory at once
            self._table = file.read_row_group(group, columns=self._columns, use_threads=False)
            self._last = path, group
        return self._table


def row_range_groups(row_range: RowRange, columns: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of the range, one row group of the file at a time."""
    for table, first in row_groups_of_range(row_range, RowGroups(columns)):
        mask = row_range.mask[first : first + len(table)]
        yield table if mask.all() else table.filter(pa.array(mask))


def row_groups_of_range(row_range: RowRange, reader: RowGroups) -> Iterator[tuple[pa.Table, int]]:
    """(all rows of a row group from the range's start up to its end, place of the first in the mask), for each row
    group with a row of the range."""
    with pq.ParquetFile(row_range.path) as file:
        start = -row_range.start  # of the row group, counted from the start of the range
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            first, last = max(start, 0), max(end, 0)
            if row_range.mask[first:last].any():
                size = len(row_range.mask[first:last])
                yield reader.read(file, row_range.path, group).slice(first - start, size), first
            start = end


def row_groups(
    tables: Iterable[pa.Table], max_rows: int, max_bytes: int | None = None, size_column: str = "num_bytes"
) -> Iterator[pa.Table]:
    """The same rows in tables of one chunk, each with as many as fit into max_rows and max_bytes, and at least one.

    size_column: int64, the bytes that count for max_bytes. How the rows were spread over `tables` decides nothing."""
    waiting: list[pa.Table] = []
    rows = num_bytes = 0
    for table in tables:
        sizes = np.ones(len(table), np.int64) if max_bytes is None else table.column(size_column).to_numpy()
        limit = max_rows if max_bytes is None else max_bytes
        before = np.concatenate([[0], np.cumsum(sizes)])
        start = 0
        while start < len(table):
            fitting = int(np.searchsorted(before, before[start] + limit - num_bytes, side="right")) - 1
            stop = min(max(fitting, start if waiting else start + 1), start + max_rows - rows)
            if stop > start:
                waiting.append(table.slice(start, stop - start))
                rows, num_bytes = rows + stop - start, num_bytes + int(before[stop] - before[start])
            start = stop
            if start < len(table) or rows == max_rows:
                yield pa.concat_tables(waiting).combine_chunks()
                waiting, rows, num_bytes = [], 0, 0
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


class WeightRuns:
    """Cuts items that come in pieces into runs whose weights reach `max_weight`: [3, 3], [9, 1] and 5 -> (0, 2), (2,
    3), (3, 4). Only the weights and marks in their order count, not the pieces. starts: the first item of each run that
    is known so far; the last one's may not have come yet.

    A run of at least min_weight (None: max_weight) ends before an item of mark min_mark or more. So runs begin at the
    same items again soon after items were put in or taken out (content-defined chunking: Muthitacharoen et al. 2001,
    "A Low-bandwidth Network File System")."""

    def __init__(self, max_weight: int, min_weight: int | None = None, min_mark: int = 0):
        self.max_weight, self.min_mark = max_weight, min_mark
        self.min_weight = max_weight if min_weight is None else min_weight
        self.starts = [0]
        self.size = self._filled = 0

    def add(self, weights_N: np.ndarray, marks_N: np.ndarray | None = None) -> None:
        """marks_N: None has no item that a run may begin with early."""
        before = np.concatenate([[0], np.cumsum(weights_N, dtype=np.int64)])
        marked = np.empty(0, np.int64) if marks_N is None else np.flatnonzero(marks_N >= self.min_mark)
        start = -self._filled  # the total at the run's start
        while True:
            first, last = np.searchsorted(before[:-1], [start + self.min_weight, start + self.max_weight])
            place = np.searchsorted(marked, first)
            end = int(min(last, marked[place])) if place < len(marked) else int(last)
            if end >= len(weights_N):
                self._filled = int(before[-1]) - start
                break
            start = int(before[end])
            self.starts.append(self.size + end)
        self.size += len(weights_N)

    def bounds(self) -> list[tuple[int, int]]:
        """(start, end) of every run, once all pieces were added. No items: one empty run, so that there is always a
        first shard."""
        starts = [start for start in self.starts if start < self.size] or [0]
        return list(zip(starts, [*starts[1:], self.size], strict=True))
