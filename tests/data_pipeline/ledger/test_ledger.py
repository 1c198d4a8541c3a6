"""Ledger rows of hand-made annotated files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.decontamination.matches import MATCHES
from gristmill.data_pipeline.filters.apply import KEPT, QUARANTINED, Rules
from gristmill.data_pipeline.filters.rule import Rule
from gristmill.data_pipeline.ledger.ledger import LEDGER_SCHEMA, Evidence, LedgerTask, RemovalStep, write_ledger
from gristmill.data_pipeline.ledger.parquet_rows import RowRange
from gristmill.data_pipeline.ledger.removed_spans import removed_span_row, sorted_spans

IDS = [letter * 32 for letter in "abcdef"]
WORDS = Rule("gopher", "min_words", "num_words", ">=", 50, "a paper")
SHARE = Rule("gopher", "max_share", "share", "<=", 0.5, "a paper")


def step(name: str, rows: list[tuple[str, str, float]], threshold: float = 0.8, **columns) -> RemovalStep:
    """rows: (letter of the removed document, letter of the kept one or "", value)."""
    return RemovalStep(
        name,
        threshold,
        np.array([letter * 32 for letter, _, _ in rows], "S32"),
        np.array([kept * 32 for _, kept, _ in rows], "S32"),
        np.array([value for _, _, value in rows]),
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
        slices=(RowRange(path, np.arange(6)),),
        failed_rule=(np.array([KEPT, 0, 1, QUARANTINED, KEPT, KEPT], np.int16),),
        splits=(np.array(["train", "", "", "", "", ""]),),
        removals=(
            step("quality", [("e", "", 0.25)], thresholds=np.array([0.5])),
            step("near_dedup", [("f", "a", 0.875)]),
        ),
        evidence=Evidence(sorted_spans([]), {}, MATCHES.empty_table()),
    )


def rows_of(task: LedgerTask) -> list[dict]:
    write_ledger(task)
    assert pq.read_schema(task.path).equals(LEDGER_SCHEMA)
    return pq.read_table(task.path).to_pylist()


def test_every_document_has_one_fate(task):
    rows = rows_of(task)
    assert [row["doc_id"] for row in rows] == IDS
    assert [(row["fate"], row["split"], row["step"], row["rule"]) for row in rows] == [
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


def test_removed_spans_pieces_and_matches_stand_with_their_document(task):
    spans = [{**removed_span_row("a" * 32, "line_dedup.min_count", "xyz one two", 4, 7), "kept_in": "b" * 32}]
    spans_table = pa.Table.from_pylist(spans, schema=sorted_spans([]).schema)
    match = {"doc_id": "a" * 32, "benchmark": "rivers", "example": "7", "field": "question", "kind": "verbatim"}
    matches = pa.Table.from_pylist([{**match, "text": 0, "matched": 3, "of": 3, "excerpt": ""}], schema=MATCHES)
    evidence = Evidence(spans_table, {"a" * 32: ("1" * 32, "2" * 32)}, matches)
    first, *others = rows_of(replace(task, evidence=evidence))
    (span,) = first["cuts"]
    assert (span["rule"], span["start"], span["length"], span["bytes"]) == ("line_dedup.min_count", 4, 3, 3)
    assert (span["excerpt"], span["kept_in"], span["benchmark"]) == ("one", "b" * 32, None)
    assert first["pieces"] == ["1" * 32, "2" * 32]
    (found,) = first["contamination"]
    assert (found["benchmark"], found["example"], found["matched"], found["of"]) == ("rivers", "7", 3, 3)
    assert all(row["cuts"] == row["pieces"] == row["contamination"] == [] for row in others)


def test_evidence_of_some_documents_leaves_out_the_others():
    spans = [removed_span_row(letter * 32, "r.r", "abc", 0, 1) for letter in "ab"]
    evidence = Evidence(
        pa.Table.from_pylist(spans, schema=sorted_spans([]).schema), {"b" * 32: ("1" * 32,)}, MATCHES.empty_table()
    )
    only = evidence.of(["a" * 32])
    assert only.removed_spans.column("doc_id").to_pylist() == ["a" * 32] and only.pieces == {}
    assert evidence.of(["b" * 32]).pieces == {"b" * 32: ("1" * 32,)}


def test_the_mask_of_removed_documents_and_the_rows_of_some():
    near = step("near_dedup", [("b", "a", 0.9), ("d", "a", 0.8)])
    ids = np.array(IDS, "S32")
    assert near.removed_mask(ids).tolist() == [False, True, False, True, False, False]
    assert not step("near_dedup", []).removed_mask(ids).any()
    some = near.of(ids[2:])
    assert (some.doc_ids.tolist(), some.values.tolist()) == ([b"d" * 32], [0.8])


def test_a_step_from_an_unsorted_table_is_sorted_by_doc_id():
    table = pa.table({"doc_id": ["d" * 32, "b" * 32], "duplicate_of": ["a" * 32, "c" * 32], "similarity": [0.8, 0.9]})
    made = RemovalStep.from_table("near_dedup", 0.8, table)
    assert made.doc_ids.tolist() == [b"b" * 32, b"d" * 32]
    assert (made.duplicate_of.tolist(), made.values.tolist()) == ([b"c" * 32, b"a" * 32], [0.9, 0.8])


def test_a_source_without_documents_has_an_empty_ledger(task):
    assert rows_of(replace(task, slices=(), failed_rule=(), splits=())) == []


def test_a_complete_shard_is_not_written_again(task):
    rows_of(task)
    before = task.path.stat().st_mtime_ns
    write_ledger(replace(task, source="other"))
    assert task.path.stat().st_mtime_ns == before
