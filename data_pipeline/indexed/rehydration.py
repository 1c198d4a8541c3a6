"""Repeats training documents by the number of their removed duplicates, as FineWeb-2 does (arXiv 2506.20920).

A document that many sites copied is often a good one, and a document of a very large cluster is often boilerplate, so
how often a cluster of some size is repeated is a table of the recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.foundation.errors import InputError


@dataclass(frozen=True)
class Repeats:
    """doc_ids: kept documents with removed duplicates, strings. times: int64, how often each is written."""

    doc_ids: pa.Array
    times: np.ndarray

    def of(self, doc_ids: pa.ChunkedArray) -> np.ndarray:
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
    kept = pa.concat_tables([pq.read_table(path, columns=["duplicate_of"]) for path in paths])["duplicate_of"]
    counted = pc.value_counts(pc.drop_null(kept.cast(pa.string())).combine_chunks())
    sizes = 1 + counted.field("counts").to_numpy()
    return Repeats(counted.field("values").cast(pa.string()), repeats_of(sizes, by_size))


def repeats_of(sizes: np.ndarray, by_size: Mapping[int, int]) -> np.ndarray:
    """int64: the entry of the largest size that is not above a cluster's. (1 2 4 9, {2: 2, 5: 3}) -> 1 2 2 3."""
    bounds = np.array(sorted(by_size), np.int64)
    times = np.array([1, *(by_size[size] for size in sorted(by_size))], np.int64)
    return times[np.searchsorted(bounds, sizes, side="right")]
