"""The ledger: one row for every document that was read, with its outcome and the rule that decided it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.filters.apply import QUARANTINED, SOURCE, Results, apply_rules
from gristmill.data_pipeline.filters.profiles import Rules
from gristmill.data_pipeline.ledger.document_file import (
    RowRange,
    row_groups,
    row_range_groups,
    spans_of_runs,
    tiny_or_not,
    unpacked_ids,
)
from gristmill.data_pipeline.ledger.removal_step import (
    MATCH,
    REMOVED_SPAN,
    Evidence,
    EvidenceFiles,
    Removals,
    RemovalStep,
    SourceState,
    columns_of_evidence,
    list_column,
    read_evidence,
)
from gristmill.foundation.checksums import checksummed_path, matches_checksum
from gristmill.foundation.files import atomic_path
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence, joined
from gristmill.foundation.runtime.tasks.task_files import fetch

FAILURE = pa.struct([("rule", pa.string()), ("value", pa.float64()), ("threshold", pa.float64())])
LEDGER_SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("source", pa.string()),
        ("outcome", pa.string()),  # kept, removed or quarantined
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
        ("removed_spans", pa.list_(REMOVED_SPAN)),  # every span removed from it, step by step
        ("pieces", pa.list_(pa.string())),  # the ids of the documents it was split into
        ("contamination", pa.list_(MATCH)),  # n-grams of benchmark texts found in it, of how many
        ("bytes", pa.int64()),  # of its repaired text, before any edit
        ("raw_digest", pa.string()),
        ("record", pa.int64()),
    ]
)
# The columns in which few values repeat; a dictionary of ids would cost time and save nothing.
REPEATING_COLUMNS = ["source", "outcome", "split", "step", "rule", "raw_digest", "failed.list.element.rule"]
RECORD_COLUMNS = ("doc_id", "raw_digest", "record", "unreadable", "num_bytes")
OUTCOMES = ("kept", "removed", "quarantined")
KEPT_OUTCOME, REMOVED_OUTCOME, QUARANTINED_OUTCOME = range(3)
NONE = -1  # code of a null
# Rows of a shard: between half of a size and the whole, up to MAX_LEDGER_ROWS.
MIN_LEDGER_ROWS, MAX_LEDGER_ROWS = 16_384, 131_072
ROW_GROUP_ROWS = 16_384


@dataclass(frozen=True)
class LedgerRows:
    """The rows start..stop - 1 of one annotated file. file: its number among those of all sources. removals: the later
    steps."""

    path: Path
    start: int
    stop: int
    results: Results
    removals: tuple[Removals, ...]
    file: int
    evidence: EvidenceFiles


@dataclass(frozen=True)
class LedgerTask:
    """One shard. split_names: by code."""

    path: Path
    source: str
    rules: Rules
    rows: tuple[LedgerRows, ...]
    split_names: tuple[str, ...]


def write_ledger(task: LedgerTask) -> None:
    """Writes the shard, unless it is complete already."""
    if matches_checksum(task.path):
        return
    tables = (table for rows in task.rows for table in ledger_tables(rows, task.rules, task.split_names, task.source))
    with checksummed_path(task.path) as temporary:
        write_rows(tables, temporary)


def write_rows(tables: Iterable[pa.Table], to: Path | pa.NativeFile) -> None:
    """A shard with these rows."""
    uncompressed, groups = tiny_or_not(row_groups(tables, ROW_GROUP_ROWS))
    write_groups(groups, to, uncompressed)


def write_groups(groups: Iterable[pa.Table], to: Path | pa.NativeFile, uncompressed: bool) -> None:
    """A shard with these row groups. uncompressed: it is tiny, and has no dictionaries either."""
    compression, dictionaries = ("none", False) if uncompressed else ("zstd", REPEATING_COLUMNS)
    with pq.ParquetWriter(to, LEDGER_SCHEMA, compression=compression, use_dictionary=dictionaries) as file:
        for table in groups:
            file.write_table(table, row_group_size=ROW_GROUP_ROWS)


def ledger_tables(rows: LedgerRows, rules: Rules, split_names: tuple[str, ...], source: str) -> Iterator[pa.Table]:
    """The ledger's rows, one row group of the annotated file at a time. split_names: by code. source: "" for those
    that the file has."""
    columns = list(dict.fromkeys([*RECORD_COLUMNS, *rules.columns, *([] if source else [SOURCE])]))
    evidence, results = read_evidence(rows.evidence), rows.results.load()
    removals = [step.in_file(rows.file) for step in rows.removals]
    start = rows.start
    for read in row_range_groups(RowRange.span(rows.path, rows.start, rows.stop), columns):
        table, stop = read.combine_chunks(), start + len(read)
        removed = [step.in_rows(start, stop) for step in removals]
        outcome = Outcome.of(results.failed_rule[start:stop], removed, rules)
        splits = _named(np.where(outcome.codes == KEPT_OUTCOME, results.splits[start:stop], NONE), split_names)
        names = pa.repeat(pa.scalar(source), len(table)) if source else table.column(SOURCE)
        yield _ledger_table(table, outcome, evidence, rules, {"source": names, "split": splits})
        start = stop


@dataclass(frozen=True)
class Outcome:
    """The outcome of N documents. codes int8[N]: places in OUTCOMES. steps, rules int16[N]: places in step_names and
    rule_names, -1 for none. values, thresholds, similarities float64[N], NaN for none. duplicate_of uint64[N, 2],
    valid where is_duplicate bool[N]. failed_rule int16[N]."""

    codes: np.ndarray
    steps: np.ndarray
    rules: np.ndarray
    values: np.ndarray
    thresholds: np.ndarray
    duplicate_of: np.ndarray
    is_duplicate: np.ndarray
    failed_rule: np.ndarray
    step_names: list[str]
    rule_names: list[str]

    @classmethod
    def of(cls, failed_rule: np.ndarray, removals: list[RemovalStep], rules: Rules) -> "Outcome":
        """removals: rows counted from the first document. Values and thresholds of the filters are not filled in."""
        size = len(failed_rule)
        codes = np.where(failed_rule == QUARANTINED, QUARANTINED_OUTCOME, np.where(failed_rule >= 0, 1, 0))
        steps = np.where(failed_rule == QUARANTINED, 0, np.where(failed_rule >= 0, 1, NONE))
        rule_of = np.where(failed_rule >= 0, failed_rule, NONE)
        values, thresholds = np.full(size, np.nan), np.full(size, np.nan)
        duplicate_of, is_duplicate = np.zeros((size, 2), np.uint64), np.zeros(size, bool)
        step_names, rule_names = ["read", "filters"], [rule.label for rule in rules.rules]
        for step in removals:
            codes[step.rows] = REMOVED_OUTCOME
            steps[step.rows] = len(step_names)
            rule_of[step.rows] = len(rule_names) + (0 if step.rules is None else step.rules)
            values[step.rows] = step.values
            thresholds[step.rows] = step.threshold if step.thresholds is None else step.thresholds
            if step.duplicate_of is not None:
                duplicate_of[step.rows], is_duplicate[step.rows] = step.duplicate_of, True
            step_names.append(step.step)
            rule_names.extend(step.labels)
        return cls(
            codes,
            steps,
            rule_of,
            values,
            thresholds,
            duplicate_of,
            is_duplicate,
            failed_rule,
            step_names,
            rule_names,
        )


def _ledger_table(
    table: pa.Table, outcome: Outcome, evidence: Evidence, rules: Rules, given: Mapping[str, pa.Array]
) -> pa.Table:
    """The ledger's rows of these rows of an annotated file. given: columns."""
    doc_ids = table.column("doc_id").combine_chunks()
    failed, first = _failed_column(table, outcome.failed_rule, rules)
    by_filter = outcome.failed_rule >= 0
    values, thresholds = outcome.values.copy(), outcome.thresholds.copy()
    values[by_filter], thresholds[by_filter] = first
    has_value = by_filter | (outcome.steps > 1)
    unique_ids = unpacked_ids(outcome.duplicate_of[outcome.is_duplicate])
    columns = {
        "doc_id": doc_ids,
        **given,
        "outcome": pa.array(OUTCOMES).take(pa.array(outcome.codes)),
        "step": _named(outcome.steps, outcome.step_names),
        "rule": pc.coalesce(_named(outcome.rules, outcome.rule_names), table.column("unreadable").combine_chunks()),
        "value": pa.array(values, mask=~has_value),
        "threshold": pa.array(thresholds, mask=~has_value),
        "duplicate_of": unique_ids.take(_places(outcome.is_duplicate)),
        "similarity": pa.array(values, mask=~outcome.is_duplicate),
        "failed": failed,
        **columns_of_evidence(evidence, doc_ids),
        "bytes": table.column("num_bytes"),
        "raw_digest": table.column("raw_digest"),
        "record": table.column("record"),
    }
    return pa.table([columns[name] for name in LEDGER_SCHEMA.names], schema=LEDGER_SCHEMA)


