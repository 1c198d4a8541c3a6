"""Reader of Parquet files or row-group ranges, in batches that fit into memory."""

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, first_line, too_large
from gristmill.data_pipeline.readers.fields import FieldMap
from gristmill.data_pipeline.readers.json_repair import SURROGATES, without_surrogates
from gristmill.data_pipeline.readers.page_sizes import column_chunks, page_sizes
from gristmill.data_pipeline.readers.source import SourceConfig

BATCH_ROWS = 1024
# Bytes of cells that are converted to Python strings at a time.
SLICE_BYTES = 16_000_000
# Maximum Arrow bytes of one column of a batch; dictionary-encoded columns expand when they are decoded.
COLUMN_BYTES = 256_000_000
# pyarrow decompresses complete pages. Writers make pages of 1 MB (parquet-mr, pyarrow) to 100 MB (DuckDB); the row
# group of a page over this and over the source's max_record_bytes is skipped.
MAX_PAGE_BYTES = 256_000_000


def read_parquet(
    file: BinaryIO, source: SourceConfig, first_record: int = 0, first_group: int = 0, end_group: int | None = None
) -> Iterator[Record | Unreadable]:
    """Read every row as a record. A file with an unreadable footer gives one Unreadable; so does each row group that is
    damaged or has a page over the size limit. A row with cells over max_record_bytes, or with text that is not UTF-8,
    is Unreadable by itself."""
    fields = FieldMap(source)
    for rows in read_rows(file, source, first_record, first_group, end_group):
        if isinstance(rows, Rows):
            yield from row_records(rows, fields)
        else:
            yield rows


class Rows(NamedTuple):
    """Rows of a row group, at most SLICE_BYTES in all or one row. number: of the first."""

    batch: pa.RecordBatch
    names: list[str]
    number: int


def read_rows(
    file: BinaryIO, source: SourceConfig, first_record: int = 0, first_group: int = 0, end_group: int | None = None
) -> Iterator[Rows | Unreadable]:
    """read_parquet without the records: the rows in slices, and what is Unreadable, in the order of the file."""
    try:
        table = pq.ParquetFile(file)
        names, num_groups = table.schema_arrow.names, table.num_row_groups
        if any(table.metadata.row_group(group).num_rows < 0 for group in range(num_groups)):
            raise ValueError("a row group of fewer than 0 rows")  # record numbers would repeat
        chunks = column_chunks(file)
    except Exception as error:  # pyarrow's decoders raise various errors
        yield Unreadable(first_record, "unreadable_file", f"not a readable Parquet file: {first_line(error)}")
        return
    number = first_record
    for group in range(first_group, num_groups if end_group is None else end_group):
        rows = done = 0
        try:
            rows = table.metadata.row_group(group).num_rows
            biggest, dictionary = page_sizes(file, chunks[group])
            most = max(MAX_PAGE_BYTES, source.max_record_bytes)
            if biggest > most:
                said = f"row group {group}, {rows} rows lost: a page of {biggest} bytes, over the limit of {most}"
                yield Unreadable(number, "record_too_large", f"{said}; write the file with smaller pages")
            else:
                batch_rows = max(min(BATCH_ROWS, COLUMN_BYTES // max(dictionary, 1)), 1)
                for batch in table.iter_batches(batch_rows, row_groups=[group], use_threads=False):
                    yield from _slices(batch, names, source.max_record_bytes, number + done)
                    done += len(batch)
        except (Exception, pa.ArrowException) as error:
            lost = f"row group {group}, {rows - done} of {rows} rows lost: {first_line(error)}"
            yield Unreadable(number + done, "damaged", lost)
        number += rows


def _slices(batch: pa.RecordBatch, names: list[str], limit: int, number: int) -> Iterator[Rows | Unreadable]:
    """The batch in slices of about SLICE_BYTES, without the rows over the limit."""
    batch = _without_dictionaries(batch)
    if batch.nbytes <= min(limit, SLICE_BYTES):
        yield Rows(batch, names, number)
        return
    start = held = 0
    for row in range(len(batch)):
        num_bytes = _row_bytes(batch, row)
        if num_bytes > limit or held + num_bytes > SLICE_BYTES:
            yield Rows(batch.slice(start, row - start), names, number + start)
            start, held = row, 0
        if num_bytes > limit:
            yield too_large(number + row, num_bytes, limit)
            start = row + 1
        else:
            held += num_bytes
    yield Rows(batch.slice(start), names, number + start)


def row_records(rows: Rows, fields: FieldMap) -> Iterator[Record | Unreadable]:
    batch, names, number = rows
    try:
        columns = {name: column.to_pylist() for name, column in zip(names, batch.columns, strict=True)}
    except Exception:  # invalid UTF-8, dates outside Python's range
        for row in range(len(batch)):
            yield _cell_by_cell(batch, row, names, fields, number + row)
        return
    yield from fields.records(columns, number)


def _cell_by_cell(
    batch: pa.RecordBatch, row: int, names: list[str], fields: FieldMap, number: int
) -> Record | Unreadable:
    """The record of one row with cells that have no Python value. Surrogates in a string are repaired; a row with other
    invalid UTF-8 is Unreadable; other values are formatted by Arrow."""
    cells: dict[str, Any] = {}
    was_repaired = False
    for name, column in zip(names, batch.columns, strict=True):
        cell = column[row]
        try:
            cells[name] = cell.as_py()
        except UnicodeDecodeError as error:
            if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                return Unreadable(number, "invalid_encoding", f"field {name!r}: a string in it is not utf-8", -1)
            try:
                cells[name] = without_surrogates(error.object.decode("utf-8", "surrogatepass"))
            except UnicodeDecodeError:
                reason = f"field {name!r}: invalid utf-8 at byte {error.start} of the cell"
                return Unreadable(number, "invalid_encoding", reason, -1, excerpt(error.object))
            was_repaired = True
        except (ValueError, OverflowError):
            cells[name] = _written(column, row)
    found = fields.record(cells, number, -1)
    return found.repaired(SURROGATES) if was_repaired and isinstance(found, Record) else found


def _written(column: pa.Array, row: int) -> str | None:
    try:
        return pc.cast(column.slice(row, 1), pa.string())[0].as_py()
    except (pa.ArrowException, ValueError):
        return None


def _without_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Decode dictionary columns: nbytes of a slice of one would count all its values."""
    if not any(pa.types.is_dictionary(column.type) for column in batch.columns):
        return batch
    columns = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _row_bytes(batch: pa.RecordBatch, row: int) -> int:
    return batch.slice(row, 1).nbytes


def row_groups(file: BinaryIO, range_bytes: int) -> list[tuple[int, int, int]]:
    """Return (first record, first group, end group) of runs of row groups of about range_bytes; empty without a
    footer."""
    try:
        metadata = pq.ParquetFile(file).metadata
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        sizes = [(group.total_byte_size, group.num_rows) for group in groups]
    except Exception:  # read_parquet reports the reason
        return []
    if any(num_bytes < 0 or rows < 0 for num_bytes, rows in sizes):
        return []
    ranges = []
    first_record = first_group = held = rows = 0
    for group, (num_bytes, num_rows) in enumerate(sizes):
        held += num_bytes
        rows += num_rows
        if held >= range_bytes or group + 1 == len(sizes):
            ranges.append((first_record, first_group, group + 1))
            first_record, first_group, held, rows = first_record + rows, group + 1, 0, 0
    return ranges
