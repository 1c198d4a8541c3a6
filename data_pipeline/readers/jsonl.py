"""JSON lines: one object a line, plain or compressed, a whole file or a range of its bytes."""

from collections.abc import Iterator
from io import BytesIO
from typing import Any, BinaryIO

import orjson

from gristmill.data_pipeline.document import Record, Unreadable, excerpt
from gristmill.data_pipeline.readers.compression import Damaged, blocks, whole_lines
from gristmill.data_pipeline.readers.fields import FieldMap
from gristmill.data_pipeline.readers.source import SourceConfig


def read_jsonl(
    file: BinaryIO, name: str, source: SourceConfig, first_record: int = 0, start: int = 0, end: int | None = None
) -> Iterator[Record | Unreadable]:
    """Every line as a record; lines that are no object, lack the text or are no UTF-8 as Unreadable. Blank lines are
    numbered and passed over. The file is closed behind the last.

    start, end: only the lines that begin in these bytes (plain files; start stands at a line's begin)."""
    number, offset, fields = first_record, start, FieldMap(source)
    record, loads = fields.maker(), orjson.loads
    try:
        if start:
            file.seek(start)
        for piece in whole_lines(blocks(file, name)):
            inside = piece if end is None else _begun_before(piece, end - offset)
            # line after line: of a list of them, the last would have left the processor's cache before it is read
            lines = BytesIO(inside)
            for line in lines:
                try:
                    found: Any = loads(line)
                except orjson.JSONDecodeError as error:
                    if not line.isspace():
                        yield _no_json(line.rstrip(b"\n"), error, number, offset + lines.tell() - len(line))
                else:
                    made = record(found, number)
                    yield made or _refused(found, fields, number, offset + lines.tell() - len(line), line)
                number += 1
            if len(inside) < len(piece):
                return
            offset += len(piece)
    except Damaged as damage:
        yield Unreadable(number, damage.kind, str(damage))
    finally:
        file.close()


def _begun_before(piece: bytes, end: int) -> bytes:
    """The lines of the piece that begin in its first `end` bytes."""
    if end <= 0:
        return b""
    return piece[: piece.find(b"\n", end - 1) + 1 or len(piece)]


def _refused(found: Any, fields: FieldMap, number: int, offset: int, line: bytes) -> Unreadable:
    if type(found) is dict:
        return fields.refused(found, number, offset)
    return Unreadable(number, "no_object", f"a JSON {_kind(found)}, no object", offset, excerpt(line))


def line_starts(file: BinaryIO, size: int, part_bytes: int) -> list[tuple[int, int, int]]:
    """(first record, start, end) of ranges of about part_bytes that begin and end at lines, for a plain file.

    Reads the file once to count its lines: 1 GB takes under a second, its JSON several."""
    parts = []
    first_record = start = position = 0
    count = 0
    while position < size:
        block = file.read(min(part_bytes, 1 << 22))
        if not block:
            break
        cut = block.rfind(b"\n")
        if position + len(block) - start >= part_bytes and cut >= 0:
            end = position + cut + 1
            count += block.count(b"\n", 0, cut + 1)
            parts.append((first_record, start, end))
            first_record, start = first_record + count, end
            count = block.count(b"\n", cut + 1)
        else:
            count += block.count(b"\n")
        position += len(block)
    if start < size:
        parts.append((first_record, start, size))
    return parts


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _no_json(line: bytes, error: orjson.JSONDecodeError, number: int, offset: int) -> Unreadable:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as bad:
        reason = f"invalid UTF-8 at byte {bad.start} of the line"
        return Unreadable(number, "invalid_encoding", reason, offset, excerpt(line))
    return Unreadable(number, "no_json", f"no JSON: {error.msg}", offset, excerpt(line))
