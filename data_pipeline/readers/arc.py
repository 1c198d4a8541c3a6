"""ARC files, which the Internet Archive wrote before WARC, read as far as they can be.

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
# Address, something, a date of 14 digits (some wrote more), something: where a record begins, whole or not.
_BEGINS = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*:.* \S+ \d{12,} \S+")


def read_arc(file: BinaryIO, name: str, limit: int) -> Iterator[Record | Unreadable]:
    """The HTML pages of the file, each with its address. Records that are no page are numbered and counted.

    limit: max_record_bytes of the source; a larger record is passed over without being held."""
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
        yield Unreadable(number, damage.kind, f"{damage}; what follows is lost", stream.offset)


def _header(line: bytes, fields: int) -> tuple[dict[str, str], int]:
    """(the record's address and date, named as WARC names them, with its content type; its length in bytes).

    An address may hold spaces, so the fields are counted from the right. Raises Malformed if it is no such line."""
    parts = line.decode("utf-8", "replace").rstrip("\r\n").rsplit(" ", fields - 1)
    if len(parts) < fields or not _DIGITS.fullmatch(parts[2]):
        hint = "; this is a WARC file, set format: warc" if line.startswith(b"WARC/") else ""
        raise Malformed(f"no ARC record: {excerpt(line, 60)!r}{hint}")
    if not _DIGITS.fullmatch(parts[-1]):
        raise Malformed(f"a record of length {excerpt(parts[-1], 60)!r}")
    return {"warc-target-uri": parts[0], "warc-date": _date(parts[2]), "content-type": parts[3]}, int(parts[-1])


def _typed(header: dict[str, str], content: bytes) -> dict[str, str]:
    """The header of a WARC record that says the same: a response where HTTP headers stand before the page."""
    if content.startswith(b"HTTP/"):
        return {**header, "warc-type": "response", "content-type": "application/http"}
    return {**header, "warc-type": "resource"}


def _date(digits: str) -> str:
    """20140216050221 -> 2014-02-16T05:02:21Z."""
    year, month, day, hour, minute, second = digits[:4], *(digits[at : at + 2] for at in range(4, 14, 2))
    return f"{year}-{month}-{day}T{hour}:{minute}:{second}Z"


def _next_line(stream: ByteStream) -> bytes:
    """The next line that is not blank; b"" at the end. Of one over 1 MiB, what follows it is taken for no record."""
    try:
        line = stream.line()
        while line in _BLANK:
            line = stream.line()
        return line
    except Malformed:
        stream.skip_line()
        return b"a line of over 1 MiB\n"


def _next_header(stream: ByteStream) -> bytes:
    """The next line that looks like the begin of a record, after something that is none; b"" if there is none."""
    while True:
        try:
            line = stream.line()
            if not line or _BEGINS.match(line):
                return line
        except Malformed:
            stream.skip_line()
