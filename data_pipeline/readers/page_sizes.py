"""Decompressed page sizes of a Parquet row group, from the page headers, before any page is read.

pyarrow does not report them, and decompresses complete pages. Source: the Apache Parquet format, parquet.thrift
(PageHeader), and Thrift's compact protocol, thrift-compact-protocol.md."""

from typing import Any, BinaryIO

HEADER_BYTES = 1 << 12  # a page header has about 30 bytes, more with statistics of long strings
MAX_HEADER_BYTES = 1 << 24
DICTIONARY_PAGE = 2
MAX_NESTING = 16  # of structs and lists in a page header: the format has 3
# Thrift's compact types.
TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12


class CutOff(ValueError):
    """The header is longer than the bytes that were read."""


def page_sizes(file: BinaryIO, group: Any) -> tuple[int, int]:
    """Return (decompressed bytes of the row group's largest page, of its largest dictionary page).

    group: pyarrow's RowGroupMetaData. An invalid header ends the scan of its column: pyarrow will find the
    same damage."""
    largest = dictionary = 0
    for index in range(group.num_columns):
        column = group.column(index)
        position, first_data = column.data_page_offset, column.dictionary_page_offset
        if column.has_dictionary_page and first_data and 0 < first_data < position:
            position = first_data
        end = position + column.total_compressed_size
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
        if min(kind, plain, packed) < 0:
            raise ValueError("not a page header")
        return kind, plain, packed, length


def _struct(raw: bytes, at: int, depth: int) -> tuple[dict[int, int], int]:
    """(field id -> value of each integer field, where the struct ends)."""
    fields: dict[int, int] = {}
    field = 0
    while True:
        head, at = _byte(raw, at)
        if not head:
            return fields, at
        if head >> 4:
            field += head >> 4
        else:
            field, at = _integer(raw, at)
        value, at = _value(raw, at, head & 15, depth)
        if value is not None:
            fields[field] = value


def _value(raw: bytes, at: int, kind: int, depth: int) -> tuple[int | None, int]:
    """(the value if it is an integer, where it ends)."""
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
        return None, _skip_list(raw, at, depth)
    if kind == STRUCT:
        return None, _struct(raw, at, depth + 1)[1]
    raise ValueError(f"type {kind} in a page header")


def _skip_list(raw: bytes, at: int, depth: int) -> int:
    head, at = _byte(raw, at)
    count, kind = head >> 4, head & 15
    if count == 15:
        count, at = _varint(raw, at)
    for _ in range(count):
        at = at + 1 if kind in (TRUE, FALSE) else _value(raw, at, kind, depth + 1)[1]
        if at > len(raw):
            raise CutOff
    return at


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
