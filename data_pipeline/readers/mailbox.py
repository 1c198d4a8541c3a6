"""Reader of mail: mbox files (RFC 4155), and files of one message (RFC 5322, .eml)."""

import email
import email.policy
from collections.abc import Iterator
from email.message import EmailMessage
from typing import Any, BinaryIO

from gristmill.data_pipeline.readers.compression import Damaged, TooLong, blocks, whole_lines
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, first_line, too_large
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.deferred_module import DeferredModule

html_extraction = DeferredModule("gristmill.data_pipeline.extraction.html_extraction")  # for mails without plain text

SEPARATOR = b"From "  # at the beginning of a line behind an empty one


def read_mailbox(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """Reads the plain text of each message, or the main text of its HTML where it has no plain text; attachments are
    left out. Metadata: subject and date; addresses of persons are not kept."""
    number = 0
    try:
        for offset, raw, num_bytes in _messages(whole_lines(blocks(file, name), source.max_record_bytes), source):
            if num_bytes > source.max_record_bytes:
                yield too_large(number, num_bytes, source.max_record_bytes, offset, raw)
            else:
                record = _record(raw, number, offset, source)
                if record is not None:
                    yield record
            number += 1
    except Damaged as damage:
        yield Unreadable(number, damage.kind, str(damage))


def _messages(pieces: Iterator[bytes | TooLong], source: SourceConfig) -> Iterator[tuple[int, bytes, int]]:
    """(offset, bytes, size) of each message; of one over the limit the first bytes alone."""
    message, limit = bytearray(), source.max_record_bytes
    start = offset = size = 0
    after_blank = True
    for piece in pieces:
        for line in [b""] if isinstance(piece, TooLong) else piece.splitlines(keepends=True):
            num_bytes = piece.num_bytes if isinstance(piece, TooLong) else len(line)
            if after_blank and line.startswith(SEPARATOR):
                if size:
                    yield start, bytes(message), size
                message, start, size = bytearray(), offset, 0
            else:
                size += num_bytes
                if size <= limit:
                    message += line
            after_blank = not line.strip()
            offset += num_bytes
    if size:
        yield start, bytes(message), size


def _record(raw: bytes, number: int, offset: int, source: SourceConfig) -> Record | Unreadable | None:
    try:
        message: Any = email.message_from_bytes(raw, policy=email.policy.default)
        text = _text(message, source)
        metadata = {key: str(message[key]) for key in ("subject", "date") if message[key]}
    except Exception as error:  # the package raises many kinds for malformed headers, charsets and encodings
        reason = f"not a message that Python's email package reads ({first_line(error)})"
        return Unreadable(number, "bad_message", reason, offset, excerpt(raw))
    if not text.strip():
        return None
    return Record(number, text, language=source.language or "", metadata=metadata)


def _text(message: EmailMessage, source: SourceConfig) -> str:
    part: Any = message.get_body(("plain", "html"))
    if part is None:
        return ""
    content = part.get_content()
    if part.get_content_type() != "text/html":
        return content.replace("\r\n", "\n").strip("\n")
    try:
        return html_extraction.extract_page(content.encode(), "utf-8", "blocks", source.blocks, None).text
    except html_extraction.NotExtracted:
        return ""
