"""How the signal of each rule is distributed, kept documents beside those that fail it, with its threshold."""

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
    """The rule's signal over the kept documents and those that fail it, with its threshold drawn in."""
    described = next((each for group in rules.values() for each in group if each["rule"] == rule), None)
    if described is None:
        return later_histogram(rule, ledger, folder)
    asked = [source for source, group in rules.items() if any(each["rule"] == rule for each in group)]
    kept = signal_values(described["signal"], folder, asked)
    flat = pa.chunked_array(pc.list_flatten(ledger.column("failed")))
    fails = flat.filter(pc.equal(pc.struct_field(flat, "rule"), rule))
    thresholds = {each["threshold"] for group in rules.values() for each in group if each["rule"] == rule}
    said = " or ".join(f"{value:g}" for value in sorted(thresholds))
    label = f"{described['signal']} (kept if {described['keep']} {said}; {described['source']})"
    failing = finite(pc.struct_field(fails, "value").to_numpy())
    return drawn(rule, kept, failing, described["threshold"] if len(thresholds) == 1 else None, label)


def later_histogram(step: str, ledger: pa.Table, folder: Path) -> list[Block]:
    """What took the documents of a step behind the filters: similarity to the kept one, or the quality score."""
    taken = ledger.filter(pc.equal(ledger.column("step"), step))
    values = finite(taken.column("value").to_numpy())
    thresholds = np.unique(taken.column("threshold").to_numpy())
    if step in REWRITING or len(np.unique(values)) < 2:  # exact copies: each has similarity 1
        return []
    threshold = float(thresholds[0]) if len(thresholds) == 1 else None
    if step == "quality":
        judged = taken.column("source").unique().to_pylist()
        return drawn(step, signal_values("quality_score", folder, judged), values, threshold, "quality_score")
    return drawn(step, np.empty(0), values, threshold, "similarity to the document that is kept")


def drawn(name: str, kept: np.ndarray, failing: np.ndarray, threshold: float | None, label: str) -> list[Block]:
    """The figure, without the highest thousandth of the kept values where it lies beyond the threshold."""
    if not len(kept) + len(failing):
        return []
    if len(kept):
        most = max(np.quantile(kept, 0.999), -np.inf if threshold is None else threshold)
        kept = kept[kept <= most]
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
