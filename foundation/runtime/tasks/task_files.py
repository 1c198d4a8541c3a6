"""Files of tasks: on machines that share no disk they travel through an object store, named by their content; records
that tasks write for each other are a shuffle.

The driver has the names of all files of the work folder; what tasks wrote is in the store, and has a stub here until
the driver itself reads it. A task runs in a view: a folder of its process that stands for the work
folder and holds the files that the task names, taken from a cache of the node. What the task writes there is uploaded
before its answer is given. So a task that runs twice, or after its node was cut off, disturbs nobody."""

import atexit
import hashlib
import mmap
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import orjson

from gristmill.foundation.checksums import checksum_path, content_digest, read_cached, write_with_checksum
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest, is_temporary, locked_temp_dir, remove_abandoned, stub_at
from gristmill.foundation.runtime.store.store import Store, download_stub, download_stubs, has_stubs, store_behind

TASKS_FOLDER = "tasks"  # of the objects; removed after each stage
MIN_FREE_SHARE = 0.1  # of the disk under a node's cache; below it the oldest files are removed


class TransferError(InputError):
    """The store did not give or take a task's file. Another attempt may succeed."""


@dataclass(frozen=True)
class TaskFile:
    """A file of the work folder. name: relative to it. digest: SHA-256. checksum: XXH3-128 in its checksum file, "" for
    none. xxh3: of a file that a task wrote, with or without that."""

    name: str
    bytes: int
    digest: str
    checksum: str = ""
    xxh3: str = field(default="", compare=False)

    @classmethod
    def of(cls, path: Path, root: Path) -> "TaskFile":
        checksum = read_cached(checksum_path(path))
        digest = checksum.get("xxh3", "") if isinstance(checksum, dict) else ""
        return cls(path.relative_to(root).as_posix(), path.stat().st_size, file_digest(path), digest)


@dataclass(frozen=True)
class TaskObjects:
    """The objects below ADDRESS/tasks, by SHA-256."""

    address: str

    @property
    def store(self) -> Store:
        return _store(self.address)

    def put(self, path: Path, digest: str) -> None:
        with _transfer():
            self.store.put(f"{TASKS_FOLDER}/{digest}", path)

    def get(self, path: Path, num_bytes: int, digest: str) -> None:
        """The object as a file, whole or not at all."""
        with _transfer():
            self.store.download(f"{TASKS_FOLDER}/{digest}", path, (num_bytes, digest))

    def put_file(self, path: Path, digest: str) -> None:
        """As `put`; of a stub, which stands for this object or one of a published stage, the store makes it."""
        stub = stub_at(path)
        if stub is None:
            self.put(path, digest)
        elif stub.object != f"{TASKS_FOLDER}/{digest}":
            with _transfer():
                self.store.copy(stub.object, f"{TASKS_FOLDER}/{digest}")

    def read_range(self, digest: str, start: int, stop: int) -> bytes:
        with _transfer():
            return self.store.read_range(f"{TASKS_FOLDER}/{digest}", start, stop)

    def put_bytes(self, content: bytes) -> str:
        """Their digest."""
        digest = hashlib.sha256(content).hexdigest()
        with _transfer():
            self.store.put_bytes(f"{TASKS_FOLDER}/{digest}", content)
        return digest

    def get_bytes(self, digest: str) -> bytes:
        with _transfer():
            content = self.store.read(f"{TASKS_FOLDER}/{digest}")
            if content is None or hashlib.sha256(content).hexdigest() != digest:
                raise InputError(f"{self.address}/{TASKS_FOLDER}/{digest}: gone or altered; run the command again")
        return content

    def delete_all(self, but: Collection[str] = ()) -> None:
        for name in self.store.list(TASKS_FOLDER):
            if name not in but:
                self.store.delete(name)


@cache
def _store(address: str) -> Store:
    return Store(address)


@contextmanager
def _transfer() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise TransferError(str(error)) from error


@dataclass(frozen=True)
class Listing:
    """The files that the tasks of one map may read, as an object. root: the driver's work folder, for messages."""

    objects: TaskObjects
    digest: str
    root: str

    @classmethod
    def write(cls, objects: TaskObjects, files: Iterable[TaskFile], root: Path) -> "Listing":
        rows = sorted([file.name, file.bytes, file.digest] for file in files)
        return cls(objects, objects.put_bytes(orjson.dumps(rows)), str(root))

    def files(self) -> Mapping[str, TaskFile]:
        return _files_of(self)


