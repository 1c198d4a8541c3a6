"""Parquet files of documents, the input of deduplication and text edits, with a mask of the kept rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.foundation.errors import InputError

# Rows held in memory at a time while a part is read; text of 1,000 web pages is about 5 MB.
BATCH_ROWS = 1024


@dataclass(frozen=True)
class DocumentFile:
    """One Parquet file with (at least) the columns `doc_id` (32 hex digits) and `text`, all of one source.

    priority: the source's; 1 goes before 2, and of two duplicates the one that goes first is kept.
    kept: bool[rows], False for rows that an earlier step removed (they are ignored); None: all rows are kept."""

    path: Path
    source: str
    priority: int
    kept: np.ndarray | None = None

    @property
    def bytes(self) -> float:
        """Size of the file: the weight of a task over this part on a progress bar."""
        try:
            return float(self.path.stat().st_size)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}; build the folder it stands in again") from error

    def kept_mask(self) -> np.ndarray:
        """bool[rows]. Raises InputError if `kept` and the file have different numbers of rows."""
        rows = open_document_file(self.path).metadata.num_rows
        if self.kept is None:
            return np.ones(rows, bool)
        if len(self.kept) != rows:
            raise InputError(f"{self.path}: {rows} rows, but {len(self.kept)} values in the mask of kept rows")
        return np.asarray(self.kept, bool)

    def batches(self, wanted: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, pa.Array, pa.Array]]:
        """(row numbers int64, doc_id, text) of the kept rows, in file order, a bounded number at a time.

        wanted: bool[rows], narrows the rows further. Row groups without a wanted row are not read."""
        kept = self.kept_mask() if wanted is None else self.kept_mask() & wanted
        file = open_document_file(self.path)
        start = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if kept[start : start + rows].any():
                yield from self._batches_of_group(file, group, start, kept)
            start += rows

    def _batches_of_group(self, file, group, start, kept) -> Iterator[tuple[np.ndarray, pa.Array, pa.Array]]:
        try:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=["doc_id", "text"]):
                mask = kept[start : start + len(batch)]
                rows = start + np.flatnonzero(mask)
                start += len(batch)
                if len(rows):
                    kept = batch if mask.all() else batch.filter(pa.array(mask))
                    yield rows, kept.column("doc_id"), kept.column("text")
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(f"{self.path}: row group {group} cannot be read ({error}); build it again") from error


def open_document_file(path: Path) -> pq.ParquetFile:
    """The open file. Raises InputError if it is missing, truncated or lacks a column."""
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: no readable Parquet file ({error}); build the folder it stands in again") from error
    missing = {"doc_id", "text"} - set(file.schema_arrow.names)
    if missing:
        raise InputError(f"{path}: no column {sorted(missing)[0]!r}; columns are {file.schema_arrow.names}")
    return file


def utf8_of(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """(bytes uint8, offsets int64[texts + 1]) of a string array, without a copy of the bytes. A null is empty."""
    if texts.null_count:
        texts = texts.fill_null("")
    large = texts.cast(pa.large_string())
    _, offsets, data = large.buffers()
    bounds = np.frombuffer(offsets, np.int64)[large.offset : large.offset + len(large) + 1]
    return np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8), bounds


def packed_ids(doc_ids: pa.Array, path: Path) -> np.ndarray:
    """uint64[documents, 2] of document ids, big end first: they sort as the hex digits do.

    Raises InputError if one is not 32 hex digits."""
    digits = doc_ids.to_pylist()
    try:
        raw = bytes.fromhex("".join(digits))
    except (ValueError, TypeError):
        raw = b""
    if len(raw) != 16 * len(digits) or any(len(d) != 32 for d in digits):
        wrong = next((d for d in digits if not _is_doc_id(d)), None)
        raise InputError(f"{path}: doc_id {wrong!r} is not 32 hex digits; write the corpus with `gristmill curate`")
    return np.frombuffer(raw, ">u8").astype(np.uint64).reshape(-1, 2)


def _is_doc_id(digits: str | None) -> bool:
    return digits is not None and len(digits) == 32 and all(c in "0123456789abcdef" for c in digits)


def unpacked_ids(packed: np.ndarray) -> list[str]:
    """The hex digits of packed ids."""
    digits = packed.astype(">u8").tobytes().hex()
    return [digits[i : i + 32] for i in range(0, len(digits), 32)]


def keep_order(priorities: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Document indices, first to be kept first: (source priority, longer first, doc_id). ids are packed.

    Priorities [2, 1, 1], lengths [9, 5, 7] -> [2, 1, 0]."""
    return np.lexsort((ids[:, 1], ids[:, 0], -lengths, priorities))
