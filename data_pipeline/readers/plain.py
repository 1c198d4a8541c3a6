"""Reader of text and Markdown files: one document per file, paragraph or line."""

import codecs
import re
from collections.abc import Iterator
from io import BytesIO
from typing import BinaryIO, NamedTuple

from gristmill.data_pipeline.readers.compression import (
    BYTE_ORDER_MARK,
    LINE_END_BYTES,
    SURROGATES,
    WIDE_ENCODING,
    Damaged,
    TooLong,
    blocks,
    in_utf8,
    transcoded,
    whole_lines,
    without_surrogates,
)
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, too_large
from gristmill.data_pipeline.readers.source import SourceConfig

_BLANK_LINE = re.compile(rb"[ \t]*\r?\n")
_SPACE = b" \t\n\r\f\v"


class RawPiece(NamedTuple):
    """A piece of the file at `offset`. raw is b"" if num_bytes is over the limit."""

    offset: int
    raw: bytes
    num_bytes: int


def read_plain(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """Read the file's documents; pieces without text are numbered and skipped.

    Bytes that are invalid in the source's encoding make the piece Unreadable, and so does a size over max_record_bytes.
    Of a truncated file, the complete pieces are read, then the rest is one Unreadable (with record: file, all of it).
    A file in UTF-16 is converted to UTF-8, and offsets count its UTF-8 bytes."""
    stream, encoding, was_wide = _in_narrow_encoding(blocks(file, name), source)
    split = {"file": _whole, "line": _lines, "paragraph": _paragraphs}[source.record]
    number = offset = 0
    try:
        for piece in split(stream, source.max_record_bytes):
            document = _document(piece, number, encoding, source)
            if document is not None:
                yield document.repaired(WIDE_ENCODING) if was_wide and isinstance(document, Record) else document
            number, offset = number + 1, piece.offset + piece.num_bytes
    except Damaged as damage:
        yield Unreadable(number, damage.kind, str(damage), offset)


def _in_narrow_encoding(stream: Iterator[bytes], source: SourceConfig) -> tuple[Iterator[bytes], str, bool]:
    """Return (the text in an encoding with one-byte line ends, that encoding, whether UTF-16 was detected)."""
    encoding = codecs.lookup(source.encoding).name
    if encoding in ("utf-8", "utf-8-sig"):
        stream, was_wide = in_utf8(stream)
        return stream, "utf-8", was_wide
    if encoding.startswith(("utf-16", "utf-32")):
        return transcoded(stream, encoding), "utf-8", False
    return stream, source.encoding, False


def _whole(stream: Iterator[bytes], limit: int) -> Iterator[RawPiece]:
    piece = _Held(0, limit)
    for block in stream:
        piece.add(block, len(block))
    yield piece.piece()


def _lines(stream: Iterator[bytes], limit: int) -> Iterator[RawPiece]:
    for line in _ended_lines(stream, limit):
        yield RawPiece(line.offset, _without_line_end(line.raw), line.num_bytes)


def _paragraphs(stream: Iterator[bytes], limit: int) -> Iterator[RawPiece]:
    """Split at blank lines; white space after them is dropped."""
    paragraph = _Held(0, limit)
    between = False
    for line in _ended_lines(stream, limit):
        if between:
            text = line.raw.lstrip(_SPACE)
            if line.raw and not text:
                continue
            gone = len(line.raw) - len(text)
            line = RawPiece(line.offset + gone, text, line.num_bytes - gone)
            paragraph, between = _Held(line.offset, limit), False
        elif paragraph.num_bytes and _BLANK_LINE.fullmatch(line.raw):
            yield paragraph.piece(without_line_end=True)
            paragraph, between = _Held(line.offset + line.num_bytes, limit), True
            continue
        paragraph.add(line.raw, line.num_bytes)
    if paragraph.num_bytes:
        yield paragraph.piece()


def _ended_lines(stream: Iterator[bytes], limit: int) -> Iterator[RawPiece]:
    """Lines with their line ends."""
    offset = 0
    for piece in whole_lines(stream, limit + LINE_END_BYTES):
        if isinstance(piece, TooLong):
            yield RawPiece(offset, b"", piece.num_bytes)
            offset += piece.num_bytes
        else:
            for line in BytesIO(piece):
                yield RawPiece(offset, line, len(line))
                offset += len(line)


def _without_line_end(raw: bytes) -> bytes:
    return raw.removesuffix(b"\n").removesuffix(b"\r") if raw.endswith(b"\n") else raw


class _Held:
    """Accumulates a piece; its content is dropped once it is over the limit."""

    def __init__(self, offset: int, limit: int):
        self._offset, self._limit = offset, limit
        self._parts: list[bytes] = []
        self.num_bytes = 0

    def add(self, raw: bytes, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self._limit + LINE_END_BYTES:
            self._parts = []
        else:
            self._parts.append(raw)

    def piece(self, without_line_end: bool = False) -> RawPiece:
        raw = b"".join(self._parts)
        return RawPiece(self._offset, _without_line_end(raw) if without_line_end else raw, self.num_bytes)


def _document(piece: RawPiece, number: int, encoding: str, source: SourceConfig) -> Record | Unreadable | None:
    """None for a piece without text."""
    offset, raw, num_bytes = piece
    limit = source.max_record_bytes
    if len(raw) > limit or (not raw and num_bytes > limit):
        return too_large(number, len(raw) or num_bytes, limit, offset, raw)
    if source.record != "file" and not raw.strip():
        return None
    repairs: tuple[str, ...] = ()
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        decoded = _surrogates_passed(raw) if encoding == "utf-8" else None
        if decoded is None:
            reason = f"invalid {encoding} at byte {offset + error.start}; set encoding of source {source.name}"
            return Unreadable(number, "invalid_encoding", reason, offset, excerpt(raw[error.start :]))
        text, repairs = decoded, (SURROGATES,)
    if text.startswith("\ufeff"):
        text, repairs = text[1:], (BYTE_ORDER_MARK, *repairs)
    return Record(number, text, language=source.language or "", repairs=repairs)


def _surrogates_passed(raw: bytes) -> str | None:
    """The text if encoded surrogates are its only invalid UTF-8, else None."""
    try:
        return without_surrogates(raw.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return None