def _named(codes: np.ndarray, names: list[str] | tuple[str, ...]) -> pa.Array:
    """The names of these codes, null for -1."""
    return pa.array(names, pa.string()).take(pa.array(codes, mask=codes == NONE))


def _places(mask: np.ndarray) -> pa.Array:
    """Number of each True among them, null for False: [False, True, True] -> [null, 0, 1]."""
    return pa.array(np.cumsum(mask) - 1, mask=~mask)


def _failed_column(
    table: pa.Table, failed_rule: np.ndarray, rules: Rules
) -> tuple[pa.ListArray, tuple[np.ndarray, np.ndarray]]:
    """The column `failed`, and (values, thresholds) of the first failed rule of each removed document."""
    removed = np.flatnonzero(failed_rule >= 0)
    values_RN, thresholds_RN, failed_RN = apply_rules(table.take(pa.array(removed)), rules)
    places, rule = np.nonzero(failed_RN.T)
    columns = [
        pa.array([rule_config.label for rule_config in rules.rules], pa.string()).take(pa.array(rule)),
        pa.array(values_RN[rule, places]),
        pa.array(thresholds_RN[rule, places]),
    ]
    counts = np.zeros(len(failed_rule), np.int64)
    counts[removed] = failed_RN.sum(axis=0)
    first = failed_rule[removed], np.arange(len(removed))
    column = list_column(
        pa.StructArray.from_arrays(columns, fields=list(FAILURE)), np.concatenate([[0], np.cumsum(counts)])
    )
    return column, (values_RN[first], thresholds_RN[first])


