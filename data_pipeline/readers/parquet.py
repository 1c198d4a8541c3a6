"""Reader of Parquet files or row-group ranges, in batches that fit into memory."""

import functools
import io
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.readers.compression import SURROGATES, without_surrogates
from gristmill.data_pipeline.readers.document import (
    Record,
    RecordBuilder,
    RecordColumns,
    Unreadable,
    excerpt,
    first_line,
    metadata_json,
    too_large,
)
from gristmill.data_pipeline.readers.source import FieldMap, SourceConfig

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
    start = slice_bytes = 0
    for row in range(len(batch)):
        num_bytes = _row_bytes(batch, row)
        if num_bytes > limit or slice_bytes + num_bytes > SLICE_BYTES:
            yield Rows(batch.slice(start, row - start), names, number + start)
            start, slice_bytes = row, 0
        if num_bytes > limit:
            yield too_large(number + row, num_bytes, limit)
            start = row + 1
        else:
            slice_bytes += num_bytes
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
    record = fields.record(cells, number, -1)
    return record.repaired(SURROGATES) if was_repaired and isinstance(record, Record) else record


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
    first_record = first_group = group_bytes = rows = 0
    for group, (num_bytes, num_rows) in enumerate(sizes):
        group_bytes += num_bytes
        rows += num_rows
        if group_bytes >= range_bytes or group + 1 == len(sizes):
            ranges.append((first_record, first_group, group + 1))
            first_record, first_group, group_bytes, rows = first_record + rows, group + 1, 0, 0
    return ranges


# Reader of Parquet files into columns: strings are copied from Arrow; rows that need a repair go one at a time.


def read_parquet_columns(
    file: BinaryIO, source: SourceConfig, bounds: tuple[int, int, int | None], builder: RecordBuilder
) -> Iterator[RecordColumns]:
    """parquet.read_parquet, as columns. bounds: (number of the first record, first row group, end), as there.

    Yields the builder's records whenever it is full; the last ones stay in it."""
    fields = FieldMap(source)
    for rows in read_rows(file, source, *bounds):
        if not isinstance(rows, Rows):
            builder.add(rows)
        elif (columns := _columns(rows, fields)) is not None:
            yield from builder.add_strings(rows.number, columns)
        else:
            for record in row_records(rows, fields):
                builder.add(record)
                if builder.is_full:
                    yield builder.take()
        if builder.is_full:
            yield builder.take()


def _columns(rows: Rows, fields: FieldMap) -> list[pa.Array] | None:
    """Texts, URLs, languages and metadata of the rows; None if one has no text, or a cell that is not valid."""
    by_name = dict(zip(rows.names, rows.batch.columns, strict=True))
    texts = by_name.get(fields.wanted)
    if texts is None or not _is_string(texts.type) or texts.null_count:
        return None
    try:
        rows.batch.validate(full=True)
        columns = [
            texts,
            _strings(by_name.get(fields.url), len(texts)),
            _strings(by_name.get(fields.language), len(texts)),
        ]
        columns[2] = pc.if_else(pc.equal(columns[2], ""), fields.default_language, columns[2])
        columns.append(_metadata(by_name, fields, len(texts)))
        return [column.cast(pa.string()) for column in columns]
    except Exception:  # invalid UTF-8, dates outside Python's range: row by row
        return None


def _strings(column: pa.Array | None, count: int) -> pa.Array:
    """The column with "" for null; "" everywhere if it does not hold strings."""
    if column is None or not _is_string(column.type):
        return pa.repeat(pa.scalar("", pa.string()), count)
    return pc.fill_null(column.cast(pa.string()), "")


