"""Reader of ARC files, the Internet Archive's format before WARC; damaged files are read up to the damage.

A record is one line (address, IP, date, content type, length; version 2 has five fields more before the length), then
as many bytes and a newline. The first record, `filedesc://`, names the version's fields. Source: Internet Archive, Arc
File Format, version 1.0, 1996."""

import re
from collections.abc import Iterator
from typing import BinaryIO

from gristmill.data_pipeline.readers.byte_stream import ByteStream, Malformed
from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt
from gristmill.data_pipeline.readers.warc import page, read_content

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
                header, length = _header(line, fields)
            except Malformed as error:
                yield Unreadable(number, "no_arc", str(error), start - len(line), excerpt(line))
                line = _next_header(stream)
            else:
                content = read_content(stream, length, limit, number)
                if isinstance(content, Unreadable):
                    yield content
                    if content.kind == "truncated":
                        return
                elif header["warc-target-uri"].startswith("filedesc:"):
                    fields = VERSION_FIELDS.get(content[:1], fields)
                elif (found := page(_typed(header, content), content, number, limit)) is not None:
                    yield found
                line = _next_line(stream)
            number += 1
    except Damaged as damage:
        yield Unreadable(number, damage.kind, f"{damage}; the rest of the file is lost", stream.offset)


def _header(line: bytes, fields: int) -> tuple[dict[str, str], int]:
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


def _next_header(stream: ByteStream) -> bytes:
    """Skip to the next line that looks like a record header, after malformed data; b"" if there is none."""
    while True:
        try:
            line = stream.line()
            if not line or _BEGINS.match(line):
                return line
        except Malformed:
            stream.skip_line()
