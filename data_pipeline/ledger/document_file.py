"""Parquet files of documents, the input of deduplication and text edits, with a mask of the kept rows, and
reading of their rows in bounded memory."""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.foundation.checksums import checksum_path, checksummed_path, read_cached
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import is_temporary, remove_tree, sweep, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.runtime.tasks.task_files import fetch, read_range

# Rows and bytes of text held in memory at a time while a file is read. Thousands of rows, because a batch of pyarrow
# costs 0.1 ms by itself; the bytes bound files of long documents.
BATCH_ROWS, BATCH_BYTES = 8192, 8_000_000
MIN_JOINED_ROWS = 1024  # row groups with so many rows to a batch are read together
MAX_JOINED_BYTES = 16_000_000  # of all columns
ID_DIGITS = 32
NO_DIGIT = 255
HEX_VALUES = np.full(256, NO_DIGIT, np.uint8)  # the value of each hex digit
for _value in range(16):
    HEX_VALUES[[ord(f"{_value:x}"), ord(f"{_value:X}")]] = _value
COUNTED_FILES = 4096  # whose numbers of rows a process knows
HEX_DIGITS = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint8).reshape(256, 2)


class Mask(Protocol):
    """A mask of rows that is loaded when it is needed."""

    def mask(self) -> np.ndarray:
        """bool[rows]"""
        ...


@dataclass(frozen=True)
class DocumentFile:
    """One Parquet file with (at least) the columns `doc_id` (32 hex digits) and `text`, all of one source.

    priority: the source's; 1 goes before 2, and of two duplicates the one that goes first is kept.
    kept: bool[rows], False for rows that an earlier step removed (they are ignored), or what loads it; None: all rows
    are kept. mask_digest: its digest, where that is known."""

    path: Path
    source: str
    priority: int
    kept: np.ndarray | Mask | None = None
    mask_digest: str = ""

    @property
    def bytes(self) -> float:
        """Size of the file: the weight of a task over this part on a progress bar."""
        try:
            return float(self.path.stat().st_size)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}; build its folder again") from error

    def kept_mask(self) -> np.ndarray:
        """bool[rows]. Raises InputError if `kept` and the file have different numbers of rows."""
        return self.kept_mask_of(num_rows_of(self))

    def kept_mask_of(self, rows: int) -> np.ndarray:
        """kept_mask of a file that has so many rows, which is not opened."""
        if self.kept is None:
            return np.ones(rows, bool)
        kept = self.kept if isinstance(self.kept, np.ndarray) else self.kept.mask()
        if len(kept) != rows:
            raise InputError(f"{self.path}: {rows} rows, but {len(kept)} values in the mask of kept rows")
        return np.asarray(kept, bool)

    @cached_property
    def kept_digest(self) -> str:
        """SHA-256 of the mask of kept rows, or "" if all rows are kept."""
        if self.kept is None or self.mask_digest:
            return self.mask_digest
        kept = self.kept if isinstance(self.kept, np.ndarray) else self.kept.mask()
        return hashlib.sha256(np.packbits(kept).tobytes()).hexdigest()

    @cached_property
    def kept_rows(self) -> str | None:
        """Digest of the file's content and of which rows are kept; None if the file has no checksum file."""
        known = read_cached(checksum_path(self.path))
        if not isinstance(known, dict) or "xxh3" not in known:
            return None
        return f"{known['xxh3']} {self.kept_digest}"

    def batches(self, wanted: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, pa.Array, pa.Array]]:
        """(row numbers int64, doc_id, text) of the kept rows, in file order, a bounded number at a time.

        wanted: bool[rows], narrows the rows further. Row groups without a wanted row are not read."""
        file = open_document_file(self.path)
        kept = self.kept_mask_of(file.metadata.num_rows)
        kept = kept if wanted is None else kept & wanted
        ends = np.cumsum([0, *(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))])
        groups = [group for group, (start, end) in enumerate(pairwise(ends.tolist())) if kept[start:end].any()]
        sizes = [(batch_rows(file, group), file.metadata.row_group(group).total_byte_size) for group in groups]
        for run, size in _runs(groups, sizes):
            yield from self._batches_of_groups(file, run, size, int(ends[run[0]]), kept)

    def _batches_of_groups(self, file, groups, size, start, kept) -> Iterator[tuple[np.ndarray, pa.Array, pa.Array]]:
        """groups: consecutive row groups; size: rows of a batch; start: the first group's first row."""
        try:
            for batch in file.iter_batches(size, row_groups=groups, columns=["doc_id", "text"], use_threads=False):
                mask = kept[start : start + len(batch)]
                rows = start + np.flatnonzero(mask)
                start += len(batch)
                if len(rows):
                    kept_rows = batch if mask.all() else batch.filter(pa.array(mask))
                    yield rows, kept_rows.column("doc_id"), kept_rows.column("text")
        except (OSError, pa.ArrowInvalid) as error:
            said = (
                f"row group {groups[0]}" if len(groups) == 1 else f"one of the row groups {groups[0]} to {groups[-1]}"
            )
            raise InputError(f"{self.path}: {said} cannot be read ({error}); build it again") from error


