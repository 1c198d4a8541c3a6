"""Parquet files of documents, the input of deduplication and text edits, with a mask of the kept rows."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.foundation.checksums import sealed_path
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import is_temporary, remove_tree, sweep, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.runtime.tasks.task_files import fetch

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
    are kept."""

    path: Path
    source: str
    priority: int
    kept: np.ndarray | Mask | None = None

    @property
    def bytes(self) -> float:
        """Size of the file: the weight of a task over this part on a progress bar."""
        try:
            return float(self.path.stat().st_size)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}; build its folder again") from error

    def kept_mask(self) -> np.ndarray:
        """bool[rows]. Raises InputError if `kept` and the file have different numbers of rows."""
        return self._kept_rows_of(num_rows_of(self))

    def _kept_rows_of(self, rows: int) -> np.ndarray:
        if self.kept is None:
            return np.ones(rows, bool)
        kept = self.kept if isinstance(self.kept, np.ndarray) else self.kept.mask()
        if len(kept) != rows:
            raise InputError(f"{self.path}: {rows} rows, but {len(kept)} values in the mask of kept rows")
        return np.asarray(kept, bool)

    def kept_digest(self) -> str:
        """SHA-256 of the mask of kept rows, or "" if all rows are kept."""
        if self.kept is None:
            return ""
        kept = self.kept if isinstance(self.kept, np.ndarray) else self.kept.mask()
        return hashlib.sha256(np.packbits(kept).tobytes()).hexdigest()

    def batches(self, wanted: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, pa.Array, pa.Array]]:
        """(row numbers int64, doc_id, text) of the kept rows, in file order, a bounded number at a time.

        wanted: bool[rows], narrows the rows further. Row groups without a wanted row are not read."""
        file = open_document_file(self.path)
        kept = self._kept_rows_of(file.metadata.num_rows)
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
    return int(open_document_file(path).metadata.num_rows)


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
    with sealed_path(path) as temporary, temporary.open("wb") as file:
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
    """Values that decide the work on one document file: source, priority, kept rows, file size, Parquet footer.

    The footer holds the sizes, offsets and statistics of every column of every row group."""
    size = int(document_file.bytes)
    with document_file.path.open("rb") as file:
        file.seek(max(size - 8, 0))
        footer = int.from_bytes(file.read(4), "little") + 8
        file.seek(max(size - footer, 0))
        digest = hashlib.sha256(file.read()).hexdigest()
    return {
        "source": document_file.source,
        "priority": document_file.priority,
        "bytes": size,
        "footer": digest,
        "kept": document_file.kept_digest() or "all",
    }
