"""Parquet: a file, or some of its row groups."""

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.document import Record, Unreadable
from gristmill.data_pipeline.readers.fields import FieldMap
from gristmill.data_pipeline.readers.source import SourceConfig

BATCH_ROWS = 1024


def read_parquet(
    file: BinaryIO, source: SourceConfig, first_record: int = 0, first_group: int = 0, end_group: int | None = None
) -> Iterator[Record | Unreadable]:
    """Every row as a record. A file whose footer is gone is one Unreadable; so is each row group that is damaged."""
    try:
        table = pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        yield Unreadable(first_record, "no_parquet", f"no readable Parquet file: {_first_line(error)}")
        return
    number, fields = first_record, FieldMap(source)
    for group in range(first_group, table.num_row_groups if end_group is None else end_group):
        rows = table.metadata.row_group(group).num_rows
        done = 0
        names = table.schema_arrow.names
        try:
            for batch in table.iter_batches(BATCH_ROWS, row_groups=[group]):
                columns = {name: column.to_pylist() for name, column in zip(names, batch.columns, strict=True)}
                yield from fields.records(columns, number + done)
                done += len(batch)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            lost = f"row group {group}, {rows - done} of {rows} rows lost: {_first_line(error)}"
            yield Unreadable(number + done, "damaged", lost)
        number += rows


def row_groups(file: BinaryIO, part_bytes: int) -> list[tuple[int, int, int]]:
    """(first record, first group, end group) of runs of row groups of about part_bytes; empty if there is no footer."""
    try:
        metadata = pq.ParquetFile(file).metadata
    except (OSError, pa.ArrowException):
        return []
    parts = []
    first_record = first_group = held = rows = 0
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        rows += metadata.row_group(group).num_rows
        if held >= part_bytes or group + 1 == metadata.num_row_groups:
            parts.append((first_record, first_group, group + 1))
            first_record, first_group, held, rows = first_record + rows, group + 1, 0, 0
    return parts


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