@lru_cache(maxsize=2)
def _files_of(listing: Listing) -> dict[str, TaskFile]:
    rows = orjson.loads(listing.objects.get_bytes(listing.digest))
    return {name: TaskFile(name, num_bytes, digest) for name, num_bytes, digest in rows}


class TaskView:
    """root: stands for the work folder in this task. cache: the node's files by digest."""

    def __init__(self, root: Path, cache_folder: Path, listing: Listing):
        self.root, self.cache, self.objects, self.files = root, cache_folder, listing.objects, listing.files()
        self._inodes: set[int] = set()

    def add(self, path: Path) -> None:
        """The file or, of a folder, all files in it are there, if the listing has them."""
        if path.exists() and not path.is_dir():
            return
        name = path.relative_to(self.root).as_posix()
        if name in self.files:
            self._link(self.files[name])

    def add_folder(self, folder: Path) -> None:
        prefix = f"{folder.relative_to(self.root).as_posix()}/"
        for name in self.files:
            if name.startswith(prefix):
                self.add(self.root / name)

    def listed(self, path: Path) -> TaskFile | None:
        """The listing's entry, if the file is not in the view."""
        return None if path.exists() else self.files.get(path.relative_to(self.root).as_posix())

    def _link(self, file: TaskFile) -> None:
        cached, path = self.cache / file.digest, self.root / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        while not path.exists():
            if not cached.exists():
                self.objects.get(cached, file.bytes, file.digest)
            with suppress(FileNotFoundError, FileExistsError):  # removed in between to free the disk
                os.link(cached, path)
                os.utime(cached)
        self._inodes.add(path.stat().st_ino)

    def upload_written(self) -> list[TaskFile]:
        """The files that the task wrote, which go to the cache too."""
        written = []
        for path in sorted(self.root.rglob("*")):
            if path.name.startswith(".") or not path.is_file() or path.stat().st_ino in self._inodes:
                continue
            file = TaskFile.of(path, self.root)
            file = replace(file, xxh3=file.checksum or content_digest(path))
            self.objects.put(path, file.digest)
            path.replace(self.cache / file.digest)
            written.append(file)
        return written


_current: ContextVar[TaskView | None] = ContextVar("view of the running task", default=None)


@contextmanager
def task_view(scratch: Path, listing: Listing) -> Iterator[TaskView]:
    """An empty view below `scratch`, which is emptied after the block. Its path is the same for all tasks of a process,
    since libraries and caches go by paths. Views that a kill left are removed."""
    cache_folder, views = scratch / "cache", scratch / "views"
    cache_folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(views)
    _free_disk(cache_folder)
    view = TaskView(_own_folder(views), cache_folder, listing)
    token = _current.set(view)
    try:
        yield view
    finally:
        _current.reset(token)
        for path in view.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


_at_exit = ExitStack()
atexit.register(_at_exit.close)


@cache
def _own_folder(views: Path) -> Path:
    return _at_exit.enter_context(locked_temp_dir(views))


def _free_disk(folder: Path) -> None:
    usage = shutil.disk_usage(folder)
    if usage.free >= MIN_FREE_SHARE * usage.total:
        return
    wanted = 2 * MIN_FREE_SHARE * usage.total - usage.free
    with suppress(FileNotFoundError):  # another task's process removes files too
        for path in sorted((path for path in folder.iterdir() if not is_temporary(path)), key=os.path.getmtime):
            if wanted <= 0:
                return
            wanted -= path.stat().st_size
            path.unlink()


def fetch(path: Path) -> Path:
    """The path, whose file is there if the driver has it: for files that the running task does not name itself, and
    for those that the driver reads."""
    view = _view_of(path)
    if view is not None:
        view.add(path)
    elif (store := store_behind(path)) is not None and (stub := stub_at(path)) is not None:
        download_stub(store, path, stub)
    return path


def fetch_folder(folder: Path) -> Path:
    """As `fetch`, of all files below the folder."""
    view = _view_of(folder)
    if view is not None:
        view.add_folder(folder)
    elif (store := store_behind(folder)) is not None:
        download_stubs(store, folder)
    return folder


