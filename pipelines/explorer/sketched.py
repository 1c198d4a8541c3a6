"""Counts, histograms and samples from a corpus's sketches, in memory: the same work for any number of documents.

A moved threshold is forecast from the histograms and then counted in a scan."""

import operator
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
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
    SAMPLES_FILE,
    SKETCHES_FOLDER,
    SketchTask,
    bin_edges,
    sketch_documents,
    sketch_ledgers,
)
from gristmill.data_pipeline.corpus.small_sources import TableSlice, is_batch_file, rows_by_source, source_in_name
from gristmill.data_pipeline.filters.profiles import WANTED_LANGUAGE
from gristmill.foundation.errors import InputError
from gristmill.foundation.fingerprint import HLL_BITS, distinct_estimate

MAX_ROWS = 50


def _annotated_tasks(cache: Path, path: Path) -> list[SketchTask]:
    """The task of an annotated file; of the file of a batch one for each source."""
    name = f"{ANNOTATED_FOLDER}/{path.stem}"
    if not is_batch_file(path):
        return [SketchTask(cache, name, source_in_name(path))]
    return [
        SketchTask(cache, name, source, stored=TableSlice(path, start, stop))
        for source, start, stop in rows_by_source(path)
    ]


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
        return cls._of_tasks([task for path in paths for task in _annotated_tasks(cache, path)])

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


# A threshold moved: what it would keep, at once from histograms and then exactly from a scan of one column.

COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}
HISTOGRAM_BINS = 60
NEAREST = 5
WAIT_SECONDS = 0.1  # for the exact counts, before a page is shown with estimates


