"""Splits of a curated corpus: which documents are held out, a pure function of a document's text and the seed, and the
reading of a split's documents."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from gristmill.data_pipeline.ledger.document_file import parquet_metadata
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.fingerprint import INCREMENT, mix_array
from gristmill.foundation.runtime.tasks.task_files import fetch

SPLITS = ("train", "validation", "test")


class SplitConfig(Config):
    """Shares of the documents held out. Which ones is decided by a hash of the text, so a document stays on its side
    when sources grow, move or are reordered, and equal texts are never on two sides."""

    validation: float = Field(default=0.01, ge=0, lt=1)
    test: float = Field(default=0.01, ge=0, lt=1)

    @model_validator(mode="after")
    def leaves_training(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(f"validation={self.validation} and test={self.test} leave no training text; lower them")
        return self


def one_split(hashes_N: np.ndarray, split: str) -> np.ndarray:
    """int8[N]: the index of this split for each document, as split_indices gives them."""
    return np.full(len(hashes_N), SPLITS.index(split), np.int8)


def split_indices(hashes_N: np.ndarray, config: SplitConfig, seed: int) -> np.ndarray:
    """int8[N]: the index into SPLITS of each document, from the uint64 hash of its text.

    The hash is mixed with the seed (SplitMix64), so another seed holds out other documents."""
    with np.errstate(over="ignore"):
        mixed = mix_array(hashes_N.astype(np.uint64) + np.uint64(seed % 2**64) * np.uint64(INCREMENT))
    at = mixed.astype(np.float64) / 2.0**64
    return np.where(at < config.validation, 1, np.where(at < config.validation + config.test, 2, 0)).astype(np.int8)


# Reads the documents of a curated corpus, CORPUS/documents/SPLIT/SOURCE-00000.parquet, in ranges of rows.

# Text that is read at once, about: a row group that holds more is read in several ranges.
SLICE_BYTES = 4_000_000


@dataclass(frozen=True)
class DocumentRange:
    """Documents that are read at once: rows first to first + documents of a row group. bytes of text: an estimate."""

    path: Path
    row_group: int
    first: int
    documents: int
    bytes: int


def document_ranges(corpus: Path, split: str, source: str) -> list[DocumentRange]:
    """The source's documents in their canonical order, file by file and row by row. Empty if it has none.

    Raises InputError if a file is no Parquet file or has no column `text`."""
    ranges: list[DocumentRange] = []
    for path in document_shards(corpus, split, source):
        try:
            metadata = parquet_metadata(path)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path}: not a readable Parquet file ({error}); run `gristmill curate` again") from error
        columns = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
        if "text" not in columns:
            raise InputError(f"{path}: no column 'text', it has {columns}; run `gristmill curate` again")
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            size = group.column(columns.index("text")).total_uncompressed_size
            ranges += _cut(path, number, group.num_rows, size)
    return ranges


def document_shards(corpus: Path, split: str, source: str) -> list[Path]:
    """The source's files of documents, in their canonical order."""
    return sorted((corpus / "documents" / split).glob(f"{source}-[0-9][0-9][0-9][0-9][0-9].parquet"))


def read(documents: DocumentRange, *columns: str) -> pa.Table:
    """Raises InputError if the row group cannot be read."""
    try:
        table = pq.ParquetFile(fetch(documents.path)).read_row_group(documents.row_group, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{documents.path}: row group {documents.row_group} cannot be read ({error}); curate again"
        ) from error
    return table.slice(documents.first, documents.documents)


def _cut(path: Path, row_group: int, rows: int, size: int) -> list[DocumentRange]:
    """Equal numbers of rows, so that a slice holds about SLICE_BYTES. 10 rows of 10 MB in all -> 4, 3 and 3 rows."""
    pieces = min(rows, max(1, -(-size // SLICE_BYTES)))
    edges = [-(-rows * piece // pieces) for piece in range(pieces + 1)] if pieces else []
    return [
        DocumentRange(path, row_group, first, last - first, size * (last - first) // rows)
        for first, last in itertools.pairwise(edges)
    ]


# Repeats training documents by the number of their removed duplicates, as FineWeb-2 does (arXiv 2506.20920).
#
# A document that many sites copied is often a good one, and a document of a very large cluster is often boilerplate,
# so how often a cluster of some size is repeated is a table of the recipe.


@dataclass(frozen=True)
class Repeats:
    """doc_ids: kept documents with removed duplicates, strings. times: int64, how often each is written."""

    doc_ids: pa.Array
    times: np.ndarray

    def counts_of(self, doc_ids: pa.ChunkedArray) -> np.ndarray:
        """int64[documents]: 1 for a document without duplicates."""
        if not len(self.doc_ids):
            return np.ones(len(doc_ids), np.int64)
        places = pc.fill_null(pc.index_in(doc_ids, value_set=self.doc_ids), -1).to_numpy()
        return np.where(places < 0, 1, self.times[places])


def read_repeats(corpus: Path, by_size: Mapping[int, int]) -> Repeats:
    """corpus: a `curate` folder, whose ledger names the kept document of every duplicate. Raises InputError without."""
    paths = sorted((corpus / "ledger").glob("*.parquet"))
    if not paths:
        raise InputError(f"{corpus / 'ledger'}: no ledger, which index.rehydrate needs; run `gristmill curate` again")
    kept = pa.concat_tables([pq.read_table(fetch(path), columns=["duplicate_of"]) for path in paths])["duplicate_of"]
    counted = pc.value_counts(pc.drop_null(kept.cast(pa.string())).combine_chunks())
    sizes = 1 + counted.field("counts").to_numpy()
    return Repeats(counted.field("values").cast(pa.string()), repeats_of(sizes, by_size))


def repeats_of(sizes: np.ndarray, by_size: Mapping[int, int]) -> np.ndarray:
    """int64: the entry of the largest size that is not above a cluster's. (1 2 4 9, {2: 2, 5: 3}) -> 1 2 2 3."""
    bounds = np.array(sorted(by_size), np.int64)
    times = np.array([1, *(by_size[size] for size in sorted(by_size))], np.int64)
    return times[np.searchsorted(bounds, sizes, side="right")]