class WeightRuns:
    """Cuts items that come in pieces into runs whose weights reach `max_weight`: [3, 3], [9, 1] and 5 -> (0, 2), (2,
    3), (3, 4). Only the weights and marks in their order count, not the pieces. starts: the first item of each run that
    is known so far; the last one's may not have come yet.

    A run of at least min_weight (None: max_weight) ends before an item of mark min_mark or more. So runs begin at the
    same items again soon after items were put in or taken out (content-defined chunking: Muthitacharoen et al. 2001,
    "A Low-bandwidth Network File System")."""

    def __init__(self, max_weight: int, min_weight: int | None = None, min_mark: int = 0):
        self.max_weight, self.min_mark = max_weight, min_mark
        self.min_weight = max_weight if min_weight is None else min_weight
        self.starts = [0]
        self.size = self._filled = 0

    def add(self, weights_N: np.ndarray, marks_N: np.ndarray | None = None) -> None:
        """marks_N: None has no item that a run may begin with early."""
        before = np.concatenate([[0], np.cumsum(weights_N, dtype=np.int64)])
        marked = np.empty(0, np.int64) if marks_N is None else np.flatnonzero(marks_N >= self.min_mark)
        start = -self._filled  # the total at the run's start
        while True:
            first, last = np.searchsorted(before[:-1], [start + self.min_weight, start + self.max_weight])
            place = np.searchsorted(marked, first)
            end = int(min(last, marked[place])) if place < len(marked) else int(last)
            if end >= len(weights_N):
                self._filled = int(before[-1]) - start
                break
            start = int(before[end])
            self.starts.append(self.size + end)
        self.size += len(weights_N)

    def bounds(self) -> list[tuple[int, int]]:
        """(start, end) of every run, once all pieces were added. No items: one empty run, so that there is always a
        first shard."""
        starts = [start for start in self.starts if start < self.size] or [0]
        return list(zip(starts, [*starts[1:], self.size], strict=True))


