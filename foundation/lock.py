"""The lock file pins the raw inputs of a recipe by digest: a later run reads the same bytes or names the change.

A recipe may have millions of raw files. What is sorted or listed by file is in memory up to MAX_HELD at a time, and
stands beyond that in a temporary file without a name, which ends with its object or the process."""

import hashlib
import heapq
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import pyarrow as pa
from pydantic import ConfigDict, Field, GetCoreSchemaHandler, StrictInt, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path
from gristmill.foundation.fingerprint import DIGEST_FIELD, canonical_json, read_digested_json

Item = TypeVar("Item")
LOCK_NAME = "lock.json"
MAX_HELD = 1 << 14
RUN_BLOCK_BYTES = 1 << 12
BLOCK_BYTES = 1 << 20


class SortedRecords:
    """Tuples of strings and integers in ascending order, to be read any number of times."""

    def __init__(self, records: Iterable[tuple[Any, ...]]):
        self._held: list[tuple[Any, ...]] = []
        self._runs: list[tuple[int, int]] = []  # start and stop of each in the file
        self._file: IO[bytes] | None = None
        for record in records:
            if len(self._held) == MAX_HELD:
                self._write_run()
            self._held.append(record)
        self._held.sort()

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        if self._file is None:
            return iter(self._held)
        return heapq.merge(*(_read_run(self._file, *run) for run in self._runs), self._held)

    def _write_run(self) -> None:
        with _naming_the_folder():
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - ends with this object
            start = self._file.tell()
            self._file.writelines(json.dumps(record).encode() + b"\n" for record in sorted(self._held))
            self._file.flush()
        self._runs.append((start, self._file.tell()))
        self._held = []


@contextmanager
def _naming_the_folder() -> Iterator[None]:
    """Errors of a file without a name say where it is."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = f"{tempfile.gettempdir()} (temporary files; TMPDIR names another folder)"
        raise


def _read_run(file: IO[bytes], start: int, stop: int) -> Iterator[tuple[Any, ...]]:
    """Keeps the file open, also when the records are no longer held."""
    rest = b""
    while start < stop:
        block = os.pread(file.fileno(), min(RUN_BLOCK_BYTES, stop - start), start)
        start += len(block)
        whole, _, rest = (rest + block).rpartition(b"\n")
        if whole:
            yield from map(tuple, json.loads(b"[" + whole.replace(b"\n", b",") + b"]"))


def batches_of(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """[a, b, c], 2 -> [a, b], [c]."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


