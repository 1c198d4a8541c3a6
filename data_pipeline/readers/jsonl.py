"""JSON lines: one object a line, plain or compressed, a whole file or a range of its bytes."""

from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson

from gristmill.data_pipeline.document import Record, Unreadable, excerpt
from gristmill.data_pipeline.readers.compression import Damaged, blocks, lines
from gristmill.data_pipeline.readers.fields import FieldMap
from gristmill.data_pipeline.readers.source import SourceConfig


def read_jsonl(
    file: BinaryIO, name: str, source: SourceConfig, first_record: int = 0, start: int = 0, end: int | None = None
) -> Iterator[Record | Unreadable]:
    """Every line as a record; lines that are no object, lack the text or are no UTF-8 as Unreadable. Blank lines are
    numbered and passed over.

    start, end: only the lines that begin in these bytes (plain files; start stands at a line's begin)."""
    number, fields = first_record, FieldMap(source)
    if start:
        file.seek(start)
    try:
        for offset, line in lines(blocks(file, name)):
            if end is not None and start + offset >= end:
                return
            if line and not line.isspace():
                try:
                    found: Any = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    yield Unreadable(number, *_kind_and_reason(line, error), start + offset, excerpt(line))
                else:
                    yield (
                        fields.record(found, number, start + offset)
                        if type(found) is dict
                        else Unreadable(
                            number, "no_object", f"a JSON {_kind(found)}, no object", start + offset, excerpt(line)
                        )
                    )
            number += 1
    except Damaged as damage:
        yield Unreadable(number, damage.kind, str(damage))


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


def _kind_and_reason(line: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as bad:
        return "invalid_encoding", f"invalid UTF-8 at byte {bad.start} of the line"
    return "no_json", f"no JSON: {error.msg}"
