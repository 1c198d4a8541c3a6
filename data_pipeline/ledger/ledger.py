"""The ledger: one row for every document that was read, with its fate and the rule that decided it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.filters.apply import KEPT, QUARANTINED, Rules, failures, signal_values
from gristmill.data_pipeline.ledger.parquet_rows import RowRange, read_rows
from gristmill.data_pipeline.ledger.removed_spans import REMOVED_SPANS
from gristmill.foundation.checksum_files import is_sealed, sealed_path

REMOVED_SPAN = pa.struct([REMOVED_SPANS.field(name) for name in REMOVED_SPANS.names if name != "doc_id"])
MATCH = pa.struct(
    [
        ("benchmark", pa.string()),
        ("example", pa.string()),
        ("field", pa.string()),
        ("kind", pa.string()),
        ("matched", pa.int64()),
        ("of", pa.int64()),
    ]
)
FAILURE = pa.struct([("rule", pa.string()), ("value", pa.float64()), ("threshold", pa.float64())])
LEDGER_SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("source", pa.string()),
        ("fate", pa.string()),  # kept, removed or quarantined
        ("split", pa.string()),  # of a kept document
        # the last step it reached: read, filters, quality, exact_dedup, near_dedup, paragraph_dedup, line_dedup,
        # substring_dedup, decontaminate
        ("step", pa.string()),
        ("rule", pa.string()),  # filter.threshold, or the kind of reason why it could not be read
        ("value", pa.float64()),
        ("threshold", pa.float64()),
        ("duplicate_of", pa.string()),
        ("similarity", pa.float64()),
        ("failed", pa.list_(FAILURE)),  # every filter rule it fails, the one that removed it first
        ("cuts", pa.list_(REMOVED_SPAN)),  # every span removed from it, step by step
        ("pieces", pa.list_(pa.string())),  # the ids of the documents it was split into
        ("contamination", pa.list_(MATCH)),  # n-grams of benchmark texts found in it, of how many
        ("bytes", pa.int64()),  # of its repaired text, before any edit
        ("raw_digest", pa.string()),
        ("record", pa.int64()),
    ]
)
LEDGER_ROWS = 500_000
ROW_GROUP_ROWS = 16_384


@dataclass(frozen=True)
class RemovalStep:
    """The documents that a step after the filters removed.

    doc_ids: S32, sorted. Row for row with them: duplicate_of, the kept document each is a duplicate of ("" if it was
    removed for another reason); values, what was compared with the threshold: similarity, quality score, characters;
    thresholds, where they differ from `threshold`; rules, STEP.threshold if None."""

    step: str
    threshold: float
    doc_ids: np.ndarray
    duplicate_of: np.ndarray
    values: np.ndarray
    thresholds: np.ndarray | None = None
    rules: np.ndarray | None = None

    @classmethod
    def from_table(cls, step: str, threshold: float, table: pa.Table) -> "RemovalStep":
        table = table.sort_by("doc_id")
        return cls(
            step,
            threshold,
            np.array(table.column("doc_id").to_pylist(), dtype="S32"),
            np.array(table.column("duplicate_of").to_pylist(), dtype="S32"),
            table.column("similarity").to_numpy(),
        )

    def removed_mask(self, doc_ids: np.ndarray) -> np.ndarray:
        """bool[N]: which of these documents this step removed."""
        if not len(self.doc_ids):
            return np.zeros(len(doc_ids), dtype=bool)
        at = np.minimum(np.searchsorted(self.doc_ids, doc_ids), len(self.doc_ids) - 1)
        return self.doc_ids[at] == doc_ids

    def of(self, doc_ids: np.ndarray) -> "RemovalStep":
        """The rows of these documents."""
        mine = np.isin(self.doc_ids, doc_ids)
        return RemovalStep(
            self.step,
            self.threshold,
            self.doc_ids[mine],
            self.duplicate_of[mine],
            self.values[mine],
            None if self.thresholds is None else self.thresholds[mine],
            None if self.rules is None else self.rules[mine],
        )


@dataclass(frozen=True)
class Evidence:
    """For edited or contaminated documents: removed spans (REMOVED_SPANS), doc_id -> ids of its pieces, matches
    (MATCHES)."""

    removed_spans: pa.Table
    pieces: Mapping[str, tuple[str, ...]]
    matches: pa.Table

    def of(self, doc_ids: Sequence[str]) -> "Evidence":
        """The evidence about these documents."""
        wanted = pa.array(doc_ids, pa.string())
        spans, matches = (
            table.filter(pc.is_in(table.column("doc_id"), wanted)) for table in (self.removed_spans, self.matches)
        )
        return Evidence(spans, {i: self.pieces[i] for i in doc_ids if i in self.pieces}, matches)

    def rows(self) -> dict[str, dict[str, Any]]:
        """By document: its columns of the ledger."""
        found: dict[str, dict[str, Any]] = {}
        for name, table, fields in (("cuts", self.removed_spans, REMOVED_SPAN), ("contamination", self.matches, MATCH)):
            for row in table.to_pylist():
                kept = {field.name: row[field.name] for field in fields}
                found.setdefault(row["doc_id"], {}).setdefault(name, []).append(kept)
        for doc_id, pieces in self.pieces.items():
            found.setdefault(doc_id, {})["pieces"] = list(pieces)
        return found


@dataclass(frozen=True)
class LedgerTask:
    """slices: the rows of annotated files this shard is about; splits: the split of each, "" for those not kept."""

    path: Path
    source: str
    rules: Rules
    slices: tuple[RowRange, ...]
    failed_rule: tuple[np.ndarray, ...]
    splits: tuple[np.ndarray, ...]
    removals: tuple[RemovalStep, ...]
    evidence: Evidence


def write_ledger(task: LedgerTask) -> None:
    """Writes the shard, unless it is complete already."""
    if is_sealed(task.path):
        return
    with sealed_path(task.path) as temporary, pq.ParquetWriter(temporary, LEDGER_SCHEMA, compression="zstd") as file:
        held: list[dict[str, Any]] = []
        evidence = task.evidence.rows()
        for row_range, failed_rule, splits in zip(task.slices, task.failed_rule, task.splits, strict=True):
            held.extend(_rows(row_range, failed_rule, splits, task, evidence))
        for start in range(0, max(len(held), 1), ROW_GROUP_ROWS):
            rows = held[start : start + ROW_GROUP_ROWS]
            file.write_table(pa.Table.from_pylist(rows, schema=LEDGER_SCHEMA), row_group_size=ROW_GROUP_ROWS)


def _rows(
    row_range: RowRange,
    failed_rule: np.ndarray,
    splits: np.ndarray,
    task: LedgerTask,
    evidence: Mapping[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    columns = ["doc_id", "raw_digest", "record", "unreadable", "num_bytes", *task.rules.columns]
    table = read_rows(row_range, list(dict.fromkeys(columns)))
    values_RN = np.array(
        [signal_values(table, rule.signal, task.rules.languages) for rule in task.rules.rules]
    ).reshape(len(task.rules.rules), table.num_rows)
    failed_RN, thresholds_RN = failures(table, task.rules), task.rules.thresholds(table)
    removed_by_step = _removal_columns(np.array(table.column("doc_id").to_pylist(), dtype="S32"), task.removals)
    rows = []
    facts = table.select(["doc_id", "raw_digest", "record", "unreadable", "num_bytes"]).to_pylist()
    for index, fact in enumerate(facts):
        row: dict[str, Any] = {
            "doc_id": fact["doc_id"],
            "source": task.source,
            "bytes": fact["num_bytes"],
            "raw_digest": fact["raw_digest"],
            "record": fact["record"],
            "failed": [],
            "cuts": [],
            "pieces": [],
            "contamination": [],
            **evidence.get(fact["doc_id"], {}),
        }
        if failed_rule[index] == QUARANTINED:
            row |= {"fate": "quarantined", "step": "read", "rule": fact["unreadable"]}
        elif failed_rule[index] != KEPT:
            row["failed"] = _failed(values_RN[:, index], failed_RN[:, index], thresholds_RN[:, index], task.rules)
            row |= {"fate": "removed", "step": "filters", **row["failed"][0]}
        elif fact["doc_id"] in removed_by_step:
            row |= {"fate": "removed", **removed_by_step[fact["doc_id"]]}
        else:
            row |= {"fate": "kept", "split": str(splits[index])}
        rows.append(row)
    return rows


def _failed(values_R: np.ndarray, failed_R: np.ndarray, thresholds_R: np.ndarray, rules: Rules) -> list[dict[str, Any]]:
    return [
        {"rule": rule.label, "value": float(value), "threshold": float(threshold)}
        for rule, value, failed, threshold in zip(rules.rules, values_R, failed_R, thresholds_R, strict=True)
        if failed
    ]


def _removal_columns(doc_ids: np.ndarray, removals: Sequence[RemovalStep]) -> Mapping[str, dict[str, Any]]:
    """By document that a later step removed: its columns of the ledger."""
    found = {}
    for step in removals:
        mine = step.of(doc_ids)
        thresholds = np.full(len(mine.doc_ids), step.threshold) if mine.thresholds is None else mine.thresholds
        rules = np.full(len(mine.doc_ids), f"{step.step}.threshold") if mine.rules is None else mine.rules
        for doc, other, value, threshold, rule in zip(
            mine.doc_ids, mine.duplicate_of, mine.values, thresholds, rules, strict=True
        ):
            found[doc.decode()] = {
                "step": step.step,
                "rule": str(rule),
                "value": float(value),
                "threshold": float(threshold),
                "duplicate_of": other.decode() or None,
                "similarity": float(value) if other else None,
            }
    return found
