"""Text and Markdown files: a document is the file, a paragraph or a line."""

import re
from collections.abc import Iterator
from typing import BinaryIO

from gristmill.data_pipeline.document import Record, Unreadable, excerpt
from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.source import SourceConfig


def read_plain(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """The file's documents; pieces that hold no text are numbered and passed over.

    Bytes that are not of the source's encoding make the piece Unreadable. Where a file is cut off, the pieces
    before the cut are read, then the rest is one Unreadable (with record: file, all of it)."""
    raw, damage = _whole(file, name)
    if source.record == "file":
        if damage is None:
            yield _piece(raw, 0, 0, source)
        else:
            yield Unreadable(0, damage.kind, str(damage), 0, excerpt(raw))
        return
    pieces = list(_pieces(raw, source))
    if damage is not None:  # the piece before the damage may be half of one
        offset, piece = pieces.pop()
    for number, (start, whole) in enumerate(pieces):
        if whole.strip():
            yield _piece(whole, number, start, source)
    if damage is not None:
        yield Unreadable(len(pieces), damage.kind, str(damage), offset, excerpt(piece))


def _whole(file: BinaryIO, name: str) -> tuple[bytes, Damaged | None]:
    """Everything that can be read, and what stopped it."""
    held: list[bytes] = []
    try:
        for block in blocks(file, name):
            held.append(block)
    except Damaged as damage:
        return b"".join(held), damage
    return b"".join(held), None


def _pieces(raw: bytes, source: SourceConfig) -> Iterator[tuple[int, bytes]]:
    """(offset, piece). Cutting is done on bytes, so one bad byte spoils its own piece alone."""
    separator = re.compile(rb"\r?\n") if source.record == "line" else re.compile(rb"\r?\n[ \t]*\r?\n\s*")
    start = 0
    for found in separator.finditer(raw):
        yield start, raw[start : found.start()]
        start = found.end()
    yield start, raw[start:]


def _piece(raw: bytes, number: int, offset: int, source: SourceConfig) -> Record | Unreadable:
    try:
        text = raw.decode(source.encoding)
    except UnicodeDecodeError as error:
        reason = f"invalid {source.encoding} at byte {offset + error.start}; set encoding of source {source.name}"
        return Unreadable(number, "invalid_encoding", reason, offset, excerpt(raw[error.start :]))
    return Record(number, text.removeprefix("\ufeff"), language=source.language or "")