Count = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True, slots=True)
class RawFile:
    """One raw input. `name` is for messages (a path as in the recipe, a module of the interpreter); the digest is its
    identity. `copy_index` distinguishes files of one source with equal digests."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    bytes: Count
    sha256: str
    copy_index: Count = 0


_SCHEMA = pa.schema([("name", pa.string()), ("bytes", pa.int64()), ("sha256", pa.string()), ("copy_index", pa.int64())])
_json_text: Callable[[str], str] = json.JSONEncoder(ensure_ascii=False).encode


class LockedFiles(Sequence[RawFile]):
    """Raw files as columns in batches of MAX_HELD, of which one is in memory."""

    def __init__(self, files: Iterable[RawFile] = ()):
        batches = map(_columns, batches_of(files, MAX_HELD))
        self._batch = (0, next(batches, _columns(())))  # the last one that was read, and its number
        self._length = self._batch[1].num_rows
        self._reader: pa.RecordBatchFileReader | None = None
        if (second := next(batches, None)) is not None:
            self._write(chain([self._batch[1], second], batches))

    def _write(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._length = 0
        with _naming_the_folder():
            file = tempfile.TemporaryFile()  # noqa: SIM115 - ends with the reader
            with pa.ipc.new_file(file, _SCHEMA) as writer:
                for batch in batches:
                    writer.write_batch(batch)
                    self._length += batch.num_rows
            file.flush()
        self._reader = pa.ipc.open_file(file)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        (row,) = self._batch_at(place // MAX_HELD).slice(place % MAX_HELD, 1).to_pylist()
        return RawFile(**row)

    def __iter__(self) -> Iterator[RawFile]:
        for batch in self.batches():
            yield from map(RawFile, *(column.to_pylist() for column in batch.columns))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LockedFiles) or len(self) != len(other):
            return False
        return all(
            batch.equals(other_batch) for batch, other_batch in zip(self.batches(), other.batches(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LockedFiles({list(islice(self, 3))}{' ...' if len(self) > 3 else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        return LockedFiles, (tuple(self),)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """One or more, of which the last may be empty."""
        return map(self._batch_at, range(1 if self._reader is None else self._reader.num_record_batches))

    def _batch_at(self, number: int) -> pa.RecordBatch:
        if self._reader is not None and self._batch[0] != number:
            self._batch = (number, self._reader.get_batch(number))
        return self._batch[1]

    def json_parts(self) -> Iterator[bytes]:
        """The canonical JSON of the list of files, in parts."""
        yield b"["
        for number, batch in enumerate(self.batches()):
            entries = ",".join(
                f'{{"bytes":{num_bytes},"copy_index":{copy},"name":{_json_text(name)},"sha256":{_json_text(digest)}}}'
                for name, num_bytes, digest, copy in zip(*(column.to_pylist() for column in batch.columns), strict=True)
            )
            yield ("," * (number > 0) + entries).encode()
        yield b"]"

    def identity(self) -> str:
        """Fingerprint of the contents, without names and paths: that of [[sha256, copy_index], ...]."""
        digest = hashlib.sha256(b"[")
        for number, batch in enumerate(self.batches()):
            pairs = zip(batch["sha256"].to_pylist(), batch["copy_index"].to_pylist(), strict=True)
            text = ",".join(f"[{_json_text(sha256)},{copy}]" for sha256, copy in pairs)
            digest.update(("," * (number > 0) + text).encode())
        digest.update(b"]")
        return digest.hexdigest()[:32]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def as_columns(value: Any, validate: Callable[[Any], Any]) -> LockedFiles:
            return value if isinstance(value, LockedFiles) else cls(validate(value))

        def as_json(files: LockedFiles) -> list[dict[str, Any]]:
            return [row for batch in files.batches() for row in batch.to_pylist()]

        rows = handler.generate_schema(tuple[RawFile, ...])
        serialization = core_schema.plain_serializer_function_ser_schema(as_json)
        return core_schema.no_info_wrap_validator_function(as_columns, rows, serialization=serialization)


def _columns(files: Sequence[RawFile]) -> pa.RecordBatch:
    columns = ([getattr(file, name) for file in files] for name in _SCHEMA.names)
    return pa.record_batch(list(columns), schema=_SCHEMA)


def in_canonical_order(files: Iterable[RawFile]) -> LockedFiles:
    """Sort by digest, equal ones by name, and number those: the result does not depend on paths or the order on disk.

    [("b", d1), ("a", d1), ("c", d0)] -> [("c", d0, 0), ("a", d1, 0), ("b", d1, 1)]"""
    return numbered(SortedRecords((file.sha256, file.name, file.bytes) for file in files))


def numbered(rows: Iterable[tuple[str, str, int]]) -> LockedFiles:
    """Files of these (digest, name, bytes), which ascend."""
    return LockedFiles(
        RawFile(name, num_bytes, digest, copy_index)
        for digest, same in groupby(rows, key=itemgetter(0))
        for copy_index, (_, name, num_bytes) in enumerate(same)
    )


class LockedSource(Config):
    """request: the part of the source's config that decides which files are read."""

    name: str
    request: dict[str, Any]
    files: LockedFiles


class Lock(Config):
    sources: tuple[LockedSource, ...]

    def source(self, name: str) -> LockedSource:
        """Raises InputError if the lock pins no such source."""
        if name in self._by_name:
            return self._by_name[name]
        raise InputError(
            f"{LOCK_NAME}: has no source {name!r}; run `gristmill run` to pin the recipe's raw files again"
        )

    @cached_property
    def _by_name(self) -> dict[str, LockedSource]:
        return {source.name: source for source in self.sources}

    def identity(self) -> dict[str, str]:
        """Source name -> fingerprint of its files' contents, without their names and paths."""
        return {source.name: source.files.identity() for source in self.sources}


def lock_differences(pinned: LockedSource, current: LockedSource, with_new: bool = True) -> list[str]:
    """One line for each raw file that was removed, added (with_new) or changed since the lock was written."""
    if pinned.files == current.files:
        return []
    gone, new, changed = [], [], []
    rows = chain(
        ((file.name, 0, file.sha256) for file in pinned.files), ((file.name, 1, file.sha256) for file in current.files)
    )
    for name, same in groupby(SortedRecords(rows), key=itemgetter(0)):
        digests = {side: digest for _, side, digest in same}
        if 1 not in digests:
            gone.append(f"{name}: gone")
        elif 0 not in digests:
            new.append(f"{name}: new")
        elif digests[0] != digests[1]:
            changed.append(f"{name}: sha256 was {digests[0][:16]}..., is {digests[1][:16]}...")
    return gone + (new if with_new else []) + changed


