"""Rows of annotated files: how a shard that is cut by its own measure finds what it is made of."""

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


def read_rows(cut: RowRange, columns: Sequence[str]) -> pa.Table:
    """The slice's rows. Row groups that hold none of them are not read."""
    tables = list(row_range_groups(cut, columns))
    if tables:
        return pa.concat_tables(tables)
    return pq.read_schema(cut.path).empty_table().select(list(columns))


def row_range_groups(cut: RowRange, columns: Sequence[str]) -> Iterator[pa.Table]:
    """The slice's rows, one row group of the file at a time."""
    with pq.ParquetFile(cut.path) as file:
        start = 0
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            first, last = np.searchsorted(cut.rows, [start, end])
            if last > first:
                table = file.read_row_group(group, columns=list(columns))
                yield table.take(pa.array(cut.rows[first:last] - start))
            start = end


def split_by_weight(weights_N: np.ndarray, most: int) -> list[tuple[int, int]]:
    """(start, end) of runs of items whose weights reach `most`: [3, 3, 9, 1] and 5 -> [(0, 2), (2, 3), (3, 4)].

    Depends on the weights in their order alone. No items: one empty run, so that there is always a first shard."""
    runs, start, held = [], 0, 0
    for index, weight in enumerate(weights_N.tolist()):
        held += weight
        if held >= most:
            runs.append((start, index + 1))
            start, held = index + 1, 0
    if start < len(weights_N) or not runs:
        runs.append((start, len(weights_N)))
    return runs
