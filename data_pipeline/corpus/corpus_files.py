"""Files of a corpus by their paths in it: in a folder of this machine, or behind an address, read range by range."""

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.id_index import IDS_FILE, IDS_FOLDER, IdIndex, RowPlace
from gristmill.foundation.checksums import check_outputs
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.store.store import Store

FOOTER_BYTES = 1 << 16  # read at the end of a Parquet file at first; larger footers are read on
CACHED_FOOTERS = 256  # of stored files
CACHED_ROWS = 32


class CorpusFiles:
    """Files of a corpus in a folder. Missing files raise OSError.

    checked: files are compared with the manifest's digests before they are read for the first time, which reads all of
    them. is_complete: no file is added any more."""

    def __init__(self, folder: Path, checked: bool = True, is_complete: bool = True):
        self.folder: Path | None = folder
        self.place, self.beside = str(folder), folder.parent
        self._root, self._checked, self._is_complete = folder, checked, is_complete
        self._tables: dict[str, list[str]] = {}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with (self._root / name).open("rb") as file:
            file.seek(start)
            return file.read() if stop is None else file.read(stop - start)

    def parquet(self, name: str) -> pq.ParquetFile:
        return pq.ParquetFile(self._root / name)

    def exists(self, name: str) -> bool:
        return (self._root / name).exists()

    def size(self, name: str) -> int:
        return (self._root / name).stat().st_size

    def tables(self, folder: str) -> list[str]:
        """Paths of all Parquet files below a folder, sorted."""
        if folder not in self._tables or not self._is_complete:
            paths = (self._root / folder).rglob("*.parquet")
            names = (path.relative_to(self._root).as_posix() for path in paths if not path.name.startswith("."))
            self._tables[folder] = sorted(names)
        return self._tables[folder]

    def check(self, wanted: Callable[[str], bool]) -> None:
        """Raises InputError if a wanted file differs from the manifest."""
        if self._checked:
            check_outputs(self._root, wanted)

    @cached_property
    def index(self) -> IdIndex | None:
        """The index of ids; None in a corpus of an older version."""
        name = f"{IDS_FOLDER}/{IDS_FILE}"
        return IdIndex.open(self.read(name), self.read) if self.exists(name) else None

    def row_place(self, doc_id: str, folder: str) -> RowPlace | None:
        """The document's row in the tables of this folder, by the index."""
        places = self.index.places(doc_id, 100) if self.index is not None else []
        return next((p for p in places if p.table.startswith(f"{folder}/") and not p.is_duplicate), None)

    def rows(self, places: Mapping[str, RowPlace], columns: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
        """The rows at these places, by their keys; a row group is read once. columns: None for all."""
        if len(places) == 1:  # a page on one document asks for the same row more than once
            ((key, place),) = places.items()
            return {key: self._row(place.table, place.row, None if columns is None else tuple(columns))}
        by_table: dict[str, list[tuple[int, str]]] = {}
        for key, place in places.items():
            by_table.setdefault(place.table, []).append((place.row, key))
        rows: dict[str, dict[str, Any]] = {}
        for table, wanted in by_table.items():
            with self.parquet(table) as file:
                rows |= picked_rows(file, wanted, columns)
        if lost := sorted(places.keys() - rows.keys()):
            raise self._no_row(places[lost[0]].table, places[lost[0]].row)
        return rows

    @cached_property
    def _row(self) -> Callable[[str, int, tuple[str, ...] | None], dict[str, Any]]:
        return lru_cache(CACHED_ROWS)(self._read_row)

    def _read_row(self, table: str, row: int, columns: tuple[str, ...] | None) -> dict[str, Any]:
        with self.parquet(table) as file:
            rows = picked_rows(file, [(row, "")], columns)
        if not rows:
            raise self._no_row(table, row)
        return rows[""]

    def _no_row(self, table: str, row: int) -> InputError:
        return InputError(
            f"{self.place}/{table}: has no row {row}, to which the index of ids points; run `gristmill verify` on the "
            "corpus"
        )


class RemoteCorpusFiles(CorpusFiles):
    """Files of a published corpus in an object store, whose names and bytes are those of its manifest: what is asked
    for is read, and nothing is kept but the footers of Parquet files.

    prefix: of the corpus in the store. beside: a local folder with the lock of the run. bytes_read, reads: so far."""

    def __init__(self, store: Store, prefix: str, sizes: Mapping[str, int], beside: Path):
        self.folder, self.place, self.beside = None, f"{store.address}/{prefix}", beside
        self.bytes_read = self.reads = 0
        self._store, self._prefix, self._sizes = store, prefix, sizes
        self._counting = threading.Lock()
        self._footer: Callable[[str], pq.FileMetaData] = lru_cache(CACHED_FOOTERS)(self._read_footer)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        stop = self.size(name) if stop is None else min(stop, self.size(name))
        if stop <= start:
            return b""
        content = self._store.read_range(f"{self._prefix}/{name}", start, stop)
        if len(content) != stop - start:
            raise InputError(f"{self.place}/{name}: shorter than its manifest says; run `gristmill verify` on it")
        with self._counting:
            self.bytes_read, self.reads = self.bytes_read + len(content), self.reads + 1
        return content

    def parquet(self, name: str) -> pq.ParquetFile:
        return pq.ParquetFile(pa.PythonFile(_RangeFile(self, name)), metadata=self._footer(name), pre_buffer=True)

    def _read_footer(self, name: str) -> pq.FileMetaData:
        size = self.size(name)
        tail = self.read(name, max(size - FOOTER_BYTES, 0))
        wanted = int.from_bytes(tail[-8:-4], "little") + 8  # Parquet: the footer, its length, "PAR1"
        if len(tail) < wanted <= size:
            tail = self.read(name, size - wanted)
        try:
            return pq.read_metadata(pa.BufferReader(tail))
        except pa.ArrowException as error:
            raise InputError(f"{self.place}/{name}: not a Parquet file ({error}); run `gristmill verify`") from error

    def exists(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        if name not in self._sizes:
            raise FileNotFoundError(f"{self.place}/{name}: not in the manifest")
        return self._sizes[name]

    def tables(self, folder: str) -> list[str]:
        return sorted(name for name in self._sizes if name.startswith(f"{folder}/") and name.endswith(".parquet"))

    def check(self, wanted: Callable[[str], bool]) -> None:
        """Only the bytes of what is read are compared, when it is read."""


class _RangeFile(io.RawIOBase):
    """A file of RemoteCorpusFiles for pyarrow."""

    def __init__(self, files: RemoteCorpusFiles, name: str):
        super().__init__()
        self._files, self._name, self._at, self._size = files, name, 0, files.size(name)

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._at + size, self._size)
        content = self._files.read(self._name, self._at, stop)
        self._at += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def picked_rows(
    file: pq.ParquetFile, wanted: Sequence[tuple[int, str]], columns: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    """Key -> these columns (None: all) of its row, for (row, key) pairs; rows that the file does not have are left
    out."""
    rows: dict[str, dict[str, Any]] = {}
    first = 0
    for group in range(file.num_row_groups):
        last = first + file.metadata.row_group(group).num_rows
        inside = [(row - first, key) for row, key in wanted if first <= row < last]
        if inside:
            names = None if columns is None else list(columns)
            table = file.read_row_group(group, columns=names, use_threads=False)
            picked = table.take(pa.array([row for row, _ in inside])).to_pylist()
            rows |= {key: row for (_, key), row in zip(inside, picked, strict=True)}
        first = last
    return rows
