"""Reader of JSON lines: one object per line, plain or compressed, a complete file or a byte range of it."""

from collections.abc import Iterator
from io import BytesIO
from typing import Any, BinaryIO

import orjson

from gristmill.data_pipeline.readers.compression import (
    BLOCK_BYTES,
    LINE_END_BYTES,
    Damaged,
    TooLong,
    blocks,
    whole_lines,
)
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, too_large
from gristmill.data_pipeline.readers.encodings import LOOKED_AT_BYTES, UTF8_MARK, WIDE_ENCODING, in_utf8, wide_encoding
from gristmill.data_pipeline.readers.fields import FieldMap
from gristmill.data_pipeline.readers.json_repair import repaired
from gristmill.data_pipeline.readers.source import SourceConfig


def read_jsonl(
    file: BinaryIO, name: str, source: SourceConfig, first_record: int = 0, start: int = 0, end: int | None = None
) -> Iterator[Record | Unreadable]:
    """Read every line as a record; lines that are not objects, have no text, are too large or not UTF-8 are Unreadable.
    Blank lines are numbered and skipped.

    start, end: only these bytes of a plain file; both are line starts. A file in UTF-16 is converted to UTF-8, and
    offsets count its UTF-8 bytes."""
    if end is not None:
        yield from _records(byte_range(file, start, end), source, first_record, start)
        return
    stream, was_wide = in_utf8(blocks(file, name))
    yield from wide_records(stream, source) if was_wide else _records(stream, source, first_record, 0)


def wide_records(stream: Iterator[bytes], source: SourceConfig) -> Iterator[Record | Unreadable]:
    """The records of a file in UTF-16 or UTF-32 that was converted to UTF-8."""
    for found in _records(stream, source, 0, 0):
        yield found.repaired(WIDE_ENCODING) if isinstance(found, Record) else found


def _records(stream: Iterator[bytes], source: SourceConfig, number: int, offset: int) -> Iterator[Record | Unreadable]:
    fields, limit = FieldMap(source), source.max_record_bytes
    try:
        for piece in whole_lines(stream, limit + LINE_END_BYTES):
            if isinstance(piece, TooLong):
                yield too_large(number, piece.num_bytes, limit, offset)
                number += 1
                offset += piece.num_bytes
                continue
            # one line at a time: in a list of lines, the last would have left the CPU cache before it is parsed
            for line in BytesIO(piece):
                if (found := line_record(line, fields, number, offset)) is not None:
                    yield found
                    del found  # so that two lines' objects are never in memory at once
                number += 1
                offset += len(line)
    except Damaged as damage:
        yield Unreadable(number, damage.kind, str(damage))


def line_record(line: bytes, fields: FieldMap, number: int, offset: int) -> Record | Unreadable | None:
    """The record of a line with its line end; None for a blank line."""
    limit = fields.source.max_record_bytes
    if len(line) > limit and len(line.rstrip(b"\r\n")) > limit:
        return too_large(number, len(line), limit, offset, line)
    try:
        found: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _repaired(line, error, fields, number, offset)
    return fields.maker()(found, number) or _refused(found, fields, number, offset, line)


def byte_range(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """These bytes of the file, in blocks."""
    file.seek(start)
    while start < end and (block := file.read(min(BLOCK_BYTES, end - start))):
        yield block
        start += len(block)


def _repaired(
    line: bytes, error: orjson.JSONDecodeError, fields: FieldMap, number: int, offset: int
) -> Record | Unreadable | None:
    """The record of a line that is not valid JSON, after repair, or an Unreadable; None for a blank line."""
    if not line.removeprefix(UTF8_MARK).strip():
        return None
    try:
        found, repairs = repaired(line)
    except UnicodeDecodeError as bad:
        reason = f"invalid UTF-8 at byte {bad.start} of the line"
        return Unreadable(number, "invalid_encoding", reason, offset, excerpt(line))
    except ValueError:
        return Unreadable(number, "invalid_json", f"invalid JSON: {error.msg}", offset, excerpt(line))
    made = fields.maker()(found, number)
    return _refused(found, fields, number, offset, line) if made is None else made.repaired(*repairs)


def _refused(found: Any, fields: FieldMap, number: int, offset: int, line: bytes) -> Unreadable:
    if type(found) is dict:
        return fields.refused(found, number, offset)
    return Unreadable(number, "no_object", f"the line is a JSON {_kind(found)}, not an object", offset, excerpt(line))


def line_starts(file: BinaryIO, range_bytes: int) -> list[tuple[int, int, int]]:
    """Return (first record, start, end) of ranges of about range_bytes that start and end at line starts; plain files.

    Reads the file once to count its lines: 1 GB takes under a second, parsing it takes several. Empty for UTF-16,
    where a line end has two bytes."""
    ranges: list[tuple[int, int, int]] = []
    first_record = start = position = 0
    count = 0
    while block := file.read(min(range_bytes, 1 << 22)):
        if not position and wide_encoding(block[:LOOKED_AT_BYTES]) is not None:
            return []
        cut = block.rfind(b"\n")
        if position + len(block) - start >= range_bytes and cut >= 0:
            end = position + cut + 1
            count += block.count(b"\n", 0, cut + 1)
            ranges.append((first_record, start, end))
            first_record, start = first_record + count, end
            count = block.count(b"\n", cut + 1)
        else:
            count += block.count(b"\n")
        position += len(block)
    if start < position:
        ranges.append((first_record, start, position))
    return ranges


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