def _is_string(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _metadata(by_name: dict[str, pa.Array], fields: FieldMap, count: int) -> pa.Array:
    names = fields.metadata_columns(by_name)
    if not names:
        return pa.repeat(pa.scalar("{}", pa.string()), count)
    rows = zip(*(by_name[name].to_pylist() for name in names), strict=True)
    given = ({name: value for name, value in zip(names, row, strict=True) if value is not None} for row in rows)
    return pa.array([metadata_json(cells) for cells in given], pa.string())


# Decompressed page sizes of a Parquet row group, from the page headers, before any page is read.
#
# pyarrow does not report them, and decompresses complete pages. The positions of the pages are read from the footer
# here too: pyarrow's `RowGroupMetaData.column` ends the process on a damaged footer (an exception of C++ that it does
# not translate). Source: the Apache Parquet format, parquet.thrift (FileMetaData, PageHeader), and Thrift's compact
# protocol, thrift-compact-protocol.md.

HEADER_BYTES = 1 << 12  # a page header has about 30 bytes, more with statistics of long strings
MAX_HEADER_BYTES = 1 << 24
DICTIONARY_PAGE = 2
MAX_NESTING = 16  # of structs and lists in a page header: the format has 3
# Thrift's compact types.
TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12


class CutOff(ValueError):
    """The header is longer than the bytes that were read."""


class ColumnChunk(NamedTuple):
    """Byte range of the pages of one column of one row group."""

    start: int
    end: int


def column_chunks(file: BinaryIO) -> list[list[ColumnChunk]]:
    """The column chunks of each row group, from the footer. Raises ValueError if the footer is damaged."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(size - 8, 0))
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or length + 8 > size:
        raise ValueError("no footer")
    file.seek(size - 8 - length)
    return _chunks_of_footer(file.read(length))


@functools.lru_cache(maxsize=1)  # a worker reads one row group after another of the same file
def _chunks_of_footer(footer: bytes) -> list[list[ColumnChunk]]:
    """Fields by number, as parquet.thrift has them: FileMetaData.row_groups 4, RowGroup.columns 1,
    ColumnChunk.meta_data 3, and of ColumnMetaData total_compressed_size 7, data_page_offset 9, dictionary_page_offset
    11."""
    try:
        groups = _struct(footer, 0, 0)[0][4]
        columns = [[column[3] for column in group[1]] for group in groups]
        return [[_chunk(column[9], column.get(11, 0), column[7]) for column in group] for group in columns]
    except (KeyError, TypeError, AttributeError):
        raise ValueError("the footer lacks the positions of column chunks") from None


def _chunk(data_page: int, dictionary_page: int, size: int) -> ColumnChunk:
    start = dictionary_page if 0 < dictionary_page < data_page else data_page
    return ColumnChunk(start, start + size)


def page_sizes(file: BinaryIO, group: list[ColumnChunk]) -> tuple[int, int]:
    """Return (decompressed bytes of the row group's largest page, of its largest dictionary page).

    An invalid header ends the scan of its column: pyarrow will find the same damage."""
    largest = dictionary = 0
    for position, end in group:
        while position < end:
            try:
                kind, plain, packed, length = _page_header(file, position)
            except ValueError:
                break
            largest = max(largest, plain)
            dictionary = max(dictionary, plain if kind == DICTIONARY_PAGE else 0)
            position += length + packed
    return largest, dictionary


def _page_header(file: BinaryIO, position: int) -> tuple[int, int, int, int]:
    """(type, bytes of the page decompressed, bytes as stored, bytes of the header)."""
    num_bytes = HEADER_BYTES
    while True:
        file.seek(position)
        raw = file.read(num_bytes)
        try:
            fields, length = _struct(raw, 0, 0)
        except CutOff:
            if len(raw) < num_bytes or num_bytes >= MAX_HEADER_BYTES:
                raise
            num_bytes *= 16
            continue
        kind, plain, packed = (fields.get(field, -1) for field in (1, 2, 3))
        if not all(isinstance(value, int) and value >= 0 for value in (kind, plain, packed)):
            raise ValueError("not a page header")
        return kind, plain, packed, length


def _struct(raw: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """(field id -> its value, where the struct ends)."""
    fields: dict[int, Any] = {}
    field = 0
    while True:
        head, at = _byte(raw, at)
        if not head:
            return fields, at
        if head >> 4:
            field += head >> 4
        else:
            field, at = _integer(raw, at)
        fields[field], at = _value(raw, at, head & 15, depth)


def _value(raw: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """(the value, where it ends): integers, lists and structs; None for what no reader here needs."""
    if depth > MAX_NESTING:
        raise ValueError("nested too deep")
    if kind in (TRUE, FALSE):
        return None, at
    if kind == BYTE:
        return None, _byte(raw, at)[1]
    if kind < DOUBLE:
        return _integer(raw, at)
    if kind == DOUBLE:
        return None, at + 8
    if kind == BINARY:
        length, at = _varint(raw, at)
        return None, at + length
    if kind in (LIST, SET):
        return _list(raw, at, depth)
    if kind == STRUCT:
        return _struct(raw, at, depth + 1)
    raise ValueError(f"type {kind} in a page header or footer")


def _list(raw: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    head, at = _byte(raw, at)
    count, kind = head >> 4, head & 15
    if count == 15:
        count, at = _varint(raw, at)
    values = []
    for _ in range(count):
        value, at = (None, at + 1) if kind in (TRUE, FALSE) else _value(raw, at, kind, depth + 1)
        if at > len(raw):
            raise CutOff
        values.append(value)
    return values, at


def _integer(raw: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(raw, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte, at = _byte(raw, at)
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of over 10 bytes")


def _byte(raw: bytes, at: int) -> tuple[int, int]:
    if at >= len(raw):
        raise CutOff
    return raw[at], at + 1