def read_range(path: Path, start: int, stop: int, min_bytes: int = 0) -> bytes | None:
    """Bytes of a file of at least `min_bytes` that the running task does not have, or of which the driver has a stub;
    None for others."""
    view = _view_of(path)
    if view is None and (store := store_behind(path)) is not None and (stub := stub_at(path)) is not None:
        return store.read_range(stub.object, start, stop) if stop > start else b""
    file = None if view is None else view.listed(path)
    if view is None or file is None or file.bytes < min_bytes or (view.cache / file.digest).exists():
        return None
    return view.objects.read_range(file.digest, start, stop) if stop > start else b""


def _is_elsewhere() -> bool:
    """Whether files that this process reads may be in a store."""
    return _current.get() is not None or has_stubs()


def _view_of(path: Path) -> TaskView | None:
    view = _current.get()
    return view if view is not None and path.is_relative_to(view.root) else None


def scratch_root() -> Path:
    """Where this machine keeps copies of work folders in stores."""
    return Path(os.environ.get("GRISTMILL_SCRATCH") or Path.home() / ".cache" / "gristmill" / "remote").absolute()


def node_scratch(address: str) -> Path:
    """The folder of this node for the tasks of a work folder."""
    return scratch_root() / "nodes" / hashlib.sha256(address.encode()).hexdigest()[:16]


# The shuffle: fixed-width binary records that map tasks write, an output each, and other tasks read range by range.
#
# An output is one file: a header, then its records, range after range. So no task knows all records, and the driver
# knows none: a `PartitionedFiles` has the same few bytes for any number of documents, and so has each order for a
# task. A reader needs the memory of its range in all outputs: choose ranges by `ranges_for`.
#
# File: 8 bytes MAGIC, uint64 bytes of a record, uint64 ranges, uint64[ranges + 1] first record of each range, records.


MAGIC = b"gmshuf01"
HEAD_BYTES = 24
OPEN_FILES = 16  # that a process keeps open
SMALL_BYTES = 1 << 16  # a file up to this is read whole, in a quarter of the time that mapping it takes
MIN_RANGED_BYTES = 16_000_000  # of a file on another machine; a smaller one is fetched whole
# Records of a range: a reader of records of 12 bytes needs 50 MB for them, and as much again to sort them.
RANGE_RECORDS = 1 << 22


