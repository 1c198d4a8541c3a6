"""What deduplication is handed: Parquet files of documents, and which of their rows are still alive."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.errors import InputError

# Rows held in memory at a time while a part is read; text of 1,000 web pages is about 5 MB.
BATCH_ROWS = 1024


@dataclass(frozen=True)
class Part:
    """One Parquet file with (at least) the columns `doc_id` (32 hex digits) and `text`, all of one source.

    priority: the source's; 1 goes before 2, and of two duplicates the one that goes first is kept.
    alive: bool[rows], False for rows already removed (they neither remove nor are removed); None: all are alive."""

    path: Path
    source: str
    priority: int
    alive: np.ndarray | None = None

    def batches(self) -> Iterator[tuple[np.ndarray, pa.Array, pa.Array]]:
        """(row numbers int64, doc_id, text) of the living rows, in file order, a bounded number at a time."""
        start = 0
        for batch in open_part(self.path).iter_batches(BATCH_ROWS, columns=["doc_id", "text"]):
            rows = np.arange(start, start + len(batch))
            start += len(batch)
            if self.alive is not None:
                rows = rows[self.alive[rows]]
                batch = batch.take(pa.array(rows - (start - len(batch))))
            if len(rows):
                yield rows, batch.column("doc_id"), batch.column("text")


def open_part(path: Path) -> pq.ParquetFile:
    """The open file. Raises InputError if it is missing, truncated or lacks a column."""
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: no readable Parquet file ({error}); build the folder it stands in again") from error
    missing = {"doc_id", "text"} - set(file.schema_arrow.names)
    if missing:
        raise InputError(f"{path}: no column {sorted(missing)[0]!r}; columns are {file.schema_arrow.names}")
    return file


def keep_order(priorities: np.ndarray, lengths: np.ndarray, doc_ids: Sequence[str] | np.ndarray) -> np.ndarray:
    """Document indices, first to be kept first: (source priority, longer first, doc_id).

    Priorities [2, 1, 1], lengths [9, 5, 7] -> [2, 1, 0]."""
    return np.lexsort((np.asarray(doc_ids), -np.asarray(lengths), np.asarray(priorities)))
