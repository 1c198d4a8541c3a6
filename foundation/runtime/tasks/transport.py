"""Tasks and results on their way between machines: small ones as they are, large ones as the address of a file.

Ray copies messages over 100 kB through its object store and keeps them in the driver's memory, so masks and tables
of a task travel as a file of the shared work folder. The file is named by its content and is whole or absent: two runs
of a task write the same one. Paths below a `root` travel relative to it, so that each machine may have its own."""

import errno
import glob
import importlib
import io
import os
import pickle
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import orjson
import xxhash

from gristmill.foundation.checksums import file_state, write_known_checksum
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import STUB_BYTES, Stub, atomic_path, stubs_below
from gristmill.foundation.runtime.store.store import THREADS, use_stubs
from gristmill.foundation.runtime.tasks.local import answer_of
from gristmill.foundation.runtime.tasks.task_files import (
    TASKS_FOLDER,
    Listing,
    TaskFile,
    TaskObjects,
    TaskView,
    TransferError,
    node_scratch,
    task_view,
)

MAX_MESSAGE_BYTES = 65536
ALIGNMENT = 64  # of each array in the file: compiled kernels need aligned arrays


@dataclass(frozen=True)
class PickledValue:
    """A pickled value. sizes: bytes of its pieces, the pickle first, then the buffers of its arrays; each piece starts
    at a multiple of ALIGNMENT. content: the pieces; "" if they are in the file `path`."""

    sizes: tuple[int, ...]
    content: bytes
    path: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(map(_padded, self.sizes))

    def to_bytes(self) -> bytes:
        """A line of JSON, then the content."""
        return orjson.dumps({"sizes": self.sizes, "path": self.path}) + b"\n" + self.content

    @classmethod
    def from_bytes(cls, message: bytes) -> "PickledValue":
        """Raises ValueError, KeyError or TypeError if it is no message."""
        head, _, content = message.partition(b"\n")
        stated = orjson.loads(head)
        return cls(tuple(map(int, stated["sizes"])), content, str(stated["path"]))


class _Pickler(pickle.Pickler):
    """Paths below the root become relative to it, and are added to `named`."""

    def __init__(self, file: io.BytesIO, root: Path | None, buffers: list[pickle.PickleBuffer]):
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.root, self.named = root, set[Path]()

    def reducer_override(self, value: Any) -> Any:
        if self.root is None or not isinstance(value, Path) or not value.is_relative_to(self.root):
            return NotImplemented
        self.named.add(value)
        return _at_root, (value.relative_to(self.root).as_posix(),)


