"""Reader of JSON lines: one object per line, plain or compressed, a complete file or a byte range of it."""

from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson

from gristmill.data_pipeline.readers.compression import (
    BLOCK_BYTES,
    LINE_END_BYTES,
    LOOKED_AT_BYTES,
    SUFFIXES,
    UTF8_MARK,
    WIDE_ENCODING,
    Damaged,
    TooLong,
    blocks,
    in_utf8,
    repaired,
    whole_lines,
    wide_encoding,
)
from gristmill.data_pipeline.readers.document import (
    BATCH_BYTES,
    BATCH_RECORDS,
    Record,
    RecordBuilder,
    RecordColumns,
    Unreadable,
    excerpt,
    metadata_json,
    too_large,
)
from gristmill.data_pipeline.readers.json_kernel import (
    ALL_METADATA,
    AT,
    LINE_LEFT,
    MAX_MEMBERS,
    NO_METADATA,
    NUM_PUT,
    NUM_STATE,
    NUM_UNCERTAIN,
    NUMBER,
    ROWS,
    SOME_METADATA,
    LineColumns,
    LineRules,
    Members,
    parse_lines,
)
from gristmill.data_pipeline.readers.source import FieldMap, SourceConfig
from gristmill.data_pipeline.signals.bits import PADDING


def read_jsonl(
    file: BinaryIO, name: str, source: SourceConfig, first_record: int = 0, start: int = 0, end: int | None = None
) -> Iterator[Record | Unreadable]:
    """Read every line as a record; lines that are not objects, have no text, are too large or not UTF-8 are Unreadable.
    Blank lines are numbered and skipped.

    start, end: as of `json_lines`. A file in UTF-16 is converted to UTF-8, and offsets count its UTF-8 bytes."""
    yield from line_records(json_lines(file, name, first_record, start, end), source)


class JsonLines(NamedTuple):
    """Blocks of bytes that begin at a line start. number, offset: of their first line. was_wide: they were converted
    from UTF-16 or UTF-32."""

    stream: Iterator[bytes]
    number: int
    offset: int
    was_wide: bool = False


def json_lines(file: BinaryIO, name: str, first_record: int, start: int, end: int | None) -> JsonLines:
    """The lines from start to end. Of a plain file, both are line starts, and first_record is the number of the first
    line. Of a compressed one they are offsets in its content: the lines that begin between them, counted here."""
    is_plain = name.rpartition(".")[2] not in SUFFIXES
    if is_plain and end is not None:
        return JsonLines(byte_range(file, start, end), first_record, start)
    stream, was_wide = in_utf8(blocks(file, name))
    number, offset = 0, 0
    if start:
        number, offset, stream = _skipped(stream, start)
    return JsonLines(stream if end is None else _up_to(stream, offset, end), number, offset, was_wide)


def _skipped(stream: Iterator[bytes], start: int) -> tuple[int, int, Iterator[bytes]]:
    """(lines before the first one that begins at `start` or behind it, where that begins, the rest of the stream).

    Of a stream that is damaged before, nothing is left: whoever reads up to the damage reports it."""
    lines = position = 0
    with suppress(Damaged):
        for block in stream:
            at = block.find(b"\n", max(start - 1 - position, 0))
            cut = at + 1 or len(block)
            lines += block.count(b"\n", 0, cut)
            position += cut
            if at >= 0:
                return lines, position, chain((block[cut:],), stream)
    return lines, position, iter(())


def _up_to(stream: Iterator[bytes], offset: int, end: int) -> Iterator[bytes]:
    """The stream, which begins with a line at `offset`, up to the last line that begins before `end`."""
    if offset >= end:
        return
    for block in stream:
        at = block.find(b"\n", max(end - 1 - offset, 0))
        if at >= 0:
            yield block[: at + 1]
            return
        yield block
        offset += len(block)


def line_records(lines: JsonLines, source: SourceConfig) -> Iterator[Record | Unreadable]:
    for record in _records(lines.stream, source, lines.number, lines.offset):
        yield record.repaired(WIDE_ENCODING) if lines.was_wide and isinstance(record, Record) else record


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
                if (record := line_record(line, fields, number, offset)) is not None:
                    yield record
                    del record  # so that two lines' objects are never in memory at once
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
        record: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _repaired(line, error, fields, number, offset)
    return fields.maker()(record, number) or _refused(record, fields, number, offset, line)


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
        fixed, repairs = repaired(line)
    except UnicodeDecodeError as bad:
        reason = f"invalid UTF-8 at byte {bad.start} of the line"
        return Unreadable(number, "invalid_encoding", reason, offset, excerpt(line))
    except ValueError:
        return Unreadable(number, "invalid_json", f"invalid JSON: {error.msg}", offset, excerpt(line))
    made = fields.maker()(fixed, number)
    return _refused(fixed, fields, number, offset, line) if made is None else made.repaired(*repairs)


def _refused(parsed: Any, fields: FieldMap, number: int, offset: int, line: bytes) -> Unreadable:
    if type(parsed) is dict:
        return fields.refused(parsed, number, offset)
    return Unreadable(number, "no_object", f"the line is a JSON {_kind(parsed)}, not an object", offset, excerpt(line))


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


def new_members() -> Members:
    return Members(
        np.empty((MAX_MEMBERS, 4), np.int64), np.empty(MAX_MEMBERS, np.int64), np.empty(MAX_MEMBERS, np.int64)
    )


