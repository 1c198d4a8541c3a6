"""Large files of an object store as sparse local files: what is read is downloaded, block by block, and stays."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.store import Store

BLOCK_BYTES = 4 << 20


class BlockFile:
    """A file whose missing blocks are downloaded. path: of the sparse file. mark: JSON that names the object; beside it
    is one byte a block, which is 1 once the block is there. Several processes may read at once."""

    def __init__(self, path: Path, mark: Path):
        self.path, self.mark = path, mark
        try:
            content = orjson.loads(mark.read_bytes())
            self._address, self._name, self.num_bytes = content["address"], content["object"], content["bytes"]
            self._block_bytes = content["block_bytes"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{mark}: not readable ({error}); remove {path} and {mark.parent}") from error

    @classmethod
    def create(cls, path: Path, mark: Path, source: tuple[Store, str], num_bytes: int) -> "BlockFile":
        """source: store and name of the object. The mark is written last."""
        blocks = -(-num_bytes // BLOCK_BYTES)
        for place, size in ((path, num_bytes), (_map_path(mark), blocks)):
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as file:
                file.truncate(size)
        content = {"address": source[0].address, "object": source[1], "bytes": num_bytes, "block_bytes": BLOCK_BYTES}
        write_atomic(mark, orjson.dumps(content))
        return cls(path, mark)

    @cached_property
    def _store(self) -> Store:
        return Store(self._address)

    @cached_property
    def _present(self) -> np.ndarray:
        return np.memmap(_map_path(self.mark), np.uint8, "r+") if self.num_bytes else np.empty(0, np.uint8)

    @cached_property
    def content(self) -> np.ndarray:
        """uint8[num_bytes]: of what is not there yet zeros; call `load` first."""
        return np.memmap(self.path, np.uint8, "r") if self.num_bytes else np.empty(0, np.uint8)

    def load(self, start: int, stop: int) -> None:
        """The bytes start..stop - 1 are there. Raises InputError if the store does not give them."""
        first, last = start // self._block_bytes, -(-stop // self._block_bytes)
        missing = first + np.flatnonzero(self._present[first:last] == 0) if stop > start else []
        if not len(missing):
            return
        with _opened(self.path) as descriptor:
            for block in np.asarray(missing).tolist():
                begin = block * self._block_bytes
                end = min(begin + self._block_bytes, self.num_bytes)
                content = self._store.read_range(self._name, begin, end)
                if len(content) != end - begin:
                    raise InputError(f"{self._address}/{self._name}: shorter than its manifest says; verify it")
                os.pwrite(descriptor, content, begin)
                os.fdatasync(descriptor)
                self._present[block] = 1


class BlockArray:
    """One-dimensional array in a BlockFile; slices are NumPy arrays, whose blocks are downloaded."""

    def __init__(self, file: BlockFile, dtype: np.dtype):
        self._file, self.dtype = file, dtype

    def __len__(self) -> int:
        return self._file.num_bytes // self.dtype.itemsize

    def __getitem__(self, key: Any) -> Any:
        first, last, _ = key.indices(len(self)) if isinstance(key, slice) else (int(key), int(key) + 1, 1)
        self._file.load(first * self.dtype.itemsize, max(last, first) * self.dtype.itemsize)
        return self._file.content.view(self.dtype)[key]

    def with_ranges(self, firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The whole array; these ranges of it are there."""
        for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True):
            self._file.load(first * self.dtype.itemsize, (first + length) * self.dtype.itemsize)
        return np.asarray(self._file.content.view(self.dtype))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def _map_path(mark: Path) -> Path:
    return mark.with_suffix(".blocks")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
