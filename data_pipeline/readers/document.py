"""Records, documents, document ids, and batches of records as columns. An id does not depend on the path, the worker or
the order of reading."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.data_pipeline.readers.compression import MAX_INTEGER, MIN_INTEGER, without_surrogates
from gristmill.data_pipeline.signals.bits import PADDING, TextBuffer, add_newlines
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
    """Ids of records by number, 32 hex digits each.

    BLAKE2b-128 of the source's name, the raw file's digest and copy index, and the record's number, with NUL between.

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


MAX_DEPTH = 200  # levels of metadata; orjson writes 254


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """Canonical JSON of metadata: sorted keys, no spaces. Values without a JSON form are written as strings; values
    nested deeper than MAX_DEPTH levels are replaced by a note that says so."""
    if not metadata:
        return "{}"
    return dumped_json(dict(metadata))


def dumped_json(value: Any) -> str:
    options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, option=options, default=str).decode()
    except (TypeError, ValueError, RecursionError):  # too deep, lone surrogates, integers beyond 64 bits
        return orjson.dumps(_plain(value, MAX_DEPTH), option=options, default=str).decode()


def _plain(value: Any, depth: int) -> Any:
    """Convert a value to types that JSON can represent."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value if MIN_INTEGER <= value <= MAX_INTEGER else hex(value)
    if isinstance(value, dict | list | tuple) and not depth:
        return f"nested deeper than {MAX_DEPTH} levels"
    if isinstance(value, dict):
        return {without_surrogates(str(key)): _plain(member, depth - 1) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member, depth - 1) for member in value]
    return value


# Parts of URLs.


def split_url(url: str) -> tuple[str, str]:
    """(host in lower case, path from its slash). "HTTPS://me@A.b:80/C?d" -> ("a.b", "/C?d"); "a.b" -> ("a.b", "")."""
    rest = url.strip().partition("://")[2] if "://" in url else url.strip()
    ends = [at for mark in "/?#" if (at := rest.find(mark)) >= 0]
    end = min(ends, default=len(rest))
    host = rest[:end].rpartition("@")[2].partition(":")[0].rstrip(".").lower()
    return host, rest[end:]


# RE2, which is linear
HOST = r"^[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/?#@]*@)?(?P<host>[^/?#:]+)"


def hosts_of(urls: pa.ChunkedArray) -> pa.Array:
    """The host of each URL in lower case, null where it has none."""
    matches = pc.extract_regex(urls.combine_chunks() if isinstance(urls, pa.ChunkedArray) else urls, HOST)
    hosts = matches.field("host") if len(matches) else pa.array([], pa.string())
    return pc.utf8_lower(pc.if_else(pc.is_valid(matches), hosts, pa.scalar(None, pa.string())))


# Records as columns, a batch at a time: what annotation reads, without a Python object per record.


BATCH_RECORDS = 1024
BATCH_BYTES = 8_000_000  # of texts, URLs, languages and metadata: limits the memory of a batch of long documents
MIN_CAPACITY = 1 << 16


class RecordColumns(NamedTuple):
    """N records, readable or not. files: (name of its source, raw file, how many of the records are from it), in order.
    numbers: int64[N], of the records in their files. texts: empty where a record is unreadable. urls, languages,
    metadata: strings, null where a record is unreadable; metadata is canonical JSON.

    repairs: row -> names of the repairs that were needed to read it. unreadable: row -> why it could not be read."""

    files: Sequence[tuple[str, RawFile, int]]
    numbers: np.ndarray
    texts: TextBuffer
    urls: pa.Array
    languages: pa.Array
    metadata: pa.Array
    repairs: dict[int, tuple[str, ...]]
    unreadable: dict[int, Unreadable]

    def __len__(self) -> int:
        return len(self.numbers)


class StringColumn:
    """Growing strings in one buffer. data: uint8; offsets: int64[BATCH_RECORDS + 1], string k is
    data[offsets[k] : offsets[k + 1]]."""

    def __init__(self, capacity: int = MIN_CAPACITY) -> None:
        self.data = np.empty(capacity, np.uint8)
        self.offsets = np.zeros(BATCH_RECORDS + 1, np.int64)

    def reserve(self, rows: int, num_bytes: int) -> None:
        """Make room for num_bytes behind the first rows, and PADDING."""
        used = int(self.offsets[rows])
        if used + num_bytes + PADDING > len(self.data):
            data = np.empty(max(2 * len(self.data), used + num_bytes + PADDING), np.uint8)
            data[:used] = self.data[:used]
            self.data = data

    def add(self, row: int, value: bytes) -> None:
        self.reserve(row, len(value))
        start = int(self.offsets[row])
        self.data[start : start + len(value)] = np.frombuffer(value, np.uint8)
        self.offsets[row + 1] = start + len(value)

    def extend(self, row: int, strings: pa.Array, newlines: bool) -> None:
        """Add an array of pyarrow strings, without nulls, from this row on; newlines: put one behind each."""
        count = len(strings)
        offsets, data = string_offsets(strings), np.frombuffer(strings.buffers()[2] or b"", np.uint8)
        ends = offsets[1:] - offsets[0] + (np.arange(1, count + 1) if newlines else 0)
        self.reserve(row, int(ends[-1]))
        start = int(self.offsets[row])
        out = self.data[start : start + int(ends[-1])]
        if newlines:
            add_newlines(data, offsets, out)
        else:
            out[:] = data[offsets[0] : offsets[-1]]
        self.offsets[row + 1 : row + count + 1] = start + ends

    def strings(self, rows: int, valid: pa.Buffer | None) -> pa.Array:
        """The first rows as an array of pyarrow. valid: its bits of rows that are not null; None for all."""
        offsets = self.offsets[: rows + 1].astype(np.int32)
        data = pa.py_buffer(self.data[: int(offsets[-1])].tobytes())
        return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), data, valid)


def string_offsets(strings: pa.Array) -> np.ndarray:
    """int64[N + 1]: where the strings of a pyarrow array begin and end in its buffer."""
    if not len(strings):
        return np.zeros(1, np.int64)
    offsets = np.frombuffer(strings.buffers()[1], np.int32)
    return offsets[strings.offset : strings.offset + len(strings) + 1].astype(np.int64)


class RecordBuilder:
    """Collects records into RecordColumns of BATCH_RECORDS, or of fewer with BATCH_BYTES in total."""

    def __init__(self) -> None:
        self._capacity = MIN_CAPACITY
        self._begin([])

    def _begin(self, files: list[tuple[str, RawFile]]) -> None:
        self.texts = StringColumn(self._capacity)
        self.urls, self.languages, self.metadata = StringColumn(), StringColumn(), StringColumn()
        self.numbers = np.zeros(BATCH_RECORDS, np.int64)
        self.rows = 0
        self._repairs: dict[int, tuple[str, ...]] = {}
        self._unreadable: dict[int, Unreadable] = {}
        self._changed: dict[int, bytes] = {}
        self._files, self._file_starts = files, [0] * len(files)

    @property
    def columns(self) -> tuple[StringColumn, StringColumn, StringColumn, StringColumn]:
        return self.texts, self.urls, self.languages, self.metadata

    def start_file(self, source: str, file: RawFile) -> None:
        """The records that follow are from this file of the source with this name."""
        self._files.append((source, file))
        self._file_starts.append(self.rows)

    @property
    def is_full(self) -> bool:
        return self.rows == BATCH_RECORDS or self.num_bytes >= BATCH_BYTES

    @property
    def num_bytes(self) -> int:
        return sum(int(column.offsets[self.rows]) for column in self.columns)

    def add(self, record: Record | Unreadable) -> None:
        row = self.rows
        if isinstance(record, Record):
            values = (record.text, record.url, record.language, metadata_json(record.metadata))
            if record.repairs:
                self._repairs[row] = record.repairs
        else:
            values = ("", "", "", "")
            self._unreadable[row] = record
        self.numbers[row] = record.number
        text, *others = (value.encode() for value in values)
        self.texts.add(row, text + b"\n")
        for column, value in zip(self.columns[1:], others, strict=True):
            column.add(row, value)
        self.rows += 1

    def add_strings(self, number: int, columns: Sequence[pa.Array]) -> Iterator[RecordColumns]:
        """Add records, numbered from `number`: their texts, URLs, languages and metadata, strings without nulls.

        Yields records whenever the builder is full."""
        lengths = np.sum([np.diff(string_offsets(column)) for column in columns], axis=0) + 1
        done = 0
        while done < len(lengths):
            missing = np.searchsorted(np.cumsum(lengths[done:]), BATCH_BYTES - self.num_bytes) + 1
            count = min(int(missing), BATCH_RECORDS - self.rows, len(lengths) - done)
            for own_column, column in zip(self.columns, columns, strict=True):
                own_column.extend(self.rows, column.slice(done, count), newlines=own_column is self.texts)
            self.numbers[self.rows : self.rows + count] = np.arange(number + done, number + done + count)
            self.rows += count
            done += count
            if self.is_full:
                yield self.take()

    def change_metadata(self, row: int, metadata: bytes) -> None:
        """Give a row of this batch other metadata than stands in its column."""
        self._changed[row] = metadata

    def take(self) -> RecordColumns:
        """The records so far; the builder is empty afterwards."""
        rows = self.rows
        ends = [*self._file_starts[1:], rows]
        counts = [end - start for start, end in zip(self._file_starts, ends, strict=True)]
        valid = None
        if self._unreadable:
            is_valid = np.ones(rows, np.bool_)
            is_valid[list(self._unreadable)] = False
            valid = pa.py_buffer(np.packbits(is_valid, bitorder="little"))
        if self._changed:
            self.metadata = self._with_changes()
        taken = RecordColumns(
            files=[(*named, count) for named, count in zip(self._files, counts, strict=True) if count],
            numbers=self.numbers[:rows],
            texts=TextBuffer(
                self.texts.data[: int(self.texts.offsets[rows]) + PADDING], self.texts.offsets[: rows + 1]
            ),
            urls=self.urls.strings(rows, valid),
            languages=self.languages.strings(rows, valid),
            metadata=self.metadata.strings(rows, valid),
            repairs=self._repairs,
            unreadable=self._unreadable,
        )
        self._capacity = min(max(int(self.texts.offsets[rows]) + PADDING, MIN_CAPACITY), BATCH_BYTES)
        self._begin(self._files[-1:])
        return taken

    def _with_changes(self) -> StringColumn:
        metadata = self.metadata
        raw, ends = metadata.data[: int(metadata.offsets[self.rows])].tobytes(), metadata.offsets.tolist()
        values = [self._changed.get(row) or raw[ends[row] : ends[row + 1]] for row in range(self.rows)]
        column = StringColumn()
        column.data = np.frombuffer(b"".join(values), np.uint8)
        np.cumsum(np.fromiter(map(len, values), np.int64, self.rows), out=column.offsets[1 : self.rows + 1])
        return column
