"""Ledger rows of hand-made annotated files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.decontamination.matches import MATCHES
from gristmill.data_pipeline.filters.apply import KEPT, QUARANTINED, FilterResults
from gristmill.data_pipeline.filters.presets import Rule
from gristmill.data_pipeline.filters.profiles import Rules
from gristmill.data_pipeline.ledger.document_file import packed_ids
from gristmill.data_pipeline.ledger.ledger import LEDGER_SCHEMA, LedgerRows, LedgerTask, write_ledger
from gristmill.data_pipeline.ledger.removal_step import (
    PIECE,
    EvidenceFiles,
    RemovalStep,
    StoredRemovals,
    removed_dtype,
    removed_span_row,
    sorted_spans,
    write_removed,
)
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles

IDS = [letter * 32 for letter in "abcdef"]
WORDS = Rule("gopher", "min_words", "num_words", ">=", 50, "a paper")
SHARE = Rule("gopher", "max_share", "share", "<=", 0.5, "a paper")


def step(name: str, rows: list[tuple[str, str, float]], threshold: float = 0.8, **columns) -> RemovalStep:
    """rows: (letter of the removed document, letter of the kept one or "", value)."""
    kept_ids = pa.array([kept * 32 for _, kept, _ in rows if kept], pa.string())
    return RemovalStep(
        name,
        threshold,
        np.zeros(len(rows), np.int32),
        np.array([IDS.index(letter * 32) for letter, _, _ in rows], np.int64),
        np.array([value for _, _, value in rows]),
        packed_ids(kept_ids, Path()) if len(kept_ids) else None,
        **columns,
    )


@pytest.fixture
def task(tmp_path: Path) -> LedgerTask:
    """a is kept, b fails both rules, c fails the second, d is unreadable, e and f are removed by later steps."""
    path = tmp_path / "annotated.parquet"
    columns = {
        "doc_id": IDS,
        "raw_digest": ["0" * 64] * 6,
        "record": [0, 1, 2, 3, 4, 5],
        "unreadable": [None, None, None, "invalid_json", None, None],
        "num_bytes": [400, 10, 300, 0, 500, 600],
        "num_words": [80, 2, 60, 0, 90, 95],
        "share": [0.1, 0.9, 0.75, 0.0, 0.2, 0.3],
    }
    pq.write_table(pa.table(columns), path)
    return LedgerTask(
        path=tmp_path / "ledger" / "books-00000.parquet",
        source="books",
        rules=Rules((WORDS, SHARE), ()),
        rows=(
            LedgerRows(
                path,
                start=0,
                stop=6,
                results=FilterResults(
                    np.array([KEPT, 0, 1, QUARANTINED, KEPT, KEPT], np.int16),
                    bytes=np.zeros(6, np.uint32),
                    splits=np.zeros(6, np.int8),
                    languages=np.zeros(6, np.int16),
                    marks=np.zeros(6, np.uint8),
                    language_names=("",),
                ),
                removals=(
                    step("quality", [("e", "", 0.25)], thresholds=np.array([0.5])),
                    step("near_dedup", [("f", "a", 0.875)]),
                ),
                file=0,
                evidence=EvidenceFiles(),
            ),
        ),
        split_names=("train", "validation"),
    )


def with_evidence(task: LedgerTask, evidence: EvidenceFiles) -> LedgerTask:
    return replace(task, rows=(replace(task.rows[0], evidence=evidence),))


def write(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path)
    return path


def rows_of(task: LedgerTask) -> list[dict]:
    write_ledger(task)
    assert pq.read_schema(task.path).equals(LEDGER_SCHEMA)
    return pq.read_table(task.path).to_pylist()


def test_every_document_has_one_outcome(task):
    rows = rows_of(task)
    assert [row["doc_id"] for row in rows] == IDS
    assert [(row["outcome"], row["split"], row["step"], row["rule"]) for row in rows] == [
        ("kept", "train", None, None),
        ("removed", None, "filters", "gopher.min_words"),
        ("removed", None, "filters", "gopher.max_share"),
        ("quarantined", None, "read", "invalid_json"),
        ("removed", None, "quality", "quality.threshold"),
        ("removed", None, "near_dedup", "near_dedup.threshold"),
    ]


def test_a_removed_document_names_every_failed_rule_with_value_and_threshold(task):
    rows = rows_of(task)
    assert rows[1]["failed"] == [
        {"rule": "gopher.min_words", "value": 2.0, "threshold": 50.0},
        {"rule": "gopher.max_share", "value": 0.9, "threshold": 0.5},
    ]
    assert (rows[1]["value"], rows[1]["threshold"]) == (2.0, 50.0)
    assert rows[2]["failed"] == [{"rule": "gopher.max_share", "value": 0.75, "threshold": 0.5}]
    assert [row["failed"] for row in (rows[0], *rows[3:])] == [[], [], [], []]


def test_only_a_duplicate_has_a_similarity(task):
    """A quality score is a value and no similarity; it has a threshold of its own."""
    rows = rows_of(task)
    columns = ("value", "threshold", "duplicate_of", "similarity")
    assert tuple(rows[4][name] for name in columns) == (0.25, 0.5, None, None)
    assert tuple(rows[5][name] for name in columns) == (0.875, 0.8, "a" * 32, 0.875)


def test_removed_spans_pieces_and_matches_stand_with_their_document(task, tmp_path):
    spans = [{**removed_span_row("a" * 32, "line_dedup.min_count", "xyz one two", 4, 7), "kept_in": "b" * 32}]
    spans_table = pa.Table.from_pylist(spans, schema=sorted_spans([]).schema)
    match = {"doc_id": "a" * 32, "benchmark": "rivers", "example": "7", "field": "question", "kind": "verbatim"}
    matches = pa.Table.from_pylist([{**match, "text": 0, "matched": 3, "of": 3, "excerpt": ""}], schema=MATCHES)
    pieces = pa.table({"parent_id": ["a" * 32] * 2, "doc_id": ["1" * 32, "2" * 32]}, schema=PIECE)
    evidence = EvidenceFiles(
        (write(tmp_path / "spans.parquet", spans_table),),
        write(tmp_path / "matches.parquet", matches),
        write(tmp_path / "pieces.parquet", pieces),
    )
    first, *others = rows_of(with_evidence(task, evidence))
    (span,) = first["removed_spans"]
    assert (span["rule"], span["start"], span["length"], span["bytes"]) == ("line_dedup.min_count", 4, 3, 3)
    assert (span["excerpt"], span["kept_in"], span["benchmark"]) == ("one", "b" * 32, None)
    assert first["pieces"] == ["1" * 32, "2" * 32]
    (found,) = first["contamination"]
    assert (found["benchmark"], found["example"], found["matched"], found["of"]) == ("rivers", "7", 3, 3)
    assert all(row["removed_spans"] == row["pieces"] == row["contamination"] == [] for row in others)


def test_spans_of_several_steps_are_ordered_by_their_place(task, tmp_path):
    """A step's file is read for the documents of the shard alone; e's spans come from two files."""
    rows = {"one": [("e", 7, 9), ("c", 0, 1)], "two": [("e", 2, 3), ("1", 0, 9)]}
    files = []
    for name, spans in rows.items():
        found = [removed_span_row(letter * 32, f"{name}.rule", "x" * 9, start, stop) for letter, start, stop in spans]
        table = pa.Table.from_pylist(found, schema=sorted_spans([]).schema)
        files.append(write(tmp_path / f"{name}.parquet", table))
    found = [row["removed_spans"] for row in rows_of(with_evidence(task, EvidenceFiles(tuple(files))))]
    assert [[(span["rule"], span["start"]) for span in spans] for spans in found] == [
        [],
        [],
        [("one.rule", 0)],
        [],
        [("two.rule", 2), ("one.rule", 7)],
        [],
    ]


def test_the_ledger_does_not_depend_on_how_rows_are_spread_over_ranges(task):
    """The same file as two ranges, of rows 0 to 3 and 4 to 5."""
    whole = rows_of(task)
    [rows] = task.rows

    parts = (replace(rows, stop=4), replace(rows, start=4))
    other = replace(task, path=task.path.with_name("other.parquet"), rows=parts)
    assert rows_of(other) == whole and other.path.read_bytes() == task.path.read_bytes()


def test_the_mask_of_removed_documents_and_the_rows_of_some():
    """Files 0 and 2 lose documents; the rows of file 2 from 4 on are counted from 4."""
    near = RemovalStep(
        "near_dedup", 0.8, np.array([2, 0, 2], np.int32), np.array([5, 1, 3]), np.array([0.9, 0.8, 0.85])
    ).sorted()
    assert near.removed_mask(0, 3).tolist() == [False, True, False]
    assert not near.removed_mask(1, 3).any()
    second = near.in_files(2, 3)
    assert (second.rows.tolist(), second.values.tolist()) == ([3, 5], [0.85, 0.9])
    some = second.in_rows(4, 6)
    assert (some.rows.tolist(), some.values.tolist()) == ([1], [0.9])


@pytest.mark.parametrize("columns", [{}, {"thresholds": np.array([0.5, 0.6])}, {"rules": np.array([1, 0], np.int8)}])
def test_removed_documents_are_the_same_on_disk(tmp_path, columns):
    near = step("near_dedup", [("f", "a", 0.875), ("b", "c", 0.9)], **columns)
    ordered = near.sorted()
    of_file = [ordered.in_file(number) for number in (0, 1)]
    fields = {"row": "rows", "value": "values", "threshold": "thresholds", "rule": "rules"}
    names = {"duplicate_of": "duplicate_of"} | {
        name: k for name, k in fields.items() if getattr(ordered, k) is not None
    }
    removed = PartitionedFiles(tmp_path / "removed", removed_dtype(*names), 2, 1)
    for number, step_of_file in enumerate(of_file):
        if len(step_of_file.rows):
            write_removed(removed, number, **{name: getattr(step_of_file, kept) for name, kept in names.items()})
    stored = StoredRemovals(near.step, near.threshold, removed, near.rule_names, is_by_part=True)
    for number in (0, 1):
        assert stored.removed_mask(number, 6).tolist() == near.removed_mask(number, 6).tolist()
        for name, values in vars(ordered.in_file(number)).items():
            np.testing.assert_array_equal(getattr(stored.in_file(number), name), values, name)


def test_a_source_without_documents_has_an_empty_ledger(task):
    assert rows_of(replace(task, rows=())) == []


def test_a_complete_shard_is_not_written_again(task):
    rows_of(task)
    before = task.path.stat().st_mtime_ns
    write_ledger(replace(task, source="other"))
    assert task.path.stat().st_mtime_ns == before
