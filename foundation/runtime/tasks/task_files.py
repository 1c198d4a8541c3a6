"""Files of tasks on machines that share no disk: they travel through an object store, named by their content.

The driver has all files of the work folder. A task runs in a view: a folder of its process that stands for the work
folder and holds the files that the task names, taken from a cache of the node. What the task writes there is uploaded
before its answer is given. So a task that runs twice, or after its node was cut off, disturbs nobody."""

import atexit
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import orjson

from gristmill.foundation.checksums import read_cached, seal_of
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest, held_folder, is_temporary, remove_abandoned
from gristmill.foundation.runtime.store.store import Store

TASKS_FOLDER = "tasks"  # of the objects; removed after each stage
MIN_FREE_SHARE = 0.1  # of the disk under a node's cache; below it the oldest files are removed


class TransferError(InputError):
    """The store did not give or take a task's file. Another attempt may succeed."""


@dataclass(frozen=True)
class TaskFile:
    """A file of the work folder. name: relative to it. digest: SHA-256. seal: its checksum file's digest, "" for
    none."""

    name: str
    bytes: int
    digest: str
    seal: str = ""

    @classmethod
    def of(cls, path: Path, root: Path) -> "TaskFile":
        seal = read_cached(seal_of(path))
        digest = seal.get("xxh3", "") if isinstance(seal, dict) else ""
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

    def delete_all(self) -> None:
        for name in self.store.list(TASKS_FOLDER):
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
    return _at_exit.enter_context(held_folder(views))


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
    """The path, whose file is there if the driver has it: for files that the running task does not name itself."""
    view = _view_of(path)
    if view is not None:
        view.add(path)
    return path


def fetch_folder(folder: Path) -> Path:
    """As `fetch`, of all files below the folder."""
    view = _view_of(folder)
    if view is not None:
        view.add_folder(folder)
    return folder


def read_range(path: Path, start: int, stop: int, min_bytes: int = 0) -> bytes | None:
    """Bytes of a file of at least `min_bytes` that the running task does not have; None for others, and for a task that
    runs on the driver's machine."""
    view = _view_of(path)
    file = None if view is None else view.listed(path)
    if view is None or file is None or file.bytes < min_bytes or (view.cache / file.digest).exists():
        return None
    return view.objects.read_range(file.digest, start, stop) if stop > start else b""


def _view_of(path: Path) -> TaskView | None:
    view = _current.get()
    return view if view is not None and path.is_relative_to(view.root) else None


def scratch_root() -> Path:
    """Where this machine keeps copies of work folders in stores."""
    return Path(os.environ.get("GRISTMILL_SCRATCH") or Path.home() / ".cache" / "gristmill" / "remote").absolute()


def node_scratch(address: str) -> Path:
    """The folder of this node for the tasks of a work folder."""
    return scratch_root() / "nodes" / hashlib.sha256(address.encode()).hexdigest()[:16]
