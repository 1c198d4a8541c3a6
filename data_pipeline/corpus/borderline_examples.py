"""The documents nearest to each threshold, kept and removed, for people to inspect."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from gristmill.data_pipeline.filters.apply import EXAMPLES_PER_SIDE, KEPT_SIDE, REMOVED_SIDE
from gristmill.data_pipeline.ledger.document_file import unpacked_ids
from gristmill.data_pipeline.ledger.removal_step import Removals
from gristmill.data_pipeline.ledger.source_state import SourceState
from gristmill.foundation.engine.engine import Engine

EXCERPT_CHARACTERS = 400
SIDES = {REMOVED_SIDE: "removed", KEPT_SIDE: "kept"}


@dataclass(frozen=True)
class Example:
    """A document near a threshold, or a duplicate. file: number in its source; row: of the annotated file."""

    file: int
    row: int
    rule: str
    side: str
    value: float
    threshold: float
    duplicate_of: str | None = None


def borderline_examples(one: SourceState, removals: Sequence[Removals], engine: Engine) -> Iterator[dict[str, Any]]:
    """For each rule that removed a document of the source, the EXAMPLES_PER_SIDE documents nearest its threshold on
    either side; for each later step, the removed documents with the lowest values. Of equals the first in the
    source."""
    chosen = [*_rule_examples(one), *(example for step in removals for example in _step_examples(one, step))]
    documents = _read_documents(one, chosen, engine)
    for example in chosen:
        doc_id, excerpt = documents[example.file, example.row]
        yield {
            "rule": example.rule,
            "source": one.source.name,
            "side": example.side,
            "doc_id": doc_id,
            "value": example.value,
            "threshold": example.threshold,
            "duplicate_of": example.duplicate_of,
            "excerpt": excerpt,
        }


def _rule_examples(one: SourceState) -> Iterator[Example]:
    nearest = [results.nearest for results in one.filter_results if results.nearest is not None]
    if not nearest:
        return
    # [rules, sides, files, EXAMPLES_PER_SIDE]
    rows, values, thresholds = (
        np.stack([getattr(found, name) for found in nearest], axis=2) for name in ("rows", "values", "thresholds")
    )
    for rule, side in np.ndindex(rows.shape[:2]):
        if (rows[rule, REMOVED_SIDE] < 0).all():
            continue
        file, place = np.nonzero(rows[rule, side] >= 0)  # file after file, nearest first
        row = rows[rule, side, file, place]
        distances = np.abs(values[rule, side, file, place] - thresholds[rule, side, file, place])
        order = np.lexsort((row, file, distances))[:EXAMPLES_PER_SIDE]
        for at in order[np.lexsort((row[order], file[order]))].tolist():
            where = rule, side, file[at], place[at]
            label = one.rules.rules[rule].label
            yield Example(
                int(file[at]), int(row[at]), label, SIDES[side], float(values[where]), float(thresholds[where])
            )


def _step_examples(one: SourceState, step: Removals) -> list[Example]:
    lowest: list[Example] = []
    for file, number in enumerate(one.files):
        mine = step.in_file(number)
        order = np.argsort(mine.values, kind="stable")[:EXAMPLES_PER_SIDE]
        ids = [None] * len(order) if mine.duplicate_of is None else unpacked_ids(mine.duplicate_of[order]).to_pylist()
        for at, duplicate_of in zip(order.tolist(), ids, strict=True):
            row, value = int(mine.rows[at]), float(mine.values[at])
            lowest.append(Example(file, row, step.step, "removed", value, float(step.threshold), duplicate_of))
        lowest = sorted(lowest, key=attrgetter("value"))[:EXAMPLES_PER_SIDE]
    return lowest


def _read_documents(
    one: SourceState, examples: Sequence[Example], engine: Engine
) -> Mapping[tuple[int, int], tuple[str, str]]:
    """By file and row: (doc_id, excerpt)."""
    rows = {file: sorted({one.row for one in examples if one.file == file}) for file in {e.file for e in examples}}
    tasks = [(file, one.paths[file], wanted) for file, wanted in sorted(rows.items())]
    found: dict[tuple[int, int], tuple[str, str]] = {}
    for documents in engine.map(_read_rows, tasks, "examples", unit="files"):
        found |= documents
    return found


def _read_rows(task: tuple[int, Path, list[int]]) -> dict[tuple[int, int], tuple[str, str]]:
    number, path, rows = task
    found = {}
    with pq.ParquetFile(path) as file:
        start = 0
        for group in range(file.num_row_groups):
            stop = start + file.metadata.row_group(group).num_rows
            mine = [row for row in rows if start <= row < stop]
            if mine:
                table = file.read_row_group(group, columns=["doc_id", "text"])
                for row in mine:
                    doc_id, text = (table.column(name)[row - start].as_py() for name in ("doc_id", "text"))
                    found[number, row] = (doc_id, text[:EXCERPT_CHARACTERS])
            start = stop
    return found