# The file has the form of `digested_json`, and is written and read in blocks.

_HEAD = b'{"%s":"' % DIGEST_FIELD.encode()  # then 64 digits
_FILES_BEGIN, _FILES_END, _BETWEEN_FILES = (
    b'{"files":[',
    b'],"name":',
    b'},{"bytes":',
)  # no text in JSON has these bytes
_raw_files: TypeAdapter[list[RawFile]] = TypeAdapter(list[RawFile])


def write_lock(path: Path, lock: Lock) -> None:
    digest = hashlib.sha256(b"{")
    for part in _parts(lock):
        digest.update(part)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(_HEAD + digest.hexdigest().encode() + b'",')
        file.writelines(_parts(lock))
        file.write(b"\n")


def _parts(lock: Lock) -> Iterator[bytes]:
    """The canonical JSON of the lock without its first brace, in parts."""
    yield b'"sources":['
    for number, source in enumerate(lock.sources):
        yield b"," * (number > 0) + b'{"files":'
        yield from source.files.json_parts()
        yield b',"name":%s,"request":%s}' % (canonical_json(source.name), canonical_json(source.request))
    yield b"]}"


def read_lock(path: Path) -> Lock | None:
    """None if there is no lock yet. Raises InputError if there is one that cannot be read."""
    if not path.exists():
        return None
    if not path.is_file():  # reading a named pipe would never return
        raise InputError(f"{path}: not a file; move it away")
    try:
        with path.open("rb") as file:
            return Lock(sources=tuple(_stored_sources(file)))
    except (ValueError, TypeError, RecursionError):
        pass  # what is wrong with it is said by reading it whole
    try:
        return Lock.model_validate(read_digested_json(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a lock ({error}); remove it to pin the raw files again") from error


def _stored_sources(file: IO[bytes]) -> Iterator[LockedSource]:
    """Raises ValueError if the file is not what `write_lock` writes."""
    head = file.read(len(_HEAD) + 66)
    digest, last = hashlib.sha256(b"{"), b""
    while block := file.read(BLOCK_BYTES):
        digest.update(last + block[:-1])
        last = block[-1:]
    if head != _HEAD + digest.hexdigest().encode() + b'",' or last != b"\n":
        raise ValueError("altered after it was written")
    file.seek(len(head))
    blocks = _Blocks(file)
    begin = blocks.before(_FILES_BEGIN)
    if begin is None and blocks.rest() == b'"sources":[]}\n':
        return
    if begin != b'"sources":[':
        raise ValueError("no list of sources")
    is_last = False
    while not is_last:
        files = LockedFiles(blocks.files())
        rest = blocks.before(b"," + _FILES_BEGIN)
        if is_last := rest is None:
            rest = blocks.rest().removesuffix(b"]}\n")
        yield LockedSource(files=files, **json.loads(b'{"name":%s' % (rest or b"")))


class _Blocks:
    """Reads the sources of a lock. No more of the file is in memory than a block and what stands between two marks."""

    def __init__(self, file: IO[bytes]):
        self._file, self._content, self._at = file, b"", 0

    def before(self, mark: bytes) -> bytes | None:
        """The bytes before the next mark, which is passed; None if there is none."""
        while (end := self._content.find(mark, self._at)) < 0:
            if not self._read():
                return None
        return self._take(end, len(mark))

    def rest(self) -> bytes:
        return self._take(len(self._content), 0)

    def files(self) -> Iterator[RawFile]:
        """The files up to the end of their list, which is passed."""
        while (end := self._content.find(_FILES_END, self._at)) < 0:
            cut = self._content.rfind(_BETWEEN_FILES, self._at)
            if cut >= 0:
                yield from _raw_files.validate_json(b"[" + self._take(cut + 1, 1) + b"]")
            if not self._read():
                raise ValueError("a list of files has no end")
        yield from _raw_files.validate_json(b"[" + self._take(end, len(_FILES_END)) + b"]")

    def _take(self, stop: int, skipped: int) -> bytes:
        taken = self._content[self._at : stop]
        self._at = stop + skipped
        return taken

    def _read(self) -> bool:
        block = self._file.read(BLOCK_BYTES)
        self._content, self._at = self._content[self._at :] + block, 0
        return bool(block)
