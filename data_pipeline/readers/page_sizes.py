"""Decompressed page sizes of a Parquet row group, from the page headers, before any page is read.

pyarrow does not report them, and decompresses complete pages. The positions of the pages are read from the footer here
too: pyarrow's `RowGroupMetaData.column` ends the process on a damaged footer (an exception of C++ that it does not
translate). Source: the Apache Parquet format, parquet.thrift (FileMetaData, PageHeader), and Thrift's compact protocol,
thrift-compact-protocol.md."""

import functools
import io
from typing import Any, BinaryIO, NamedTuple

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