# Many small shards rather than few large ones: several workers write them, and a document that comes or goes has one of
# them written again. Each takes 20 ms by itself.
TARGET_SHARDS = 32


def runs_of_size(documents: int, total: int, min_size: int, max_size: int) -> WeightRuns:
    """Runs for the shards of a split or ledger: between a half and the whole of a size that follows the total weight in
    powers of two, from min_size up to max_size. So a corpus that grows or shrinks a little has the same shards but
    where documents came or went.

    After a half, a run ends at the next of the documents whose mark one in 2**k has, about a quarter of the size on."""
    limit = min_size
    while limit * TARGET_SHARDS < total and limit < max_size:
        limit *= 2
    limit = min(limit, max_size)
    gap = limit * max(documents, 1) // (4 * max(total, 1))  # documents in a quarter of the size
    return WeightRuns(limit, max(limit // 2, 1), max(gap.bit_length() - 1, 0))


QUARANTINE_NAME = "quarantine.jsonl"


def ledger_tasks(
    curated: Sequence[SourceState],
    removals: Sequence[Removals],
    evidence: Sequence[EvidenceFiles],
    folder: Path,
    split_names: tuple[str, ...],
    engine: Engine,
) -> Sequence[LedgerTask]:
    """evidence: of each annotated file of all sources. Ledgers are cut where their documents say, as shards are."""
    steps = tuple(removals)

    def of_source(state: SourceState, bounds: list[tuple[int, int]]) -> Sequence[LedgerTask]:
        spans = spans_of_runs([results.num_documents for results in state.filter_results], bounds)

        def ledger_rows(file: int, first: int, last: int) -> LedgerRows:
            path, results, number = state.paths[file], state.filter_results[file], state.files[file]
            return LedgerRows(path, first, last, results, steps, number, evidence[number])

        def task(number: int) -> LedgerTask:
            path = folder / "ledger" / f"{state.source.name}-{number:05}.parquet"
            rows = tuple(ledger_rows(*span) for span in spans[number])
            return LedgerTask(path, state.source.name, state.rules, rows, split_names)

        return LazySequence(task, range(len(spans)))

    results = LazySequence(lambda number: curated[number].filter_results, range(len(curated)))
    return joined(list(map(of_source, curated, engine.imap(_ledger_bounds, results, "plan ledgers", unit="sources"))))


def _ledger_bounds(of_files: Sequence[Results]) -> list[tuple[int, int]]:
    """The first and the last row, plus 1, of each ledger of a source. of_files: its results."""
    num_documents = sum(results.num_documents for results in of_files)
    runs = runs_of_size(num_documents, num_documents, MIN_LEDGER_ROWS, MAX_LEDGER_ROWS)
    for results in of_files:
        marks = results.load().marks
        runs.add(np.ones(len(marks), np.int64), marks)
    return runs.bounds()


def write_quarantine(curated: Sequence[SourceState], folder: Path) -> None:
    """One JSON line a record that could not be read. Files are named by digest; the lock has their names."""
    columns = ["doc_id", "raw_digest", "record", "offset", "unreadable", "reason", "excerpt"]
    with atomic_path(folder / QUARANTINE_NAME) as temporary, temporary.open("wb") as file:
        for state in curated:
            for row in quarantined_rows(state, columns):
                file.write(orjson.dumps({"source": state.source.name, **row}) + b"\n")


def quarantined_rows(state: SourceState, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The source's records that could not be read."""
    unreadable = pc.field("unreadable").is_valid()
    if state.rows is not None:
        unreadable &= pc.field(SOURCE) == state.source.name
    for path, results in zip(state.paths, state.filter_results, strict=True):
        if results.num_quarantined:
            yield from pq.read_table(fetch(path), columns=list(columns), filters=unreadable).to_pylist()