def _runs(groups: list[int], sizes: list[tuple[int, int]]) -> list[tuple[list[int], int]]:
    """(consecutive row groups, rows of a batch) that are read together, where batches need not be small and the groups
    have at most MAX_JOINED_BYTES, since pyarrow holds all of them until the last is read. sizes: rows of a batch and
    bytes of each group. [0, 1, 3], [(8192, 9), (5000, 9), (40, 9)] -> [([0, 1], 5000), ([3], 40)]."""
    runs: list[tuple[list[int], int]] = []
    joined_bytes = 0
    for group, (size, num_bytes) in zip(groups, sizes, strict=True):
        joined_bytes += num_bytes
        follows = bool(runs) and group == runs[-1][0][-1] + 1 and joined_bytes <= MAX_JOINED_BYTES
        if follows and min(size, runs[-1][1]) >= MIN_JOINED_ROWS:
            runs[-1] = ([*runs[-1][0], group], min(size, runs[-1][1]))
        else:
            runs.append(([group], size))
            joined_bytes = num_bytes
    return runs


def batch_rows(file: pq.ParquetFile, group: int) -> int:
    """Rows of the row group that hold about BATCH_BYTES of text, at most BATCH_ROWS."""
    metadata = file.metadata.row_group(group)
    columns = (metadata.column(index) for index in range(metadata.num_columns))
    num_bytes = next(column.total_uncompressed_size for column in columns if column.path_in_schema == "text")
    return int(min(max(BATCH_BYTES * metadata.num_rows // max(num_bytes, 1), 1), BATCH_ROWS))


def open_document_file(path: Path) -> pq.ParquetFile:
    """The open file. Raises InputError if it is missing, truncated or lacks a column."""
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: no readable Parquet file ({error}); build its folder again") from error
    missing = {"doc_id", "text"} - set(file.schema_arrow.names)
    if missing:
        raise InputError(f"{path}: no column {sorted(missing)[0]!r}; columns are {file.schema_arrow.names}")
    return file


def num_rows_of(document_file: DocumentFile) -> int:
    """The rows of the file, kept or not. An unchanged file is opened once by a process."""
    path = document_file.path
    try:
        status = path.stat()
    except OSError:
        return int(open_document_file(path).metadata.num_rows)  # raises
    return _num_rows(path, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=COUNTED_FILES)
def _num_rows(path: Path, *_: int) -> int:
    return int((_stub_metadata(path) or open_document_file(path).metadata).num_rows)


def parquet_metadata(path: Path) -> pq.FileMetaData:
    """The metadata of a Parquet file; of one that is in the store nothing else is downloaded."""
    return _stub_metadata(path) or pq.read_metadata(path)


def _stub_metadata(path: Path) -> pq.FileMetaData | None:
    if read_range(path, 0, 0) is None:
        return None
    return pq.read_metadata(pa.BufferReader(_footer(path, path.stat().st_size)))


def _footer(path: Path, size: int) -> bytes:
    """The end of a Parquet file of so many bytes, from its metadata on."""

    def read(start: int) -> bytes:
        if (content := read_range(path, max(start, 0), size)) is not None:
            return content
        with path.open("rb") as file:
            file.seek(max(start, 0))
            return file.read()

    return read(size - int.from_bytes(read(size - 8)[:4], "little") - 8)


def utf8_of(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """(bytes uint8, offsets int64[texts + 1]) of a string array, without a copy of the bytes. A null is empty."""
    if texts.null_count:
        texts = texts.fill_null("")
    large = texts.cast(pa.large_string())
    _, offsets, data = large.buffers()
    bounds = np.frombuffer(offsets, np.int64)[large.offset : large.offset + len(large) + 1]
    return np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8), bounds


def packed_ids(doc_ids: pa.Array | pa.ChunkedArray, path: Path) -> np.ndarray:
    """uint64[documents, 2] of document ids, big end first: they sort as the hex digits do.

    Raises InputError if one is not 32 hex digits."""
    ids = doc_ids.combine_chunks() if isinstance(doc_ids, pa.ChunkedArray) else doc_ids
    data, bounds = utf8_of(ids)
    digits = HEX_VALUES[data[bounds[0] : bounds[-1]]]
    if (np.diff(bounds) != ID_DIGITS).any() or (digits == NO_DIGIT).any():
        wrong = next((d for d in ids.to_pylist() if not _is_doc_id(d)), None)
        raise InputError(f"{path}: doc_id {wrong!r} is not 32 hex digits; write the corpus with `gristmill curate`")
    return (digits[0::2] << 4 | digits[1::2]).view(">u8").astype(np.uint64).reshape(-1, 2)


def _is_doc_id(digits: str | None) -> bool:
    return digits is not None and len(digits) == ID_DIGITS and all(c in "0123456789abcdefABCDEF" for c in digits)


def sortable_ids(packed: np.ndarray) -> np.ndarray:
    """Packed ids as values of 16 bytes that sort as the ids do."""
    return np.ascontiguousarray(packed.astype(">u8")).view("S16").ravel()


def id_places(ids: np.ndarray, among: np.ndarray, is_sorted: bool = True) -> np.ndarray:
    """int64[N]: the place of each packed id among others, -1 where it is not there."""
    if not len(among):
        return np.full(len(ids), -1, np.int64)
    others, wanted = sortable_ids(among), sortable_ids(ids)
    order = np.arange(len(others)) if is_sorted else np.argsort(others, kind="stable")
    place = order[np.minimum(np.searchsorted(others[order], wanted), len(others) - 1)]
    return np.where(others[place] == wanted, place, -1)


def unpacked_ids(packed: np.ndarray) -> pa.Array:
    """The hex digits of packed ids, as a string array."""
    digits = HEX_DIGITS[packed.astype(">u8").view(np.uint8).ravel()]
    bounds = np.arange(len(packed) + 1, dtype=np.int64) * ID_DIGITS
    strings = pa.LargeStringArray.from_buffers(len(packed), pa.py_buffer(bounds), pa.py_buffer(digits.tobytes()))
    return strings.cast(pa.string())


def keep_order(priorities: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Document indices, first to be kept first: (source priority, longer first, doc_id). ids are packed.

    Priorities [2, 1, 1], lengths [9, 5, 7] -> [2, 1, 0]."""
    return np.lexsort((ids[:, 1], ids[:, 0], -lengths, priorities))


# Arrays as files that are whole or absent, with the same bytes for the same values.

IDENTITY_FILE = "identity.json"


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes one .npy file, whole or not at all."""
    with checksummed_path(path) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array(file, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)


def load_array(path: Path, mapped: bool = False) -> np.ndarray:
    """The array of one .npy file; mapped: pages are read as they are touched. Raises InputError if it is damaged."""
    try:
        return np.load(fetch(path), mmap_mode="r" if mapped else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: no readable array ({error}); delete its folder and run again") from error


def open_workspace(folder: Path, identity: dict[str, Any]) -> None:
    """Makes `folder` the workspace of the work that `identity` describes: what that work left there is kept.

    What other work of this kind left there is removed, and so are files that a kill left half written. Raises
    InputError if the folder holds anything else."""
    mark = folder / IDENTITY_FILE
    content = canonical_json(identity)
    folder.mkdir(parents=True, exist_ok=True)
    others = [path for path in folder.iterdir() if path != mark and not is_temporary(path)]
    if others and not mark.exists():
        raise InputError(f"{folder}: holds {others[0].name}, which is not deduplication's; name an empty folder")
    if not mark.exists() or mark.read_bytes() != content:
        write_atomic(mark, b"")  # the identity of no work, so that a kill in between does not keep half of them
        for path in others:
            remove_tree(path) if path.is_dir() else path.unlink()
        write_atomic(mark, content)
    sweep(folder)


def document_file_identity(document_file: DocumentFile) -> dict[str, Any]:
    """Values that decide the work on one document file: source, priority, kept rows, file size, and the digest in its
    checksum file, without one of the Parquet footer.

    The footer holds the sizes, offsets and statistics of every column of every row group."""
    size, checksum = int(document_file.bytes), read_cached(checksum_path(document_file.path))
    digest = checksum.get("xxh3") if isinstance(checksum, dict) else None
    if digest is None:
        digest = hashlib.sha256(_footer(document_file.path, size)).hexdigest()
    return {
        "source": document_file.source,
        "priority": document_file.priority,
        "bytes": size,
        "footer": digest,
        "kept": document_file.kept_digest or "all",
    }


# Rows of annotated files, read and regrouped in bounded memory, and the split of rows into shards of a given size.


@dataclass(frozen=True)
class RowRange:
    """Rows of one Parquet file: of the rows from `start` on, those whose value in mask (bool[N]) is True."""

    path: Path
    start: int
    mask: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """int64[]: the row numbers, ascending."""
        return self.start + np.flatnonzero(self.mask)

    @classmethod
    def span(cls, path: Path, start: int, stop: int) -> "RowRange":
        """All rows start..stop - 1."""
        return cls(path, start, np.ones(stop - start, bool))

    @classmethod
    def of_rows(cls, path: Path, rows: np.ndarray) -> "RowRange":
        """The range of these ascending row numbers."""
        mask = np.zeros(int(rows[-1] - rows[0]) + 1 if len(rows) else 0, bool)
        mask[rows - rows[:1]] = True
        return cls(path, int(rows[0]) if len(rows) else 0, mask)


def spans_of_runs(sizes: Sequence[int], runs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """Spans of each run (start, stop) of the rows of files with so many rows: (file, first, last + 1) in each
    file that it has rows of. Sizes [2, 0, 3], runs [(1, 4)] -> [[(0, 1, 2), (2, 0, 2)]]."""
    starts = np.cumsum([0, *sizes]).tolist()
    spans_of = []
    for start, stop in runs:
        first, last = max(bisect_right(starts, start) - 1, 0), bisect_left(starts, stop)
        spans = [
            (file, max(start - starts[file], 0), min(stop - starts[file], sizes[file])) for file in range(first, last)
        ]
        spans_of.append([span for span in spans if span[2] > span[1]])
    return spans_of


def read_rows(row_range: RowRange, columns: Sequence[str]) -> pa.Table:
    """The rows of the range. Row groups that hold none of them are not read."""
    tables = list(row_range_groups(row_range, columns))
    if tables:
        return pa.concat_tables(tables)
    return pq.read_schema(row_range.path).empty_table().select(list(columns))


class RowGroups:
    """Reads columns of row groups and holds the last one, in which the next range to be read often begins."""

    def __init__(self, columns: Sequence[str]):
        self._columns = list(columns)
        self._last: tuple[Path, int] | None = None
        self._table: pa.Table | None = None

    def read(self, file: pq.ParquetFile, path: Path, group: int) -> pa.Table:
        if self._table is None or self._last != (path, group):
            self._table = None  # so that two are never in memory at once
            self._table = file.read_row_group(group, columns=self._columns, use_threads=False)
            self._last = path, group
        return self._table


def row_range_groups(row_range: RowRange, columns: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of the range, one row group of the file at a time."""
    for table, first in row_groups_of_range(row_range, RowGroups(columns)):
        mask = row_range.mask[first : first + len(table)]
        yield table if mask.all() else table.filter(pa.array(mask))


def row_groups_of_range(row_range: RowRange, reader: RowGroups) -> Iterator[tuple[pa.Table, int]]:
    """(all rows of a row group from the range's start up to its end, place of the first in the mask), for each row
    group with a row of the range."""
    with pq.ParquetFile(fetch(row_range.path)) as file:
        start = -row_range.start  # of the row group, counted from the start of the range
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            first, last = max(start, 0), max(end, 0)
            if row_range.mask[first:last].any():
                size = len(row_range.mask[first:last])
                yield reader.read(file, row_range.path, group).slice(first - start, size), first
            start = end


def row_groups(
    tables: Iterable[pa.Table], max_rows: int, max_bytes: int | None = None, size_column: str = "num_bytes"
) -> Iterator[pa.Table]:
    """The same rows in tables of one chunk, each with as many as fit into max_rows and max_bytes, and at least one.

    size_column: int64, the bytes that count for max_bytes. How the rows were spread over `tables` decides nothing."""
    waiting: list[pa.Table] = []
    rows = num_bytes = 0
    for table in tables:
        sizes = np.ones(len(table), np.int64) if max_bytes is None else table.column(size_column).to_numpy()
        limit = max_rows if max_bytes is None else max_bytes
        before = np.concatenate([[0], np.cumsum(sizes)])
        start = 0
        while start < len(table):
            fitting = int(np.searchsorted(before, before[start] + limit - num_bytes, side="right")) - 1
            stop = min(max(fitting, start if waiting else start + 1), start + max_rows - rows)
            if stop > start:
                waiting.append(table.slice(start, stop - start))
                rows, num_bytes = rows + stop - start, num_bytes + int(before[stop] - before[start])
            start = stop
            if start < len(table) or rows == max_rows:
                yield pa.concat_tables(waiting).combine_chunks()
                waiting, rows, num_bytes = [], 0, 0
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


# A file of few rows is not compressed: zstd begins anew for each column, which is two thirds of the time to write or
# read such a file (2.8 against 0.9 ms for a row of 100 columns), and the footer is most of it.
TINY_ROWS, TINY_BYTES = 64, 32_768


def is_tiny(table: pa.Table, size_column: str | None = None) -> bool:
    """Whether a file with these rows alone is not compressed. size_column: bytes of text of each row."""
    if len(table) > TINY_ROWS:
        return False
    return size_column is None or int(table.column(size_column).to_numpy().sum()) <= TINY_BYTES


def tiny_or_not(tables: Iterator[pa.Table], size_column: str | None = None) -> tuple[bool, Iterator[pa.Table]]:
    """(whether a file of these row groups is not compressed, the row groups)."""
    first = next(tables, None)
    if first is None:
        return True, iter(())
    if not is_tiny(first, size_column):
        return False, chain([first], tables)
    second = next(tables, None)
    return second is None, chain([first], tables) if second is None else chain([first, second], tables)
