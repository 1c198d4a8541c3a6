"""Readers of text files: text and Markdown (one document per file, paragraph or line), CSV and TSV, mail."""

import codecs
import csv
import email
import email.policy
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from email.message import EmailMessage
from io import BytesIO
from typing import Any, BinaryIO, NamedTuple

from gristmill.data_pipeline.readers.compression import (
    BYTE_ORDER_MARK,
    LINE_END_BYTES,
    SUFFIXES,
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
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, first_line, too_large
from gristmill.data_pipeline.readers.source import FieldMap, SourceConfig
from gristmill.foundation.startup import DeferredModule

_BLANK_LINE = re.compile(rb"[ \t]*\r?\n")
_SPACE = b" \t\n\r\f\v"
GUESSED_BYTES = 1 << 16  # of text that is not in its source's encoding
# Only some files need them.
html_extraction = DeferredModule("gristmill.data_pipeline.extraction.html_extraction")
blocks_extractor = DeferredModule("gristmill.data_pipeline.extraction.blocks")


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
            place = f"invalid {encoding} at byte {offset + error.start}"
            reason = f"{place}; set encoding of source {source.name}, {_looks_like(raw)}"
            return Unreadable(number, "invalid_encoding", reason, offset, excerpt(raw[error.start :]))
        text, repairs = decoded, (SURROGATES,)
    if text.startswith("\ufeff"):
        text, repairs = text[1:], (BYTE_ORDER_MARK, *repairs)
    return Record(number, text, language=source.language or "", repairs=repairs)


def _looks_like(raw: bytes) -> str:
    return f"its bytes look like {html_extraction.guessed_charset(raw[:GUESSED_BYTES])}"


def _surrogates_passed(raw: bytes) -> str | None:
    """The text if encoded surrogates are its only invalid UTF-8, else None."""
    try:
        return without_surrogates(raw.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return None


# Reader of CSV and TSV files: the first row names the fields, each later row is a record.


DELIMITERS = ",;\t|"


def read_delimited(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """Reads one record per row (RFC 4180: quoted cells may hold delimiters and line ends). The delimiter is the tab of
    a .tsv, else the most frequent of , ; tab | in the first row. Empty cells are no fields.

    A row that is not UTF-8, has more cells than the first, or is over max_record_bytes is Unreadable by itself."""
    csv.field_size_limit(max(csv.field_size_limit(), source.max_record_bytes))
    fields, number = FieldMap(source), 0
    stream = blocks(file, name)
    if codecs.lookup(source.encoding).name not in ("utf-8", "utf-8-sig"):
        stream = transcoded(stream, source.encoding)
    lines = _Lines(stream, source.max_record_bytes)
    try:
        header = next(lines, "")
        delimiter = delimiter_of(header, name)
        names = next(csv.reader([header], delimiter=delimiter), [])
        rows = csv.reader(lines, delimiter=delimiter)
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Unreadable(number, "bad_row", f"not a row of a CSV file: {error}", lines.offset)
                rows = csv.reader(lines, delimiter=delimiter)
            else:
                if lines.too_long:
                    yield too_large(number, lines.too_long, source.max_record_bytes, lines.offset)
                    lines.too_long = 0
                elif (size := sum(map(len, cells))) > source.max_record_bytes:
                    yield too_large(number, size, source.max_record_bytes, lines.offset)
                elif cells:
                    yield _row_record(cells, names, fields, number, lines.offset)
            number += 1
    except Damaged as damage:
        yield Unreadable(number, damage.kind, str(damage), lines.offset)


def _row_record(cells: list[str], names: list[str], fields: FieldMap, number: int, offset: int) -> Record | Unreadable:
    quoted_cells = excerpt(" ".join(cells))
    if any("\udc80" <= character <= "\udcff" for cell in cells for character in cell):
        seen = _looks_like(" ".join(cells).encode("utf-8", "surrogateescape"))
        reason = f"invalid utf-8 in this row; set encoding of the source, {seen}"
        return Unreadable(number, "invalid_encoding", reason, offset, quoted_cells)
    if len(cells) > len(names):
        reason = f"{len(cells)} cells, and the first row names {len(names)} fields; quote cells that hold a delimiter"
        return Unreadable(number, "bad_row", reason, offset, quoted_cells)
    return fields.record({key: cell for key, cell in zip(names, cells, strict=False) if cell}, number, offset)


def delimiter_of(header: str, name: str) -> str:
    """The delimiter of a file by its name and first row."""
    if any(part == "tsv" for part in name.lower().split(".")[-2:] if part not in SUFFIXES):
        return "\t"
    counts = Counter(character for character in header if character in DELIMITERS)
    return max(DELIMITERS, key=lambda delimiter: (counts[delimiter], -DELIMITERS.index(delimiter)))


class _Lines(Iterator[str]):
    """Lines of text with their ends; bytes that are not UTF-8 are lone surrogates. A line over the limit is empty, and
    too_long holds its size until the reader resets it. offset: bytes of UTF-8 read."""

    def __init__(self, stream: Iterator[bytes], limit: int):
        narrow, _ = in_utf8(stream)
        self._lines = self._split(whole_lines(narrow, limit))
        self.too_long = self.offset = 0

    def __next__(self) -> str:
        return next(self._lines)

    def _split(self, pieces: Iterator[bytes | TooLong]) -> Iterator[str]:
        is_first = True
        for piece in pieces:
            if isinstance(piece, TooLong):
                self.too_long = piece.num_bytes
                self.offset += piece.num_bytes
                yield '""\n'
                continue
            for line in piece.splitlines(keepends=True):
                self.offset += len(line)
                text = line.decode("utf-8", "surrogateescape")
                yield text.removeprefix("\ufeff") if is_first else text
                is_first = False


# Reader of mail: mbox files (RFC 4155), and files of one message (RFC 5322, .eml).


SIGNATURE = "-- "  # the line before that of a message
SEPARATOR = b"From "  # at the beginning of a line behind an empty one
_CHARSETS_OF_MAIL = re.compile(r"utf-?7|(?:cp|ibm)-?\d+|iso-?2022-?(?:kr|cn).*")
_ESCAPED_SEPARATOR = re.compile(rb">{1,100}From ")  # of a message's own line, by one more ">" (the form mboxrd)


def read_mailbox(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """Reads the plain text of each message, or the main text of its HTML where it has no plain text; attachments are
    left out. Metadata: subject and date; addresses of persons are not kept."""
    number = 0
    try:
        for offset, raw, num_bytes in _messages(whole_lines(blocks(file, name), source.max_record_bytes), source):
            if num_bytes > source.max_record_bytes:
                yield too_large(number, num_bytes, source.max_record_bytes, offset, raw)
            else:
                record = _message_record(raw, number, offset, source)
                if record is not None:
                    yield record
            number += 1
    except Damaged as damage:
        yield Unreadable(number, damage.kind, str(damage))


def _messages(pieces: Iterator[bytes | TooLong], source: SourceConfig) -> Iterator[tuple[int, bytes, int]]:
    """(offset, bytes, size) of each message; of one over the limit the first bytes alone."""
    message, limit = bytearray(), source.max_record_bytes
    start = offset = size = 0
    after_blank, is_mailbox = True, False
    for piece in pieces:
        for line in [b""] if isinstance(piece, TooLong) else piece.splitlines(keepends=True):
            num_bytes = piece.num_bytes if isinstance(piece, TooLong) else len(line)
            if after_blank and line.startswith(SEPARATOR):
                if size:
                    yield start, bytes(message), size
                message, start, size, is_mailbox = bytearray(), offset, 0, True
            else:
                if is_mailbox and _ESCAPED_SEPARATOR.match(line):
                    line = line[1:]
                size += num_bytes
                if size <= limit:
                    message += line
            after_blank = not line.strip()
            offset += num_bytes
    if size:
        yield start, bytes(message), size


def _message_record(raw: bytes, number: int, offset: int, source: SourceConfig) -> Record | Unreadable | None:
    try:
        message: Any = email.message_from_bytes(raw, policy=email.policy.default)
        text, repairs = _message_text(message, source)
        metadata = {key: str(message[key]) for key in ("subject", "date") if message[key]}
    except Exception as error:  # the package raises many kinds for malformed headers, charsets and encodings
        reason = f"not a message that Python's email package reads ({first_line(error)})"
        return Unreadable(number, "bad_message", reason, offset, excerpt(raw))
    if not text.strip():
        return None
    return Record(number, text, language=source.language or "", metadata=metadata, repairs=repairs)


def _message_text(message: EmailMessage, source: SourceConfig) -> tuple[str, tuple[str, ...]]:
    """(the text, names of repairs). A charset that is missing, unknown or contradicted by the bytes is found as that of
    pages is."""
    part: Any = message.get_body(("plain", "html"))
    if part is None:
        return "", ()
    content, charset = part.get_payload(decode=True) or b"", part.get_content_charset()
    content, charset = _in_charset_of_pages(content, None if charset == "us-ascii" else charset)
    if part.get_content_type() == "text/html":
        try:
            page = html_extraction.extract_page(content, charset, "blocks", source.blocks, None)
        except html_extraction.NotExtracted:  # of a few words, or of a table for the layout: all of it is the message
            decoded = html_extraction.decode_html(content, charset)
            return blocks_extractor.whole_text(decoded.text.encode("utf-8", "replace"), source.blocks), ()
        return page.text, page.repairs
    decoded = html_extraction.decode_html(content, charset)
    text = decoded.text.replace("\r\n", "\n").strip("\n")
    if str(part.get_param("format", "")).lower() == "flowed":
        text = _joined_flow(text, str(part.get_param("delsp", "")).lower() == "yes")
    return text, (html_extraction.REPLACED_BYTES,) if decoded.was_repaired else ()


def _joined_flow(text: str, drops_space: bool) -> str:
    """The paragraphs of a text whose lines end with a space where they go on in the next of the same depth of quotes
    (RFC 3676). drops_space: that space belongs to no word."""
    paragraphs: list[list[str]] = []
    open_depth = -1
    for line in text.split("\n"):
        content = line.lstrip(">")
        depth = len(line) - len(content)
        content = content.removeprefix(" ")
        goes_on = content.endswith(" ") and content != SIGNATURE
        if depth != open_depth or content == SIGNATURE:
            paragraphs.append(["> " * depth])
        paragraphs[-1].append(content[:-1] if goes_on and drops_space else content)
        open_depth = depth if goes_on else -1
    return "\n".join("".join(parts) for parts in paragraphs)


def _in_charset_of_pages(content: bytes, charset: str | None) -> tuple[bytes, str | None]:
    """The content, in UTF-8 if it is in a charset that mails have and pages do not."""
    if charset is not None and _CHARSETS_OF_MAIL.fullmatch(charset):
        with suppress(LookupError, ValueError):
            return content.decode(charset).encode(), "utf-8"
    return content, charset
