"""The documents nearest to each threshold, kept and removed, for people to inspect."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.filters.apply import KEPT, Rules, signal_values
from gristmill.data_pipeline.ledger.ledger import RemovalStep
from gristmill.data_pipeline.ledger.parquet_rows import RowRange, read_rows

PER_SIDE = 2
EXCERPT_CHARACTERS = 400


def rule_examples(
    source: str, slices: Sequence[RowRange], rules: Rules, failed_rule: np.ndarray
) -> Iterator[dict[str, Any]]:
    """For each rule that removed a document of the source, the PER_SIDE documents nearest its threshold on either side.

    slices are all rows of the source, failed_rule: int16[rows]. Ties go to the smaller doc_id."""
    for index, rule in enumerate(rules.rules):
        if not (failed_rule == index).any():
            continue
        read = [_values(row_range, rules.only(index)) for row_range in slices]
        values, thresholds = (np.concatenate(column) for column in zip(*read, strict=True))
        distance = np.abs(values - thresholds)
        for side, candidates in (("removed", failed_rule == index), ("kept", failed_rule == KEPT)):
            rows = np.flatnonzero(candidates & np.isfinite(distance))
            chosen = rows[np.lexsort((rows, distance[rows]))[:PER_SIDE]]
            for row in np.sort(chosen):
                found = _document(slices, int(row))
                yield _example(side, source, rule.label, float(values[row]), thresholds[row], found, None)


def duplicate_examples(
    source: str, slices: Sequence[RowRange], doc_ids: np.ndarray, step: RemovalStep
) -> Iterator[dict[str, Any]]:
    """The PER_SIDE documents that the step removed with the lowest values.

    doc_ids: S32[rows] of the source."""
    mine = step.of(doc_ids)
    order = np.lexsort((mine.doc_ids, mine.values))[:PER_SIDE]
    for at in order:
        row = int(np.flatnonzero(doc_ids == mine.doc_ids[at])[0])
        other = mine.duplicate_of[at].decode() or None
        found = _document(slices, row)
        yield _example("removed", source, step.step, float(mine.values[at]), step.threshold, found, other)


def _values(row_range: RowRange, one: Rules) -> tuple[np.ndarray, np.ndarray]:
    """(values, thresholds) of the only rule, by row."""
    table = read_rows(row_range, one.columns)
    return signal_values(table, one.rules[0].signal, one.languages), one.thresholds(table)[0]


def _document(slices: Sequence[RowRange], row: int) -> pa.Table:
    """One row of the source, its doc_id and text."""
    for row_range in slices:
        if row < len(row_range.rows):
            return read_rows(RowRange(row_range.path, row_range.rows[row : row + 1]), ["doc_id", "text"])
        row -= len(row_range.rows)
    raise IndexError(row)


def _example(
    side: str, source: str, rule: str, value: float, threshold: float, document: pa.Table, duplicate_of: str | None
) -> dict[str, Any]:
    return {
        "rule": rule,
        "source": source,
        "side": side,
        "doc_id": document.column("doc_id")[0].as_py(),
        "value": value,
        "threshold": float(threshold),
        "duplicate_of": duplicate_of,
        "excerpt": document.column("text")[0].as_py()[:EXCERPT_CHARACTERS],
    }
