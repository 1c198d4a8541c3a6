"""Files of a corpus, in a folder of this machine or at an address of a store, of which only what is needed is read."""

from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.store.addresses import as_os_errors, filesystem_of


class CorpusFiles(Protocol):
    """Reading by paths relative to the corpus. Missing files raise OSError."""

    location: str

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes: ...
    def parquet(self, name: str) -> pq.ParquetFile: ...
    def exists(self, name: str) -> bool: ...
    def tables(self, folder: str) -> list[str]:
        """Paths of all Parquet files below a folder, sorted."""
        ...


class CorpusInFolder:
    """A folder of this machine."""

    def __init__(self, folder: Path):
        self.folder, self.location = folder, str(folder)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            return file.read() if stop is None else file.read(stop - start)

    def parquet(self, name: str) -> pq.ParquetFile:
        return pq.ParquetFile(self.folder / name)

    def exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def tables(self, folder: str) -> list[str]:
        paths = (self.folder / folder).rglob("*.parquet")
        return sorted(path.relative_to(self.folder).as_posix() for path in paths if not path.name.startswith("."))


class CorpusAtAddress:
    """A folder at an address that fsspec opens; blocks are read by ranges."""

    def __init__(self, address: str):
        self.location = address
        self._filesystem: Any
        self._filesystem, self._root = filesystem_of(address.rstrip("/"))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with as_os_errors():
            return bytes(self._filesystem.cat_file(self._path(name), start=start, end=stop))

    def parquet(self, name: str) -> pq.ParquetFile:
        with as_os_errors():
            file = self._filesystem.open(self._path(name), "rb", cache_type="none")
            return pq.ParquetFile(file, pre_buffer=True)

    def exists(self, name: str) -> bool:
        with as_os_errors():
            return bool(self._filesystem.exists(self._path(name)))

    def tables(self, folder: str) -> list[str]:
        with as_os_errors():
            if not self._filesystem.exists(self._path(folder)):
                return []
            paths = self._filesystem.find(self._path(folder))
        names = (str(path)[len(self._root) :].lstrip("/") for path in paths)
        return sorted(name for name in names if name.endswith(".parquet"))


def stored_corpus(address: str) -> CorpusAtAddress:
    """The corpus at an address: that folder, or `curate` in it. Raises InputError if there is none."""
    for candidate in (address.rstrip("/"), f"{address.rstrip('/')}/curate"):
        files = CorpusAtAddress(candidate)
        if files.exists("counts.json"):
            return files
    raise InputError(f"{address}: no counts.json here; name the folder that the curate stage wrote")
