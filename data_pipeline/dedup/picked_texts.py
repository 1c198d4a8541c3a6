"""A few texts of an annotated file, read without the others.

Annotated files keep their texts uncompressed in one page of each row group (`open_annotated`). Their lengths stand in
the array of document keys, so each text's place in the page is known. The length that stands before each text is
compared; where the file is written in another way, its row groups are read as a whole."""

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.dedup.folding import document_keys, keys_path
from gristmill.foundation.runtime.tasks.task_files import fetch

TEXT = "text"
LENGTH_BYTES = 4  # before each text, little end first (Parquet, encoding PLAIN)
FEW = 8  # of so many rows of a row group one is read alone


def has_picked_texts(path: Path) -> bool:
    """Whether the file is an annotated one with an array of document keys."""
    return keys_path(path).is_file()


def picked_texts(path: Path, rows: Sequence[int] | np.ndarray) -> Iterator[tuple[np.ndarray, pa.Array]]:
    """(rows, their texts) of these ascending rows of an annotated file, one row group after the other."""
    rows = np.asarray(rows, np.int64)
    with pq.ParquetFile(fetch(path)) as file:
        start = 0
        for group in range(file.num_row_groups):
            stop = start + file.metadata.row_group(group).num_rows
            inside = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start
            if len(inside):
                texts = _texts_of_group(file, path, group, inside, slice(start, stop))
                yield start + inside, pa.array(texts, pa.string())
            start = stop


def _texts_of_group(
    file: pq.ParquetFile, path: Path, group: int, inside: np.ndarray, rows: slice
) -> Sequence[bytes | str | None]:
    """inside: rows of the row group, which has these rows of the file."""
    if FEW * len(inside) <= rows.stop - rows.start:
        texts = _texts_of_page(file, path, group, inside, document_keys(path)[rows])
        if texts is not None:
            return texts
    table = file.read_row_group(group, columns=[TEXT], use_threads=False)
    return list(table.column(TEXT).combine_chunks().take(pa.array(inside)).to_pylist())


def _texts_of_page(
    file: pq.ParquetFile, path: Path, group: int, inside: np.ndarray, keys: np.ndarray
) -> list[bytes] | None:
    """None if the texts are not where they are in a row group of one uncompressed page."""
    metadata = file.metadata.row_group(group)
    column = metadata.column(file.schema_arrow.get_field_index(TEXT))
    if column.path_in_schema != TEXT or column.compression != "UNCOMPRESSED" or not keys["readable"][inside].all():
        return None
    sizes = np.where(keys["readable"], keys["bytes"].astype(np.int64) + LENGTH_BYTES, 0)
    stop = column.data_page_offset + column.total_compressed_size
    starts = stop - int(sizes.sum()) + np.cumsum(sizes) - sizes
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        texts = list(_texts_at(content, starts[inside].tolist(), keys["bytes"][inside].tolist()))
    return texts if len(texts) == len(inside) and _are_texts(texts) else None


def _texts_at(content: mmap.mmap, starts: Sequence[int], lengths: Sequence[int]) -> Iterator[bytes]:
    """The texts, up to the first one that is not there."""
    for start, length in zip(starts, lengths, strict=True):
        if start < 0 or content[start : start + LENGTH_BYTES] != length.to_bytes(LENGTH_BYTES, "little"):
            return
        yield content[start + LENGTH_BYTES : start + LENGTH_BYTES + length]


def _are_texts(texts: Sequence[bytes]) -> bool:
    try:
        for text in texts:
            text.decode()
    except UnicodeDecodeError:
        return False
    return True
