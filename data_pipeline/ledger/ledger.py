"""The ledger: every document that was read, and what became of it."""

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
from gristmill.data_pipeline.ledger.removed_spans import CUTS
from gristmill.foundation.checksum_files import is_sealed, sealed_path

CUT = pa.struct([CUTS.field(name) for name in CUTS.names if name != "doc_id"])
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
        # where its way ended: read, filters, quality, exact_dedup, near_dedup, paragraph_dedup, line_dedup,
        # substring_dedup, decontaminate
        ("step", pa.string()),
        ("rule", pa.string()),  # filter.threshold, or the kind of reason why it could not be read
        ("value", pa.float64()),
        ("threshold", pa.float64()),
        ("duplicate_of", pa.string()),
        ("similarity", pa.float64()),
        ("failed", pa.list_(FAILURE)),  # every rule of the filters it fails, the one that took it first
        ("cuts", pa.list_(CUT)),  # every span cut out of it, step by step
        ("pieces", pa.list_(pa.string())),  # the documents that stand in its stead, where it was split
        ("contamination", pa.list_(MATCH)),  # n-grams of benchmark texts found in it, of how many
        ("bytes", pa.int64()),  # of its repaired text, before anything was cut out
        ("raw_digest", pa.string()),
        ("record", pa.int64()),
    ]
)
LEDGER_ROWS = 500_000
ROW_GROUP_ROWS = 16_384


@dataclass(frozen=True)
class RemovalStep:
    """A step after the filters that took documents: their ids (S32, sorted) and, row for row, the document each was
    a duplicate of ("" where it was taken for another reason) and the value that took it: the similarity of the two.

    threshold: of that value; thresholds: of each, where they differ. rules: of each; STEP.threshold if none."""

    step: str
    threshold: float
    doc_ids: np.ndarray
    duplicate_of: np.ndarray
    similarity: np.ndarray
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

    def holds(self, doc_ids: np.ndarray) -> np.ndarray:
        """bool[N]: which of these this step took."""
        if not len(self.doc_ids):
            return np.zeros(len(doc_ids), dtype=bool)
        at = np.minimum(np.searchsorted(self.doc_ids, doc_ids), len(self.doc_ids) - 1)
        return self.doc_ids[at] == doc_ids

    def of(self, doc_ids: np.ndarray) -> "RemovalStep":
        """This step's rows about these documents alone."""
        mine = np.isin(self.doc_ids, doc_ids)
        return RemovalStep(
            self.step,
            self.threshold,
            self.doc_ids[mine],
            self.duplicate_of[mine],
            self.similarity[mine],
            None if self.thresholds is None else self.thresholds[mine],
            None if self.rules is None else self.rules[mine],
        )


@dataclass(frozen=True)
class Evidence:
    """Of documents that were rewritten or hit: what was cut (CUTS), (doc_id, pieces), and the matches (MATCHES)."""

    cuts: pa.Table
    pieces: Mapping[str, tuple[str, ...]]
    matches: pa.Table

    def of(self, doc_ids: Sequence[str]) -> "Evidence":
        """The evidence about these documents alone."""
        wanted = pa.array(doc_ids, pa.string())
        cuts, matches = (table.filter(pc.is_in(table.column("doc_id"), wanted)) for table in (self.cuts, self.matches))
        return Evidence(cuts, {i: self.pieces[i] for i in doc_ids if i in self.pieces}, matches)

    def rows(self) -> dict[str, dict[str, Any]]:
        """By document: its columns of the ledger."""
        found: dict[str, dict[str, Any]] = {}
        for name, table, fields in (("cuts", self.cuts, CUT), ("contamination", self.matches, MATCH)):
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
    taken_by: tuple[np.ndarray, ...]
    splits: tuple[np.ndarray, ...]
    later: tuple[RemovalStep, ...]
    evidence: Evidence


def write_ledger(task: LedgerTask) -> None:
    """The shard is there; one that is there already is kept."""
    if is_sealed(task.path):
        return
    with sealed_path(task.path) as temporary, pq.ParquetWriter(temporary, LEDGER_SCHEMA, compression="zstd") as file:
        held: list[dict[str, Any]] = []
        evidence = task.evidence.rows()
        for cut, taken_by, splits in zip(task.slices, task.taken_by, task.splits, strict=True):
            held.extend(_rows(cut, taken_by, splits, task, evidence))
        for start in range(0, max(len(held), 1), ROW_GROUP_ROWS):
            rows = held[start : start + ROW_GROUP_ROWS]
            file.write_table(pa.Table.from_pylist(rows, schema=LEDGER_SCHEMA), row_group_size=ROW_GROUP_ROWS)


def _rows(
    cut: RowRange,
    taken_by: np.ndarray,
    splits: np.ndarray,
    task: LedgerTask,
    evidence: Mapping[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    columns = ["doc_id", "raw_digest", "record", "unreadable", "num_bytes", *task.rules.columns]
    table = read_rows(cut, list(dict.fromkeys(columns)))
    values_RN = np.array(
        [signal_values(table, rule.signal, task.rules.languages) for rule in task.rules.rules]
    ).reshape(len(task.rules.rules), table.num_rows)
    failed_RN, thresholds_RN = failures(table, task.rules), task.rules.thresholds(table)
    duplicates = _duplicates(np.array(table.column("doc_id").to_pylist(), dtype="S32"), task.later)
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
        if taken_by[index] == QUARANTINED:
            row |= {"fate": "quarantined", "step": "read", "rule": fact["unreadable"]}
        elif taken_by[index] != KEPT:
            row["failed"] = _failed(values_RN[:, index], failed_RN[:, index], thresholds_RN[:, index], task.rules)
            row |= {"fate": "removed", "step": "filters", **row["failed"][0]}
        elif fact["doc_id"] in duplicates:
            row |= {"fate": "removed", **duplicates[fact["doc_id"]]}
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


def _duplicates(doc_ids: np.ndarray, later: Sequence[RemovalStep]) -> Mapping[str, dict[str, Any]]:
    found = {}
    for step in later:
        mine = step.of(doc_ids)
        thresholds = np.full(len(mine.doc_ids), step.threshold) if mine.thresholds is None else mine.thresholds
        rules = np.full(len(mine.doc_ids), f"{step.step}.threshold") if mine.rules is None else mine.rules
        for doc, other, value, threshold, rule in zip(
            mine.doc_ids, mine.duplicate_of, mine.similarity, thresholds, rules, strict=True
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