# What tasks and answers are made of, besides classes and functions of gristmill and of the packages in this variable.
# A message is written by a process of the same user (tasks/slurm.py checks that): the list is the second of two guards.
PACKAGES_VARIABLE = "GRISTMILL_TASK_PACKAGES"
MESSAGE_CLASSES = {
    "builtins": {"set", "frozenset", "tuple", "slice", "range", "complex", "bytearray", "object"},
    "collections": {"OrderedDict", "Counter", "defaultdict", "deque"},
    "copyreg": {"_reconstructor"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "functools": {"partial"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pyarrow.lib": {
        *(
            "Buffer",
            "ChunkedArray",
            "Field",
            "Schema",
            "Table",
            "RecordBatch",
            "py_buffer",
            "field",
            "schema",
            "type_for_alias",
        ),
        *("timestamp", "dictionary", "map_", "large_list", "fixed_size_list", "decimal128"),
        *("_reconstruct_table", "_reconstruct_record_batch", "_restore_array", "chunked_array", "list_", "struct"),
    },
}


def _message_class(module: str, name: str) -> Any:
    """The class or function that a message names. Raises pickle.UnpicklingError for one that no message needs."""
    packages = {"gristmill", *os.environ.get(PACKAGES_VARIABLE, "").split()}
    if module.partition(".")[0] in packages and name.isidentifier():
        value = getattr(importlib.import_module(module), name, None)
        if callable(value) and getattr(value, "__module__", None) == module:
            return value
    elif name in MESSAGE_CLASSES.get(module, ()):
        return getattr(importlib.import_module(module), name)
    elif module in sys.modules and name.isidentifier():
        value = getattr(sys.modules[module], name, None)
        if isinstance(value, type) and issubclass(value, BaseException):
            return value
    raise pickle.UnpicklingError(f"a message names {module}.{name}, which no task has")


class _Unpickler(pickle.Unpickler):
    """Relative paths become paths below the root, and are added to `named`."""

    def __init__(self, file: io.BytesIO, root: Path | None, buffers: Sequence[memoryview]):
        super().__init__(file, buffers=buffers)
        self.root, self.named = root, set[Path]()

    def find_class(self, module: str, name: str) -> Any:
        value = _message_class(module, name)
        return self._path if value is _at_root else value

    def _path(self, relative: str) -> Path:
        assert self.root is not None
        self.named.add(self.root / relative)
        return self.root / relative


def _at_root(relative: str) -> Path:
    raise pickle.UnpicklingError(f"{relative}: a path without its root")


def packed(value: Any, folder: Path) -> PickledValue:
    """The value, of which a large one is written to a file in the folder.

    Raises TypeError or pickle.PicklingError if it cannot be pickled."""
    return pickle_relative_to(value, folder, None)[0]


def pickle_relative_to(value: Any, folder: Path, root: Path | None) -> tuple[PickledValue, set[Path]]:
    """As `packed`, with the paths below the root that the value names, which become relative to it."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = _Pickler(file, root, buffers)
    pickler.dump(value)
    return _parcel(file.getbuffer(), buffers, folder), pickler.named


def _parcel(head: memoryview, buffers: Sequence[pickle.PickleBuffer], folder: Path) -> PickledValue:
    pieces = [head, *(buffer.raw() for buffer in buffers)]
    sizes = tuple(piece.nbytes for piece in pieces)
    if sum(map(_padded, sizes)) <= MAX_MESSAGE_BYTES:
        message = io.BytesIO()
        _write(message, pieces)
        return PickledValue(sizes, message.getvalue())
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    path = folder / f"{hasher.hexdigest()}.parcel"
    if not path.exists():
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            _write(file, pieces)
    return PickledValue(sizes, b"", str(path))


def unpacked(parcel: PickledValue) -> Any:
    """The value; its arrays can be written to. Raises InputError if the file is gone."""
    return _unpickled(_content(parcel), parcel, None)[0]


def unpacked_below(parcel: PickledValue, root: Path) -> tuple[Any, set[Path]]:
    """As `unpacked`, of `pickle_relative_to`; with the paths that the value names, which are below this root."""
    return _unpickled(_content(parcel), parcel, root)


def _content(parcel: PickledValue) -> bytearray:
    content = bytearray(parcel.content)
    if parcel.path:
        try:
            content = bytearray(os.path.getsize(parcel.path))
            with open(parcel.path, "rb") as file:
                file.readinto(content)
        except OSError as error:
            raise InputError(f"{parcel.path}: a task's file cannot be read ({error.strerror})") from error
    return content


def _unpickled(content: bytearray, parcel: PickledValue, root: Path | None) -> tuple[Any, set[Path]]:
    view, at, pieces = memoryview(content), 0, []
    for size in parcel.sizes:
        pieces.append(view[at : at + size])
        at += _padded(size)
    unpickler = _Unpickler(io.BytesIO(pieces[0]), root, pieces[1:])
    return unpickler.load(), unpickler.named


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _write(file: Any, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        file.write(piece)
        file.write(bytes(_padded(piece.nbytes) - piece.nbytes))


# The driver's side of `task_files.py`: uploads the files that tasks name, and writes stubs of those that they wrote.


class DriverFiles:
    """root: the work folder. Not for two threads at once."""

    def __init__(self, root: Path, address: str):
        self.root, self.objects = root.absolute(), TaskObjects(address)
        self._known: dict[str, tuple[dict[str, int], TaskFile]] = {}  # name -> its state and the object like it
        self._stored: set[str] = set()  # digests of the objects
        self._threads = ThreadPoolExecutor(THREADS)
        use_stubs(self.root, self.objects.store)
        self._arriving: list[Future[None]] = []

    def listing(self, named: Iterable[Path]) -> Listing:
        """List the files that tasks may read which name these paths: a file itself, all files below a folder, and those
        whose paths begin so. They are uploaded."""
        paths = sorted({file for path in named for file in _files_at(path)})
        files = list(self._threads.map(self._uploaded, paths))
        return Listing.write(self.objects, files, self.root)

    def _uploaded(self, path: Path) -> TaskFile:
        name, state = path.relative_to(self.root).as_posix(), file_state(path)
        if name not in self._known or self._known[name][0] != state:
            file = TaskFile.of(path, self.root)
            if file.digest not in self._stored:  # as is a file that a task wrote, under another name or linked since
                self.objects.put_file(path, file.digest)
                self._stored.add(file.digest)
            self._known[name] = state, file
        return self._known[name][1]

    def receive(self, written: Sequence[TaskFile]) -> None:
        """Write stubs of what a task wrote, and download small files; `wait` ends when all of it is there."""
        for file in written:
            if PurePosixPath(file.name).is_absolute() or ".." in PurePosixPath(file.name).parts:
                raise InputError(f"{file.name!r}: a task wrote it outside of the work folder")
            self._arriving.append(self._threads.submit(self._receive, file))

    def _receive(self, file: TaskFile) -> None:
        path = self.root / file.name
        known = self._known.get(file.name)
        if known is None or known[1] != file or not path.exists() or known[0] != file_state(path):
            if file.bytes > STUB_BYTES and file.xxh3:
                Stub(f"{TASKS_FOLDER}/{file.digest}", file.digest, file.xxh3).write(path, file.bytes)
            else:
                self.objects.get(path, file.bytes, file.digest)
            self._stored.add(file.digest)
            if file.checksum:
                write_known_checksum(path, file.checksum)
            self._known[file.name] = file_state(path), file

    def wait(self) -> None:
        arriving, self._arriving = self._arriving, []
        for download in arriving:
            download.result()

    def clear(self) -> None:
        """Remove all objects for which no stub stands, once those that arrive are written."""
        wait(self._arriving)
        self._arriving = []
        self._known, self._stored = {}, set()
        self.objects.delete_all(but={stub.object for _, stub in stubs_below(self.root)} if self.root.exists() else ())


def _files_at(path: Path) -> Iterable[Path]:
    if path.is_file():
        candidates: Iterable[Path] = [path]
    elif path.is_dir():
        candidates = path.rglob("*")
    else:
        candidates = path.parent.glob(f"{glob.escape(path.name)}*") if path.parent.is_dir() else []
    return [candidate for candidate in candidates if not candidate.name.startswith(".") and candidate.is_file()]


# How tasks and answers travel between driver and nodes: over a shared folder, or through an object store.

# Errors of a network file system or a connection that another attempt may not meet.
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.EHOSTUNREACH}


class TaskTransport(Protocol):
    """The driver's side of one map. scratch: what each node gets with an order."""

    scratch: Path | Listing

    def order(self, task: Any) -> PickledValue:
        """The function and this task."""
        ...

    def answer(self, parcel: PickledValue) -> tuple[bool, Any]:
        """(True, the result) or (False, (exception, its traceback))."""
        ...

    def finish(self) -> None:
        """Returns when all files that tasks wrote are in the work folder."""
        ...


class SharedFolder:
    """Large messages are files in a folder that all nodes share, as they share the work folder."""

    def __init__(self, folder: Path, function: Callable[[Any], Any]):
        self.scratch: Path | Listing = folder
        self.folder, self.function = folder, function

    def order(self, task: Any) -> PickledValue:
        return packed((self.function, task), self.folder)

    def answer(self, parcel: PickledValue) -> tuple[bool, Any]:
        return unpacked(parcel)

    def finish(self) -> None:
        """Nothing: they are written there."""


class ThroughStore:
    """Files and large messages are objects; nodes share nothing but the store. folder: of this machine, temporary."""

    def __init__(self, files: DriverFiles, folder: Path, function: Callable[[Any], Any], tasks: Sequence[Any]):
        self.files, self.folder, self.function = files, folder, function
        named: set[Path] = set()
        for task in tasks:
            named |= pickle_relative_to((function, task), folder, files.root)[1]
        self.scratch: Path | Listing = files.listing(named)

    def order(self, task: Any) -> PickledValue:
        parcel, _ = pickle_relative_to((self.function, task), self.folder, self.files.root)
        return _uploaded(parcel, self.files.objects)

    def answer(self, parcel: PickledValue) -> tuple[bool, Any]:
        (answer, written), _ = unpacked_below(_downloaded(parcel, self.files.objects), self.files.root)
        self.files.receive(written)
        return answer

    def finish(self) -> None:
        self.files.wait()


def is_transient(exception: Exception) -> bool:
    """Whether another attempt at the task may succeed."""
    return isinstance(exception, TransferError) or (isinstance(exception, OSError) and exception.errno in TRANSIENT)


def run_in_view(order: PickledValue, listing: Listing) -> PickledValue:
    """One task on a node that shares nothing with the driver; the answer holds the files that it wrote.

    Raises TransferError if the store does not give or take a file."""
    with task_view(node_scratch(listing.objects.address), listing) as view, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (function, task), named = unpacked_below(_downloaded(order, listing.objects), view.root)
        for path in sorted(named):
            view.add(path)
        answer = answer_of(function, task)
        written = view.upload_written() if answer[0] else []
        answer = answer if answer[0] else (False, _with_driver_paths(answer[1], view, listing))
        parcel, _ = pickle_relative_to((answer, written), folder, view.root)
        return _uploaded(parcel, listing.objects)


def _with_driver_paths(failure: tuple[Exception, str], view: TaskView, listing: Listing) -> tuple[Exception, str]:
    """The failure, whose texts name files as the driver has them."""
    exception, text = failure
    here = str(view.root)
    exception.args = tuple(
        argument.replace(here, listing.root) if isinstance(argument, str) else argument for argument in exception.args
    )
    if isinstance(exception, OSError) and isinstance(exception.filename, str):
        exception.filename = exception.filename.replace(here, listing.root)
    return exception, text.replace(here, listing.root)


def _uploaded(parcel: PickledValue, objects: TaskObjects) -> PickledValue:
    """The parcel, whose file, if it has one, becomes an object: compressed, since each order repeats the settings."""
    if not parcel.path:
        return parcel
    content = zlib.compress(Path(parcel.path).read_bytes(), level=1)
    Path(parcel.path).unlink()
    return replace(parcel, path=objects.put_bytes(content))


def _downloaded(parcel: PickledValue, objects: TaskObjects) -> PickledValue:
    if not parcel.path:
        return parcel
    return replace(parcel, content=zlib.decompress(objects.get_bytes(parcel.path)), path="")
