"""Counts, histograms and samples from a corpus's sketches, in memory: the same work for any number of documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.data_pipeline.corpus.corpus_files import CorpusFiles
from gristmill.data_pipeline.corpus.merged_sketches import merge_counts, merge_samples, sketch_tasks
from gristmill.data_pipeline.corpus.sketches import (
    ANNOTATED_FOLDER,
    COUNTS_FILE,
    HLL_BITS,
    SAMPLES_FILE,
    SKETCHES_FOLDER,
    SketchTask,
    bin_edges,
    distinct_estimate,
    sketch_documents,
    sketch_ledgers,
)

MAX_ROWS = 50


@dataclass(frozen=True)
class Histogram:
    """Documents by value: documents[i] of them have low[i] <= value < high[i] (or nearly, see bin_edges)."""

    low: np.ndarray
    high: np.ndarray
    documents: np.ndarray

    @property
    def total(self) -> int:
        return int(self.documents.sum())

    def below(self, value: float) -> float:
        """About how many documents have a lower value; inside a bin they are taken to lie evenly."""
        width = np.where(self.high > self.low, self.high - self.low, 1.0)
        return float((np.clip((value - self.low) / width, 0, 1) * self.documents).sum())


class Sketches:
    """The counts by kind, and the samples, of all documents of a corpus."""

    def __init__(self, counts: pa.Table, samples: pa.Table):
        kinds = counts.column("kind").combine_chunks().dictionary_encode()
        codes, names = kinds.indices.to_numpy(zero_copy_only=False), kinds.dictionary.to_pylist()
        starts = np.searchsorted(codes, np.arange(len(names) + 1))  # sorted by kind
        self._by_kind = {
            name: counts.slice(starts[n], starts[n + 1] - starts[n]).combine_chunks() for n, name in enumerate(names)
        }
        self._empty = counts.slice(0, 0)
        self.samples = samples

    @classmethod
    def read(cls, files: CorpusFiles) -> "Sketches | None":
        """The merged sketches of a finished corpus; None where there are none."""
        names = [f"{SKETCHES_FOLDER}/{name}" for name in (COUNTS_FILE, SAMPLES_FILE)]
        if not all(map(files.exists, names)):
            return None
        counts, samples = (files.parquet(name).read() for name in names)
        return cls(counts, samples)

    @classmethod
    def of_shards(cls, folder: Path) -> "Sketches":
        """The sketches of the shards that are there: of a run that has not ended, or an older corpus."""
        return cls._of_tasks(sketch_tasks(folder))

    @classmethod
    def of_annotated(cls, cache: Path, paths: Sequence[Path]) -> "Sketches":
        """The sketches of annotated files in the cache of a run that has no shards yet."""
        names = [(f"{ANNOTATED_FOLDER}/{path.stem}", path.stem.rpartition("-")[0]) for path in paths]
        return cls._of_tasks([SketchTask(cache, name, source) for name, source in names])

    @classmethod
    def _of_tasks(cls, tasks: Sequence[SketchTask]) -> "Sketches":
        counts, samples = merge_counts([]), merge_samples([])
        for task in tasks:
            shard = sketch_ledgers([task]) if task.is_ledger else sketch_documents([task])
            counts, samples = merge_counts([counts, shard[0]]), merge_samples([samples, shard[1]])
        return cls(counts, samples)

    def of_kind(self, kind: str, **equal: str) -> pa.Table:
        """The rows of a kind in which these columns have these values; "" stands for any."""
        table = self._by_kind.get(kind, self._empty)
        for name, value in equal.items():
            if value:
                table = table.filter(pc.equal(table.column(name), value))
        return table

    def outcomes(self, **equal: str) -> list[dict[str, Any]]:
        """Ledger rows by source, outcome, split, step and rule: documents and bytes."""
        return self.of_kind("outcome", **equal).to_pylist()

    def num_documents(self, language: str = "", **equal: str) -> int:
        """Ledger rows with these values; with a language the documents of the corpus in it."""
        table = self.of_kind("documents", language=language, **equal) if language else self.of_kind("outcome", **equal)
        return int(pc.sum(table.column("documents")).as_py() or 0)

    def languages(self) -> list[dict[str, Any]]:
        return self._most(self.of_kind("documents"), "language")

    def hosts(self) -> list[dict[str, Any]]:
        return self._most(self.of_kind("host"), "name")

    def host_documents(self, host: str) -> int | None:
        """Documents of the corpus from this host; None if it is not listed."""
        rows = self.of_kind("host", name=host)
        return int(pc.sum(rows.column("documents")).as_py()) if len(rows) else None

    def num_hosts(self) -> tuple[int, int]:
        """(about how many hosts there are, documents of hosts that are not listed)."""
        registers = np.zeros(1 << HLL_BITS, np.int64)
        table = self.of_kind("host_register")
        registers[table.column("bin").to_numpy()] = table.column("documents").to_numpy()
        return distinct_estimate(registers), int(pc.sum(self.of_kind("host_rest").column("documents")).as_py() or 0)

    def _most(self, table: pa.Table, column: str) -> list[dict[str, Any]]:
        sums = table.group_by(column, use_threads=False).aggregate([("documents", "sum"), ("bytes", "sum")])
        sums = sums.sort_by([("documents_sum", "descending"), (column, "ascending")]).slice(0, MAX_ROWS)
        return [
            {"name": row[column], "documents": row["documents_sum"], "bytes": row["bytes_sum"]}
            for row in sums.to_pylist()
        ]

    def clusters(self, start: int, stop: int) -> list[dict[str, Any]]:
        """The kept documents with the most duplicates."""
        rows = self.of_kind("cluster").sort_by([("documents", "descending"), ("name", "ascending")])
        return [
            {"doc_id": row["name"], "duplicates": row["documents"]}
            for row in rows.slice(start, stop - start).to_pylist()
        ]

    def histogram(self, kind: str, **equal: str) -> Histogram:
        table = self.of_kind(kind, **equal).group_by("bin", use_threads=False).aggregate([("documents", "sum")])
        table = table.sort_by("bin")
        low, high = bin_edges(table.column("bin").to_numpy())
        return Histogram(low, high, table.column("documents_sum").to_numpy())

    def sampled(self, **equal: str) -> pa.Table:
        """The samples in which these columns have these values; "" stands for any."""
        table = self.samples
        for name, value in equal.items():
            if value:
                table = table.filter(pc.equal(table.column(name), value))
        return table

    def most_placeholders(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Sampled documents with the most placeholders for personal data; the first ones are those of the corpus."""
        rows = self.samples.filter(pc.greater(pc.fill_null(self.samples.column("replaced"), 0), 0))
        rows = rows.sort_by([("replaced", "descending"), ("doc_id", "ascending")]).slice(start, stop - start)
        return rows.select(["doc_id", "split", "replaced", "excerpt"]).to_pylist()

    def values(self, source: str, signal: str) -> list[dict[str, Any]]:
        """Sampled kept documents of a source with their value of a signal: doc_id, value, kept, excerpt."""
        table = self.sampled(source=source, outcome="kept")
        values = pc.map_lookup(table.column("signals").combine_chunks(), pa.scalar(signal), "first")
        return _valued(table, values.to_numpy(zero_copy_only=False), True)

    def alone(self, source: str, rule: str) -> list[dict[str, Any]]:
        """Sampled documents of a source that failed no other rule, as `values` gives them."""
        table = self.sampled(source=source, rule=rule)
        table = table.filter(pc.fill_null(table.column("alone"), False))
        return _valued(table, table.column("value").to_numpy(), False)


def _valued(table: pa.Table, values: np.ndarray, kept: bool) -> list[dict[str, Any]]:
    known = np.isfinite(values.astype(np.float64))
    rows: Sequence[Mapping[str, Any]] = table.select(["doc_id", "excerpt"]).filter(pa.array(known)).to_pylist()
    return [dict(row) | {"value": float(v), "kept": kept} for row, v in zip(rows, values[known], strict=True)]