@dataclass(frozen=True)
class Threshold:
    """A rule of a source, with the value that is asked about. keep: the comparison that a kept document's signal
    passes, with the threshold on its right."""

    source: str
    rule: str
    signal: str
    keep: str
    threshold: float
    value: float

    def passes(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(COMPARISONS[self.keep](values, self.value), bool)


@dataclass(frozen=True)
class EffectCounts:
    """kept: documents in the corpus. lost: of them, those that would fail. gained: removed documents that failed no
    other rule and would pass."""

    kept: int
    lost: int
    gained: int

    @property
    def after(self) -> int:
        return self.kept - self.lost + self.gained


@dataclass(frozen=True)
class ThresholdEffect:
    """Effect of a moved threshold. counts: exact, or an estimate. bins: (low edge, kept, removed by this rule alone),
    estimates. passing, failing: the nearest of the sampled documents on both sides."""

    counts: EffectCounts
    is_exact: bool
    bins: list[tuple[float, int, int]]
    low: float
    high: float
    passing: list[dict[str, Any]]
    failing: list[dict[str, Any]]


def threshold_of(rules: Mapping[str, Any], source: str, rule: str, value: str) -> Threshold:
    """rules: of counts.json. value: a number, or "" for the recipe's. Raises InputError for a rule that the source does
    not have."""
    entries: Mapping[str, Any] = {entry["rule"]: entry for entry in rules.get(source, [])}
    if rule not in entries:
        raise InputError(f"source {source!r} has no rule {rule!r}; the page of rules lists them")
    entry = entries[rule]
    if entry["keep"] not in COMPARISONS:
        raise InputError(f"{rule} keeps by {entry['keep']!r}, which no threshold changes")
    signal = "language_score" if entry["signal"] == WANTED_LANGUAGE else entry["signal"]
    try:
        asked = float(value) if value else entry["threshold"]
    except ValueError as error:
        raise InputError(f"{value!r} is no number; write it as 0.35") from error
    return Threshold(source, rule, signal, entry["keep"], entry["threshold"], asked)


class Thresholds:
    """Sweeps of a corpus. One scan runs at a time, in a thread; a newer question ends an older scan."""

    def __init__(self, files: CorpusFiles, sketches: Sketches):
        self._files, self._sketches = files, sketches
        self._scans: dict[Threshold, Future[EffectCounts | None]] = {}
        self._lock, self._scanning = threading.Lock(), threading.Lock()
        self._newest: Threshold | None = None

    def sweep(self, asked: Threshold) -> ThresholdEffect:
        """Raises InputError where the signal is not stored.

        A document that failed several rules stays removed, and one that passes may yet be a duplicate. Signals of
        edited documents are those of the edited text."""
        kept = self._sketches.histogram("signal", name=asked.signal, source=asked.source)
        alone = self._sketches.histogram("alone", rule=asked.rule, source=asked.source)
        if not len(self._sketches.of_kind("signal", name=asked.signal)) and kept.total == 0 == alone.total:
            raise InputError(f"the signal {asked.signal} of {asked.rule} is not stored with kept documents")
        exact = self.exact(asked, WAIT_SECONDS)
        counts = exact or EffectCounts(
            kept.total, kept.total - round(_passing(kept, asked)), round(_passing(alone, asked))
        )
        low, high = bounds(kept, alone, asked)
        edges = np.linspace(low, high, HISTOGRAM_BINS + 1)
        columns = [np.diff([part.below(edge) for edge in edges]) for part in (kept, alone)]
        bins = [(float(edges[n]), round(columns[0][n]), round(columns[1][n])) for n in range(HISTOGRAM_BINS)]
        return ThresholdEffect(counts, exact is not None, bins, low, high, *self._nearest(asked))

    def _nearest(self, asked: Threshold) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The sampled documents nearest to the value, those that pass and those that fail."""
        rows = self._sketches.values(asked.source, asked.signal) + self._sketches.alone(asked.source, asked.rule)
        rows.sort(key=lambda row: (abs(row["value"] - asked.value), row["doc_id"]))
        passes = asked.passes(np.array([row["value"] for row in rows]))
        sides = ([row for row, good in zip(rows, passes, strict=True) if good == side] for side in (True, False))
        passing, failing = (side[:NEAREST] for side in sides)
        return passing, failing

    def exact(self, asked: Threshold, seconds: float) -> EffectCounts | None:
        """The exact counts, if the scan for them ends within so many seconds; None while it goes on."""
        with self._lock:
            self._newest = asked
            if asked not in self._scans or (self._scans[asked].done() and self._scans[asked].result() is None):
                self._scans[asked] = Future()
                # a daemon: the server ends without waiting for a scan
                threading.Thread(target=self._scan, args=(asked, self._scans[asked]), daemon=True).start()
        try:
            return self._scans[asked].result(seconds)
        except FutureTimeoutError:
            return None

    def _scan(self, asked: Threshold, future: "Future[EffectCounts | None]") -> None:
        with self._scanning:
            try:
                future.set_result(self._count(asked))
            except Exception as error:  # for the page that waits for it
                future.set_exception(error)

    def _count(self, asked: Threshold) -> EffectCounts | None:
        """The counts from the signals of kept documents and the ledger's values of removed ones; None if a newer
        question came."""
        kept = lost = gained = 0
        for name in self._shards("signals", asked):
            if self._newest != asked:
                return None
            with self._files.parquet(name) as file:
                if asked.signal not in file.schema_arrow.names:
                    continue
                column = file.read([asked.signal], use_threads=False).column(0)
            values = pc.cast(column, "float64").to_numpy()
            values = values[np.isfinite(values)]
            kept, lost = kept + len(values), lost + int((~asked.passes(values)).sum())
        for name in self._shards("ledger", asked):
            if self._newest != asked:
                return None
            gained += int(asked.passes(self._alone(name, asked.rule)).sum())
        return EffectCounts(kept, lost, gained)

    def _shards(self, folder: str, asked: Threshold) -> list[str]:
        names = self._files.tables(folder)
        return [name for name in names if name.rpartition("/")[2].rpartition("-")[0] == asked.source]

    def _alone(self, name: str, rule: str) -> np.ndarray:
        """The values of the documents of a shard of the ledger that failed this rule and no other."""
        with self._files.parquet(name) as file:
            table = file.read(["rule", "step", "value", "failed"], use_threads=False)
        is_alone = pc.and_(pc.equal(table["rule"], rule), pc.equal(pc.list_value_length(table["failed"]), 1))
        chosen = table.filter(pc.and_(is_alone, pc.equal(table["step"], "filters")))
        values = chosen.column("value").to_numpy()
        return values[np.isfinite(values)]


def _passing(part: Histogram, asked: Threshold) -> float:
    """About how many documents pass."""
    below = part.below(asked.value)
    if asked.keep == "==":
        return float(part.documents[(part.low <= asked.value) & (asked.value < part.high)].sum())
    return below if asked.keep in ("<", "<=") else part.total - below


def bounds(kept: Histogram, alone: Histogram, asked: Threshold) -> tuple[float, float]:
    """Ends of the slider: nearly the whole range of the signal, the recipe's threshold and the asked value."""
    numbers = [asked.threshold, asked.value]
    for part in (kept, alone):
        if part.total:
            shares = np.cumsum(part.documents) / part.total
            numbers.append(float(part.low[int(np.searchsorted(shares, 0.001))]))
            numbers.append(float(part.high[min(int(np.searchsorted(shares, 0.999)), len(shares) - 1)]))
    low, high = min(numbers), max(numbers)
    return (low, high) if high > low else (low - 1.0, high + 1.0)
