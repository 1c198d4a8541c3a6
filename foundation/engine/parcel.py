"""Tasks and results on their way between machines: small ones as they are, large ones as the address of a file.

Ray copies messages over 100 kB through its object store and keeps them in the driver's memory, so masks and tables
of a task travel as a file of the shared work folder. The file is named by its content and is whole or absent: two runs
of a task write the same one. Paths below a `root` travel relative to it, so that each machine may have its own."""

import importlib
import io
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import xxhash

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path

MAX_MESSAGE_BYTES = 65536
ALIGNMENT = 64  # of each array in the file: compiled kernels need aligned arrays


@dataclass(frozen=True)
class Parcel:
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
    def from_bytes(cls, message: bytes) -> "Parcel":
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
# A message is written by a process of the same user (task_folder.py checks that): the list is the second of two guards.
PACKAGES_VARIABLE = "GRISTMILL_TASK_PACKAGES"
MESSAGE_CLASSES = {
    "builtins": {"set", "frozenset", "slice", "range", "complex", "bytearray", "object"},
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


def packed(value: Any, folder: Path) -> Parcel:
    """The value, of which a large one is written to a file in the folder.

    Raises TypeError or pickle.PicklingError if it cannot be pickled."""
    return packed_below(value, folder, None)[0]


def packed_below(value: Any, folder: Path, root: Path | None) -> tuple[Parcel, set[Path]]:
    """As `packed`, with the paths below the root that the value names, which become relative to it."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = _Pickler(file, root, buffers)
    pickler.dump(value)
    return _parcel(file.getbuffer(), buffers, folder), pickler.named


def _parcel(head: memoryview, buffers: Sequence[pickle.PickleBuffer], folder: Path) -> Parcel:
    pieces = [head, *(buffer.raw() for buffer in buffers)]
    sizes = tuple(piece.nbytes for piece in pieces)
    if sum(map(_padded, sizes)) <= MAX_MESSAGE_BYTES:
        held = io.BytesIO()
        _write(held, pieces)
        return Parcel(sizes, held.getvalue())
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    path = folder / f"{hasher.hexdigest()}.parcel"
    if not path.exists():
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            _write(file, pieces)
    return Parcel(sizes, b"", str(path))


def unpacked(parcel: Parcel) -> Any:
    """The value; its arrays can be written to. Raises InputError if the file is gone."""
    return _unpickled(_content(parcel), parcel, None)[0]


def unpacked_below(parcel: Parcel, root: Path) -> tuple[Any, set[Path]]:
    """As `unpacked`, of `packed_below`; with the paths that the value names, which are below this root."""
    return _unpickled(_content(parcel), parcel, root)


def _content(parcel: Parcel) -> bytearray:
    content = bytearray(parcel.content)
    if parcel.path:
        try:
            content = bytearray(os.path.getsize(parcel.path))
            with open(parcel.path, "rb") as file:
                file.readinto(content)
        except OSError as error:
            raise InputError(f"{parcel.path}: a task's file cannot be read ({error.strerror})") from error
    return content


def _unpickled(content: bytearray, parcel: Parcel, root: Path | None) -> tuple[Any, set[Path]]:
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
