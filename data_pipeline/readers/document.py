"""Records, documents and document ids. An id does not depend on the path, the worker or the order of reading."""

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa

from gristmill.foundation.lock import RawFile

NO_METADATA: Mapping[str, Any] = MappingProxyType({})

# The files of a corpus (documents/SPLIT/SOURCE-00000.parquet). metadata is a JSON object with sorted keys.
DOCUMENT_SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("text", pa.string()),
        ("source", pa.string()),
        ("url", pa.string()),
        ("language", pa.string()),
        ("metadata", pa.string()),
    ]
)


class Record(NamedTuple):
    """A record that was read. number: its index in the raw file, from 0 (blank lines are counted too).

    html, charset: set where the text must still be extracted from a page. metadata: the record's other fields.
    repairs: names of the repairs that were needed to read it; they are counted by name.
    A tuple, because a frozen dataclass takes five times as long to create, and readers do little else."""

    number: int
    text: str
    url: str = ""
    language: str = ""
    metadata: Mapping[str, Any] = NO_METADATA
    html: bytes | None = None
    charset: str | None = None
    repairs: tuple[str, ...] = ()

    def repaired(self, *names: str) -> "Record":
        """The record with these repairs added before its own."""
        return self._replace(repairs=(*names, *self.repairs))


class Unreadable(NamedTuple):
    """A record, or the rest of a file, that could not be read. kind: the reason it is counted under (invalid_json ...).

    reason: the message for users, with the fix where there is one. offset: uncompressed bytes from the start of the
    file; -1 where the format has none. excerpt: the first characters of the record."""

    number: int
    kind: str
    reason: str
    offset: int = -1
    excerpt: str = ""


def doc_ids(source: str, file: RawFile, records: Sequence[int]) -> list[str]:
    """Of each record number, 32 hex digits: BLAKE2b-128 of the source's name, the raw file's digest and copy index, and
    the record's number, with NUL between them.

    A source may hold one file twice under two names; the copy index (0, 1, ...) keeps their ids apart, and the
    ledger then shows the second as an exact duplicate of the first."""
    start = hashlib.blake2b("\0".join([source, file.sha256, str(file.copy_index), ""]).encode(), digest_size=16)
    ids = []
    for record in records:
        hasher = start.copy()
        hasher.update(b"%d" % record)
        ids.append(hasher.hexdigest())
    return ids


def too_large(number: int, num_bytes: int | None, limit: int, offset: int = -1, start: bytes | str = "") -> Unreadable:
    """The Unreadable of a record over max_record_bytes. num_bytes: its size, None if unknown."""
    size = f"over {limit} bytes" if num_bytes is None else f"{num_bytes} bytes, over the limit of {limit}"
    reason = f"{size}; set max_record_bytes of the source higher to read it"
    return Unreadable(number, "record_too_large", reason, offset, excerpt(start))


def excerpt(raw: bytes | str, length: int = 120) -> str:
    """The first characters as one line of text; invalid bytes are escaped."""
    text = raw[: 4 * length] if isinstance(raw, str) else raw[: 4 * length].decode("utf-8", "backslashreplace")
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split())[:length]


def first_line(error: BaseException) -> str:
    """The error message as one line of at most 200 characters."""
    return excerpt(str(error), 200) or type(error).__name__
