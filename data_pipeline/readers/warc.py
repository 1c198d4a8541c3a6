"""Reader of WARC and WET files; damaged files are read up to the damage.

A record is its WARC header, a blank line, Content-Length bytes and two line ends (WARC 1.1, ISO 28500:2017). Records
without a page (warcinfo, request, metadata, revisit ...) are numbered and skipped; a response that is not HTML is
counted in quarantine."""

import re
from collections.abc import Iterator, Mapping
from typing import BinaryIO

import brotli
from zlib_ng import zlib_ng

from gristmill.data_pipeline.readers.compression import MAX_HEADER_BYTES, ByteStream, Damaged, Malformed, blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, too_large
from gristmill.data_pipeline.readers.source import SourceConfig

HTML_TYPES = ("text/html", "application/xhtml+xml")
MAX_CHUNK_LINE_BYTES = 4096
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
_LENGTH = re.compile(r"[0-9]{1,18}")


def read_warc(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """Read the pages (format warc) or texts (format wet) of the file, each with its URL.

    A record over max_record_bytes is skipped without being held in memory, whatever length its header gives."""
    stream = ByteStream(blocks(file, name))
    limit = source.max_record_bytes
    number = 0
    try:
        while True:
            try:
                header = _header(stream)
            except Malformed as error:
                yield Unreadable(number, "no_warc", str(error), stream.offset)
                number += 1
                header = _next_header(stream)
            if header is None:
                return
            content = read_content(stream, int(header["content-length"]), limit, number)
            if isinstance(content, Unreadable):
                yield content
                if content.kind == "truncated":
                    return
            elif (record := _found(header, content, number, source)) is not None:
                yield record
            number += 1
    except Damaged as damage:
        yield Unreadable(number, damage.kind, f"{damage}; the rest of the file is lost", stream.offset)


def read_responses(file: BinaryIO, name: str, limit: int) -> Iterator[tuple[dict[str, str], int, bytes]]:
    """(WARC header, HTTP status, body) of each response, whatever its content type; of a body of over `limit` bytes its
    beginning. Raises Malformed and Damaged."""
    stream = ByteStream(blocks(file, name))
    while (header := _header(stream)) is not None:
        content = stream.read(int(header["content-length"]))
        if header.get("warc-type") == "response" and "http" in header.get("content-type", ""):
            response = ByteStream(iter((content,)))
            status = response.line().split()
            fields = _fields(response)
            body = _body(response.read(len(content)), fields, limit)
            code = status[1] if len(status) > 1 else b""
            yield header, int(code) if code.isdigit() else 0, body[:limit]


def read_content(stream: ByteStream, length: int, limit: int, number: int) -> bytes | Unreadable:
    """Read `length` bytes; Unreadable if the stream ends before (truncated) or they exceed `limit`
    (record_too_large)."""
    start = stream.offset
    content = stream.read(min(length, limit))
    skipped = stream.skip(length - len(content)) if len(content) == limit else 0
    if len(content) + skipped < length:
        reason = f"record cut off: {len(content) + skipped} of {length} bytes"
        return Unreadable(number, "truncated", reason, start, excerpt(content))
    return too_large(number, length, limit, start, content) if length > limit else content


def _found(header: Mapping[str, str], content: bytes, number: int, source: SourceConfig) -> Record | Unreadable | None:
    if source.format == "wet":
        return _wet(header, content, number, source)
    return page(header, content, number, source.max_record_bytes)


def _next_header(stream: ByteStream) -> dict[str, str] | None:
    """Skip to the next complete header after malformed data; None if there is none."""
    while True:
        try:
            line = stream.line()
            if not line:
                return None
            if line.startswith(b"WARC/"):
                return _with_length(_fields(stream))
        except Malformed:
            stream.skip_line()


def _header(stream: ByteStream) -> dict[str, str] | None:
    """The next record's fields, names in lower case; None at the end. Blank lines before it are skipped."""
    first = stream.line()
    while first in (b"\r\n", b"\n"):
        first = stream.line()
    if not first:
        return None
    if not first.startswith(b"WARC/"):
        hint = "; this is an ARC file, set format: arc" if first.startswith(b"filedesc:") else ""
        raise Malformed(f"not a WARC record: {excerpt(first, 60)!r}{hint}")
    return _with_length(_fields(stream))


def _fields(stream: ByteStream) -> dict[str, str]:
    """Raises Malformed for a header over MAX_HEADER_BYTES or without an end."""
    fields: dict[str, list[str]] = {}
    values: list[str] = []
    start = stream.offset
    while (line := stream.line()) not in (b"\r\n", b"\n"):
        if not line:
            raise Malformed("a header without an end")
        if stream.offset - start > MAX_HEADER_BYTES:
            raise Malformed("a header of over 1 MiB")
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text[:1] in (" ", "\t") and values:  # folded: a continuation of the previous line
            values.append(text.strip())
            continue
        key, _, value = text.partition(":")
        values = fields[key.strip().lower()] = [value.strip()]
    return {key: " ".join(lines) for key, lines in fields.items()}


def _with_length(header: dict[str, str]) -> dict[str, str]:
    value = header.get("content-length", "")
    if not _LENGTH.fullmatch(value):
        raise Malformed(f"a record with Content-Length {excerpt(value, 60)!r}")
    return header


def _wet(header: Mapping[str, str], content: bytes, number: int, source: SourceConfig) -> Record | Unreadable | None:
    if header.get("warc-type") != "conversion":
        return None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return Unreadable(number, "invalid_encoding", f"invalid utf-8 at byte {error.start} of the text", -1)
    language = header.get("warc-identified-content-language", "").split(",")[0] or source.language or ""
    return Record(number, text, url=_address(header), language=language, metadata=_metadata(header))


def page(header: Mapping[str, str], content: bytes, number: int, limit: int) -> Record | Unreadable | None:
    """The HTML page of a response or resource, or an Unreadable; None for a record of another type. limit: maximum
    bytes of the page after decoding its content coding."""
    kind = header.get("warc-type")
    if kind == "resource":
        types, body = header.get("content-type", ""), content
    elif kind == "response" and "http" in header.get("content-type", ""):
        stream = ByteStream(iter((content,)))
        status = stream.line().split()
        try:
            fields = _fields(stream)
            body = _body(stream.read(len(content)), fields, limit)
        except (Malformed, Damaged) as error:
            return Unreadable(number, "bad_response", str(error), -1, excerpt(content))
        if len(status) < 2 or status[1] != b"200":
            said = status[1].decode("ascii", "replace") if len(status) > 1 else "none"
            return Unreadable(number, "not_found", f"HTTP status {said}", -1, _address(header))
        types = fields.get("content-type", "")
    else:
        return None
    if len(body) > limit:
        return too_large(number, None, limit, -1, _address(header))
    media, _, parameters = types.partition(";")
    if media.strip().lower() not in HTML_TYPES:
        return Unreadable(number, "not_html", f"content type {media.strip() or 'not given'!r}", -1, _address(header))
    charset = parameters.lower().partition("charset=")[2].split(";")[0].strip(" \"'") or None
    return Record(number, "", url=_address(header), metadata=_metadata(header), html=body, charset=charset)


def _address(header: Mapping[str, str]) -> str:
    return header.get("warc-target-uri", "").strip("<>")


def _metadata(header: Mapping[str, str]) -> dict[str, str]:
    return {"warc_date": header["warc-date"]} if "warc-date" in header else {}


def _body(body: bytes, fields: Mapping[str, str], limit: int) -> bytes:
    """The body without its transfer and content codings, of which more than `limit` bytes are not undone. Raises
    Damaged if it cannot be decoded."""
    if "chunked" in fields.get("transfer-encoding", "").lower():
        body = _joined_chunks(body)
    coding = fields.get("content-encoding", "").lower().strip()
    try:
        if coding in ("gzip", "x-gzip") and body[:2] == b"\x1f\x8b":
            return zlib_ng.decompressobj(wbits=31).decompress(body, limit + 1)
        if coding == "deflate":
            return zlib_ng.decompressobj(wbits=15 if body[:1] == b"\x78" else -15).decompress(body, limit + 1)
        if coding == "br":
            return _unbrotli(body, limit)
    except (zlib_ng.error, brotli.error) as error:  # type: ignore[misc]  # the stub of zlib_ng names no class
        raise Damaged("damaged", f"damaged {coding} body: {error}") from error
    return body


def _unbrotli(body: bytes, limit: int) -> bytes:
    stream = brotli.Decompressor()
    plain = stream.process(body, output_buffer_limit=limit + 1)
    if not stream.is_finished() and len(plain) <= limit:
        raise brotli.error("it ends too early")
    return plain


def _joined_chunks(body: bytes) -> bytes:
    """The chunks' bytes (RFC 9112, 7.1). A body that is declared chunked but is not is returned unchanged."""
    pieces: list[bytes] = []
    at = 0
    while at < len(body):
        end = body.find(b"\n", at, at + MAX_CHUNK_LINE_BYTES)
        size = body[at:end].split(b";")[0].strip() if end >= 0 else b""
        if not _CHUNK_SIZE.fullmatch(size):
            return b"".join(pieces) if pieces else body
        length = int(size, 16)
        if length == 0:
            break
        pieces.append(body[end + 1 : end + 1 + length])
        at = end + 1 + length
        at += 2 if body[at : at + 2] == b"\r\n" else 1 if body[at : at + 1] == b"\n" else 0
    return b"".join(pieces)


# Reader of ARC files, the Internet Archive's format before WARC; damaged files are read up to the damage.
#
# A record is one line (address, IP, date, content type, length; version 2 has five fields more before the length),
# then as many bytes and a newline. The first record, `filedesc://`, names the version's fields. Source: Internet
# Archive, Arc File Format, version 1.0, 1996.

VERSION_FIELDS = {b"1": 5, b"2": 10}
_DIGITS = re.compile(r"[0-9]{1,18}")
_BLANK = (b"\n", b"\r\n")
# Address, any field, a date of 14 digits (some writers give more), any field: the start of a record, complete or not.
_BEGINS = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*:.* \S+ \d{12,} \S+")


def read_arc(file: BinaryIO, name: str, limit: int) -> Iterator[Record | Unreadable]:
    """Read the HTML pages of the file, each with its URL. Records that are not pages are numbered and counted.

    limit: max_record_bytes of the source; a larger record is skipped without being held in memory."""
    stream, fields, number = ByteStream(blocks(file, name)), VERSION_FIELDS[b"1"], 0
    try:
        line = _next_line(stream)
        while line:
            start = stream.offset
            try:
                header, length = _arc_header(line, fields)
            except Malformed as error:
                yield Unreadable(number, "no_arc", str(error), start - len(line), excerpt(line))
                line = _next_arc_header(stream)
            else:
                content = read_content(stream, length, limit, number)
                if isinstance(content, Unreadable):
                    yield content
                    if content.kind == "truncated":
                        return
                elif header["warc-target-uri"].startswith("filedesc:"):
                    fields = VERSION_FIELDS.get(content[:1], fields)
                elif (record := page(_typed(header, content), content, number, limit)) is not None:
                    yield record
                line = _next_line(stream)
            number += 1
    except Damaged as damage:
        yield Unreadable(number, damage.kind, f"{damage}; the rest of the file is lost", stream.offset)


def _arc_header(line: bytes, fields: int) -> tuple[dict[str, str], int]:
    """Return (the record's URL, date and content type under WARC's names, its length in bytes).

    A URL may hold spaces, so the fields are counted from the right. Raises Malformed if the line is not a header."""
    parts = line.decode("utf-8", "replace").rstrip("\r\n").rsplit(" ", fields - 1)
    if len(parts) < fields or not _DIGITS.fullmatch(parts[2]):
        hint = "; this is a WARC file, set format: warc" if line.startswith(b"WARC/") else ""
        raise Malformed(f"not an ARC record: {excerpt(line, 60)!r}{hint}")
    if not _DIGITS.fullmatch(parts[-1]):
        raise Malformed(f"a record of length {excerpt(parts[-1], 60)!r}")
    return {"warc-target-uri": parts[0], "warc-date": _date(parts[2]), "content-type": parts[3]}, int(parts[-1])


def _typed(header: dict[str, str], content: bytes) -> dict[str, str]:
    """The equivalent WARC header: a response if HTTP headers precede the page, else a resource."""
    if content.startswith(b"HTTP/"):
        return {**header, "warc-type": "response", "content-type": "application/http"}
    return {**header, "warc-type": "resource"}


def _date(digits: str) -> str:
    """20140216050221 -> 2014-02-16T05:02:21Z."""
    year, month, day, hour, minute, second = digits[:4], *(digits[at : at + 2] for at in range(4, 14, 2))
    return f"{year}-{month}-{day}T{hour}:{minute}:{second}Z"


def _next_line(stream: ByteStream) -> bytes:
    """The next line that is not blank; b"" at the end of the file. A line over 1 MiB is replaced by one that is not a
    record header."""
    try:
        line = stream.line()
        while line in _BLANK:
            line = stream.line()
        return line
    except Malformed:
        stream.skip_line()
        return b"a line of over 1 MiB\n"


def _next_arc_header(stream: ByteStream) -> bytes:
    """Skip to the next line that looks like a record header, after malformed data; b"" if there is none."""
    while True:
        try:
            line = stream.line()
            if not line or _BEGINS.match(line):
                return line
        except Malformed:
            stream.skip_line()