@dataclass(frozen=True)
class PartitionedFiles:
    """prefix: of the outputs' paths. dtype: of a record. map_outputs, ranges: how many there are. A segment is the
    records of one range in one output."""

    prefix: Path
    dtype: np.dtype
    map_outputs: int
    ranges: int

    def path(self, output: int) -> Path:
        return Path(self._name(output))

    def _name(self, output: int) -> str:
        """The path as text: a task reads a range of every output, and a Path takes as long as reading a small one."""
        return f"{self.prefix}-{output:05d}.rec"

    def _fetched(self, output: int) -> str:
        return str(fetch(self.path(output))) if _is_elsewhere() else self._name(output)

    def paths(self) -> list[Path]:
        return [self.path(output) for output in range(self.map_outputs)]

    def has(self, output: int) -> bool:
        return os.path.exists(self._name(output)) or os.path.exists(self._fetched(output))

    def is_whole(self) -> bool:
        """Whether all outputs are there."""
        return all(self.has(output) for output in range(self.map_outputs))

    def remove(self) -> None:
        """Frees the disk when nothing reads the records any more."""
        for path in self.paths():
            path.unlink(missing_ok=True)
            checksum_path(path).unlink(missing_ok=True)

    def write(self, output: int, records: np.ndarray, bounds: np.ndarray) -> None:
        """One output, whole or not at all. records: ordered by range; bounds int64[ranges + 1]: where each begins."""
        if records.dtype != self.dtype or len(bounds) != self.ranges + 1 or bounds[-1] != len(records):
            raise ValueError(f"{self.path(output)}: {records.dtype}, {len(bounds)} bounds up to {bounds[-1]}")
        head = MAGIC + np.array([self.dtype.itemsize, self.ranges, *bounds], "<u8").tobytes()
        write_with_checksum(self.path(output), head, np.ascontiguousarray(records).view(np.uint8).data)

    def write_sorted(self, output: int, records: np.ndarray, range_of: np.ndarray) -> None:
        """One output of records that are ordered by their range, range_of int64[records]."""
        self.write(output, records, np.searchsorted(range_of, np.arange(self.ranges + 1)))

    def write_unsorted(self, output: int, records: np.ndarray, range_of: np.ndarray) -> None:
        """As `write_sorted`; records of one range keep their order."""
        order = np.argsort(range_of, kind="stable")
        self.write_sorted(output, records[order], range_of[order])

    def map_output(self, output: int) -> tuple[np.ndarray, np.ndarray]:
        """(bounds int64[ranges + 1], records, mapped from disk unless the file is small). Raises InputError if the file
        is damaged."""
        path = self._fetched(output)
        try:
            status = os.stat(path)
            state = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
            return _opened(path, self.dtype, self.ranges, state)
        except (OSError, ValueError, IndexError) as error:
            raise InputError(f"{path}: no readable records ({error}); delete its folder and run again") from error

    def segments(self, number: int) -> Iterator[tuple[int, np.ndarray]]:
        """(output, its records of the range), mapped from disk, for all outputs that have any."""
        for output in range(self.map_outputs):
            records = self.segment(output, number)
            if len(records):
                yield output, records

    def segment(self, output: int, number: int) -> np.ndarray:
        """The records of a range in one output. Of a large file on another machine nothing else is read."""
        if _is_elsewhere() and (records := self._read_segment(output, number)) is not None:
            return records
        bounds, records = self.map_output(output)
        return records[bounds[number] : bounds[number + 1]]

    def _read_segment(self, output: int, number: int) -> np.ndarray | None:
        """As `segment`, of a large file in a store; None for another."""
        path, start = self.path(output), HEAD_BYTES + 8 * number
        if (head := read_range(path, start, start + 16, MIN_RANGED_BYTES)) is None:
            return None
        first, last = np.frombuffer(head, "<i8").tolist()
        start, size = HEAD_BYTES + 8 * (self.ranges + 1), self.dtype.itemsize
        content = read_range(path, start + first * size, start + last * size)
        return None if content is None else np.frombuffer(content, self.dtype)

    def read(self, number: int) -> np.ndarray:
        """The records of a range, output after output."""
        return np.concatenate([np.empty(0, self.dtype), *(segment for _, segment in self.segments(number))])

    def read_all(self) -> np.ndarray:
        """All records, output after output."""
        return np.concatenate(
            [np.empty(0, self.dtype), *(self.map_output(output)[1] for output in range(self.map_outputs))]
        )

    def num_records(self) -> int:
        return sum(map(self._num_records, range(self.map_outputs)))

    def _num_records(self, output: int) -> int:
        last = HEAD_BYTES + 8 * self.ranges
        content = read_range(self.path(output), last, last + 8)
        return int(self.map_output(output)[0][-1]) if content is None else int.from_bytes(content, "little")


@lru_cache(maxsize=OPEN_FILES)
def _opened(path: str, dtype: np.dtype, ranges: int, _: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(bounds, records) of a file. A file in the same state is opened once: tasks read one range after the other, and
    the results on a file several times."""
    start = HEAD_BYTES + 8 * (ranges + 1)
    with open(path, "rb", buffering=0) as file:
        content, num_bytes = file.read(max(start, SMALL_BYTES)), os.fstat(file.fileno()).st_size
        # np.memmap opens the file again and resolves its path
        mapped = None if num_bytes <= len(content) else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    head = np.frombuffer(content[:start], "<u8")
    if head[:1].tobytes() != MAGIC or head[1] != dtype.itemsize or head[2] != ranges:
        raise ValueError("another header than expected")
    bounds = head[3:].astype(np.int64)
    bounds.setflags(write=False)
    if num_bytes != start + int(bounds[-1]) * dtype.itemsize:
        raise ValueError("its size is not what the header says")
    return bounds, np.frombuffer(content if mapped is None else mapped, dtype, offset=start)


def ranges_for(records: int, range_records: int = RANGE_RECORDS) -> int:
    """How many ranges so many records need."""
    return max(-(-records // range_records), 1)


def range_of_keys(keys: np.ndarray, ranges: int) -> np.ndarray:
    """int64[]: the range of each 64-bit hash; ranges follow each other as the hashes do.

    [0, 2**63, 2**64 - 1], 2 -> [0, 1, 1]."""
    return ((keys >> np.uint64(32)) * np.uint64(ranges) >> np.uint64(32)).astype(np.int64)
