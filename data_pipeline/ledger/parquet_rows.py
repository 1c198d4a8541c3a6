"""Row ranges of annotated files, and the split of rows into shards of a given size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True)
class RowRange:
    """rows: int64, rising row numbers of one Parquet file."""

    path: Path
    rows: np.ndarray


def read_rows(row_range: RowRange, columns: Sequence[str]) -> pa.Table:
    """The rows of the range. Row groups that hold none of them are not read."""
    tables = list(row_range_groups(row_range, columns))
    if tables:
        return pa.concat_tables(tables)
    return pq.read_schema(row_range.path).empty_table().select(list(columns))


def row_range_groups(row_range: RowRange, columns: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of the range, one row group of the file at a time."""
    with pq.ParquetFile(row_range.path) as file:
        start = 0
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            first, last = np.searchsorted(row_range.rows, [start, end])
            if last > first:
                table = file.read_row_group(group, columns=list(columns))
                yield table.take(pa.array(row_range.rows[first:last] - start))
            start = end


def split_by_weight(weights_N: np.ndarray, max_weight: int) -> list[tuple[int, int]]:
    """(start, end) of runs of items whose weights reach `max_weight`: [3, 3, 9, 1] and 5 -> [(0, 2), (2, 3), (3, 4)].

    Depends on the weights in their order alone. No items: one empty run, so that there is always a first shard."""
    runs, start, held = [], 0, 0
    for index, weight in enumerate(weights_N.tolist()):
        held += weight
        if held >= max_weight:
            runs.append((start, index + 1))
            start, held = index + 1, 0
    if start < len(weights_N) or not runs:
        runs.append((start, len(weights_N)))
    return runs
