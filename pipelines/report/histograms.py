"""Histograms of each rule's signal for kept and failing documents, with the threshold."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.document_history import REWRITING
from gristmill.pipelines.report.blocks import Block, Figure
from gristmill.pipelines.report.figures import histogram


def histogram_block(
    rule: str, rules: Mapping[str, list[dict[str, Any]]], ledger: pa.Table, folder: Path
) -> list[Block]:
    """The histogram of the rule's signal for kept and failing documents, with the threshold."""
    described = next((each for group in rules.values() for each in group if each["rule"] == rule), None)
    if described is None:
        return step_histogram(rule, ledger, folder)
    sources = [source for source, group in rules.items() if any(each["rule"] == rule for each in group)]
    kept = signal_values(described["signal"], folder, sources)
    flat = pa.chunked_array(pc.list_flatten(ledger.column("failed")))
    fails = flat.filter(pc.equal(pc.struct_field(flat, "rule"), rule))
    thresholds = {each["threshold"] for group in rules.values() for each in group if each["rule"] == rule}
    limits = " or ".join(f"{value:g}" for value in sorted(thresholds))
    label = f"{described['signal']} (kept if {described['keep']} {limits}; {described['source']})"
    failing = finite(pc.struct_field(fails, "value").to_numpy())
    return histogram_figure(rule, kept, failing, described["threshold"] if len(thresholds) == 1 else None, label)


def step_histogram(step: str, ledger: pa.Table, folder: Path) -> list[Block]:
    """For a step after the filters: similarity to the kept document, or the quality score."""
    removed = ledger.filter(pc.equal(ledger.column("step"), step))
    values = finite(removed.column("value").to_numpy())
    thresholds = np.unique(removed.column("threshold").to_numpy())
    if step in REWRITING or len(np.unique(values)) < 2:  # exact copies: each has similarity 1
        return []
    threshold = float(thresholds[0]) if len(thresholds) == 1 else None
    if step == "quality":
        scored = removed.column("source").unique().to_pylist()
        return histogram_figure(
            step, signal_values("quality_score", folder, scored), values, threshold, "quality_score"
        )
    return histogram_figure(step, np.empty(0), values, threshold, "similarity to the kept document")


def histogram_figure(
    name: str, kept: np.ndarray, failing: np.ndarray, threshold: float | None, label: str
) -> list[Block]:
    """The figure, clipped at the 0.999 quantile of the kept values or the threshold, whichever is larger."""
    if not len(kept) + len(failing):
        return []
    if len(kept):
        limit = max(np.quantile(kept, 0.999), -np.inf if threshold is None else threshold)
        kept = kept[kept <= limit]
    svg = histogram(kept.tolist(), failing.tolist(), threshold, label)
    return [Figure(f"rule-{name}", svg, f"{name}: {len(kept):,} kept, {len(failing):,} failing documents")]


def signal_values(signal: str, folder: Path, sources: Collection[str]) -> np.ndarray:
    """The signal of every kept document of these sources."""
    kept = [
        pq.read_table(path, columns=[signal]).column(0).to_numpy()
        for path in sorted((folder / "signals").rglob("*.parquet"))
        if path.stem.rpartition("-")[0] in sources and signal in pq.read_schema(path).names
    ]
    return finite(np.concatenate([np.empty(0), *kept]))


def finite(values: np.ndarray) -> np.ndarray:
    found = values.astype(np.float64)
    return found[np.isfinite(found)]