# Reader of JSON lines into columns: a kernel reads plain lines, readers/jsonl.py the others, one at a time.


class JsonColumns:
    """Adds the lines of a file to a builder. number, offset: of the next line."""

    def __init__(self, builder: RecordBuilder, source: SourceConfig, number: int, offset: int):
        self._builder = builder
        self._fields = FieldMap(source)
        self._limit = source.max_record_bytes
        self._rules = line_rules(source)
        self._members, self._state = new_members(), np.zeros(NUM_STATE, np.int64)
        self._line_starts, self._is_uncertain = np.zeros(BATCH_RECORDS, np.int64), np.zeros(BATCH_RECORDS, np.bool_)
        self._number, self._offset = number, offset

    def read(self, stream: Iterator[bytes]) -> Iterator[RecordColumns]:
        """Yields the builder's records whenever it is full; the last ones stay in it."""
        try:
            for piece in whole_lines(stream, self._limit + LINE_END_BYTES):
                if isinstance(piece, TooLong):
                    self._builder.add(too_large(self._number, piece.num_bytes, self._limit, self._offset))
                    self._number += 1
                    self._offset += piece.num_bytes
                    if self._builder.is_full:
                        yield self._builder.take()
                else:
                    yield from self._read_piece(piece)
        except Damaged as damage:
            self._builder.add(Unreadable(self._number, damage.kind, str(damage)))

    def _read_piece(self, piece: bytes) -> Iterator[RecordColumns]:
        padded = np.empty(len(piece) + PADDING, np.uint8)
        padded[: len(piece)] = np.frombuffer(piece, np.uint8)
        padded[len(piece) :] = 0
        at = 0
        while at < len(piece):
            outcome, at = self._parse(padded, piece, at)
            if outcome == LINE_LEFT:
                end = piece.find(b"\n", at) + 1 or len(piece)
                record = line_record(piece[at:end], self._fields, self._number, self._offset + at)
                if record is not None:
                    self._builder.add(record)
                    del record
                self._number += 1
                at = end
            if self._builder.is_full:
                yield self._builder.take()
        self._offset += len(piece)

    def _parse(self, padded: np.ndarray, piece: bytes, at: int) -> tuple[int, int]:
        """Run the kernel from `at` on; returns its outcome and where it ended."""
        builder, state = self._builder, self._state
        first, left = builder.rows, len(piece) - at
        for column in builder.columns:
            column.reserve(first, left + BATCH_RECORDS * len(self._rules.default_language))
        state[AT], state[ROWS], state[NUMBER], state[NUM_UNCERTAIN] = at, first, self._number, 0
        state[NUM_PUT:] = [column.offsets[first] for column in builder.columns]
        columns = LineColumns(
            tuple(column.data for column in builder.columns),
            tuple(column.offsets for column in builder.columns),
            builder.numbers,
            self._line_starts,
            self._is_uncertain,
        )
        outcome = parse_lines(padded, len(piece), self._rules, columns, self._members, state)
        builder.rows, at, self._number = int(state[ROWS]), int(state[AT]), int(state[NUMBER])
        if not state[NUM_UNCERTAIN]:
            return outcome, at
        for row in (first + np.flatnonzero(self._is_uncertain[first : builder.rows])).tolist():
            if not self._set_metadata(row):
                builder.rows, self._number = row, int(builder.numbers[row])
                return LINE_LEFT, int(self._line_starts[row])
        return outcome, at

    def _set_metadata(self, row: int) -> bool:
        """Parse the metadata that the kernel left to orjson; False if it is not JSON."""
        column = self._builder.metadata
        start, end = column.offsets[row : row + 2].tolist()
        try:
            members = orjson.loads(column.data[start:end].data)
        except orjson.JSONDecodeError:
            return False
        self._builder.change_metadata(row, metadata_json(self._fields.metadata_of(members)).encode())
        return True


def read_json_columns(
    file: BinaryIO, name: str, source: SourceConfig, byte_bounds: tuple[int, int, int | None], builder: RecordBuilder
) -> Iterator[RecordColumns]:
    """jsonl.read_jsonl, as columns. byte_bounds: (number of the first record, start, end), as there.

    Yields the builder's records whenever it is full; the last ones stay in it."""
    lines = json_lines(file, name, *byte_bounds)
    if not lines.was_wide:
        yield from JsonColumns(builder, source, lines.number, lines.offset).read(lines.stream)
        return
    for record in line_records(lines, source):
        builder.add(record)
        if builder.is_full:
            yield builder.take()


def line_rules(source: SourceConfig) -> LineRules:
    """The rules of the kernel. Where one name stands for two fields, no line has a text for the kernel, which leaves
    them all."""
    names = [source.text_field, source.url_field, source.language_field]
    given = [b"" if name is None else name.encode("utf-8", "surrogatepass") for name in names]
    ends = np.cumsum([len(name) for name in given])
    ends[[name is None for name in names]] = -1
    if len(set(names) - {None}) < 3 - names.count(None):
        ends[0] = -1
    kinds = {"all": ALL_METADATA, "none": NO_METADATA}
    metadata = source.metadata_fields
    return LineRules(
        _array(b"".join(given)),
        ends,
        _array((source.language or "").encode()),
        kinds[metadata] if isinstance(metadata, str) else SOME_METADATA,
        source.max_record_bytes,
        BATCH_RECORDS,
        BATCH_BYTES,
    )


def _array(content: bytes) -> np.ndarray:
    return np.array(list(content), np.uint8)
