"""A threshold moved: what it would keep, at once from histograms and then exactly from a scan of one column."""

import operator
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from gristmill.data_pipeline.corpus.corpus_files import CorpusFiles
from gristmill.data_pipeline.filters.apply import WANTED_LANGUAGE
from gristmill.foundation.errors import InputError
from gristmill.pipelines.explorer.sketched import Histogram, Sketches

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
