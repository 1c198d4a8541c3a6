"""The ledger: every document that was read, and what became of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.decide import KEPT, QUARANTINED, Rules, failures, signal_values
from gristmill.data_pipeline.provenance.files import atomic_path
from gristmill.data_pipeline.slices import Slice, read_slice

FAILURE = pa.struct([("rule", pa.string()), ("value", pa.float64()), ("threshold", pa.float64())])
LEDGER_SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("source", pa.string()),
        ("fate", pa.string()),  # kept, removed or quarantined
        ("split", pa.string()),  # of a kept document
        ("step", pa.string()),  # read, filters, quality, exact_dedup, near_dedup, decontaminate: where its way ended
        ("rule", pa.string()),  # filter.threshold, or the kind of reason why it could not be read
        ("value", pa.float64()),
        ("threshold", pa.float64()),
        ("duplicate_of", pa.string()),
        ("similarity", pa.float64()),
        ("failed", pa.list_(FAILURE)),  # every rule of the filters it fails, the one that took it first
        ("bytes", pa.int64()),  # of its repaired text
        ("raw_digest", pa.string()),
        ("record", pa.int64()),
    ]
)
LEDGER_ROWS = 500_000
ROW_GROUP_ROWS = 16_384


@dataclass(frozen=True)
class LaterStep:
    """A step after the filters that took documents: their ids (S32, sorted) and, row for row, the document each was
    a duplicate of ("" where it was taken for another reason) and the value that took it: the similarity of the two.

    threshold: of that value; thresholds: of each, where they differ."""

    step: str
    threshold: float
    doc_ids: np.ndarray
    duplicate_of: np.ndarray
    similarity: np.ndarray
    thresholds: np.ndarray | None = None

    @classmethod
    def from_table(cls, step: str, threshold: float, table: pa.Table) -> "LaterStep":
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

    def of(self, doc_ids: np.ndarray) -> "LaterStep":
        """This step's rows about these documents alone."""
        mine = np.isin(self.doc_ids, doc_ids)
        thresholds = None if self.thresholds is None else self.thresholds[mine]
        return LaterStep(
            self.step, self.threshold, self.doc_ids[mine], self.duplicate_of[mine], self.similarity[mine], thresholds
        )


@dataclass(frozen=True)
class LedgerTask:
    """slices: the rows of annotated files this shard is about; splits: the split of each, "" for those not kept."""

    path: Path
    source: str
    rules: Rules
    slices: tuple[Slice, ...]
    taken_by: tuple[np.ndarray, ...]
    splits: tuple[np.ndarray, ...]
    later: tuple[LaterStep, ...]


def write_ledger(task: LedgerTask) -> None:
    """The shard is there; one that is there already is kept."""
    if task.path.exists():
        return
    with atomic_path(task.path) as temporary, pq.ParquetWriter(temporary, LEDGER_SCHEMA, compression="zstd") as file:
        held: list[dict[str, Any]] = []
        for cut, taken_by, splits in zip(task.slices, task.taken_by, task.splits, strict=True):
            held.extend(_rows(cut, taken_by, splits, task))
        for start in range(0, max(len(held), 1), ROW_GROUP_ROWS):
            rows = held[start : start + ROW_GROUP_ROWS]
            file.write_table(pa.Table.from_pylist(rows, schema=LEDGER_SCHEMA), row_group_size=ROW_GROUP_ROWS)


def _rows(cut: Slice, taken_by: np.ndarray, splits: np.ndarray, task: LedgerTask) -> list[dict[str, Any]]:
    columns = ["doc_id", "raw_digest", "record", "unreadable", "num_bytes", *task.rules.columns]
    table = read_slice(cut, list(dict.fromkeys(columns)))
    values_RN = np.array(
        [signal_values(table, rule.signal, task.rules.languages) for rule in task.rules.rules]
    ).reshape(len(task.rules.rules), table.num_rows)
    failed_RN = failures(table, task.rules)
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
        }
        if taken_by[index] == QUARANTINED:
            row |= {"fate": "quarantined", "step": "read", "rule": fact["unreadable"]}
        elif taken_by[index] != KEPT:
            row["failed"] = _failed(values_RN[:, index], failed_RN[:, index], task.rules)
            row |= {"fate": "removed", "step": "filters", **row["failed"][0]}
        elif fact["doc_id"] in duplicates:
            row |= {"fate": "removed", **duplicates[fact["doc_id"]]}
        else:
            row |= {"fate": "kept", "split": str(splits[index])}
        rows.append(row)
    return rows


def _failed(values_R: np.ndarray, failed_R: np.ndarray, rules: Rules) -> list[dict[str, Any]]:
    return [
        {"rule": rule.label, "value": float(value), "threshold": float(rule.threshold)}
        for rule, value, failed in zip(rules.rules, values_R, failed_R, strict=True)
        if failed
    ]


def _duplicates(doc_ids: np.ndarray, later: Sequence[LaterStep]) -> Mapping[str, dict[str, Any]]:
    found = {}
    for step in later:
        mine = step.of(doc_ids)
        thresholds = np.full(len(mine.doc_ids), step.threshold) if mine.thresholds is None else mine.thresholds
        for doc, other, value, threshold in zip(
            mine.doc_ids, mine.duplicate_of, mine.similarity, thresholds, strict=True
        ):
            found[doc.decode()] = {
                "step": step.step,
                "rule": f"{step.step}.threshold",
                "value": float(value),
                "threshold": float(threshold),
                "duplicate_of": other.decode() or None,
                "similarity": float(value) if other else None,
            }
    return found
