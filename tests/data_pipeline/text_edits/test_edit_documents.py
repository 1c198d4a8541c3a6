"""Rewritten parts: what stands between two steps."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from planted import engine, padded, write_part

from gristmill.data_pipeline.dedup.substrings import REPEAT, SubstringDedupConfig, find_repeated_substrings
from gristmill.data_pipeline.text_edits.edit_documents import (
    SpanRemoval,
    edit_document_files,
    in_characters,
    remove_spans,
)
from gristmill.foundation.shuffle import Shuffle


@pytest.mark.parametrize(
    ("text", "spans", "left"), [("a\nb\nc", [(2, 4)], "a\nc"), ("abcdef", [(4, 6), (0, 1)], "bcd"), ("abc", [], "abc")]
)
def test_cuts_by_hand(text: str, spans: list[tuple[int, int]], left: str):
    assert remove_spans(text, spans) == left


def test_bytes_become_characters():
    assert in_characters("äbc", [(0, 2), (3, 4)]) == [(0, 1), (2, 3)]
    assert in_characters("abc", [(1, 3)]) == [(1, 3)]
    assert in_characters("ä", [(0, 2)]) == [(0, 1)]


PLAIN = SpanRemoval("r", "r")


def spans_of(prefix: Path, spans: list[tuple[str, int, int]]) -> Shuffle:
    """(document, start, stop) of spans in one document file, as deduplication writes them."""
    records = np.zeros(len(spans), REPEAT)
    for record, (doc_id, start, stop) in zip(records, spans, strict=True):
        record["id"], record["start"], record["stop"] = (0, int(doc_id, 16)), start, stop
    found = Shuffle(prefix, REPEAT, 1, 1)
    found.write(0, records, np.array([0, len(records)]))
    return found


TEXTS = {"1": "one", "2": "the cät sat on the mat", "3": "and the cät sat on a hat", "4": "the cät sat on "}
TEN = SubstringDedupConfig(min_bytes=10)


def test_parts_stay_row_for_row_and_every_span_is_on_record(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", TEXTS, "tales", 3, kept=[True, True, True, False])
    spans = find_repeated_substrings([part], TEN, engine(), tmp_path / "repeats")
    found = edit_document_files(
        [part], spans, SpanRemoval("substring_dedup", "remove", in_bytes=True), engine(), tmp_path / "left"
    )
    (left,) = found.document_files
    assert (left.source, left.priority, left.kept.tolist()) == ("tales", 3, [True, True, True, False])
    table = pq.read_table(left.path)
    assert table.column("doc_id").to_pylist() == [padded(i) for i in TEXTS]
    # Document 3 is longer than 2 and stays whole; of the removed document 4 nothing is needed.
    assert table.column("text").to_pylist() == ["one", "the mat", TEXTS["3"], ""]
    (cut,) = found.removed_spans.to_pylist()
    assert (cut["doc_id"], cut["rule"], cut["kept_in"]) == (padded("2"), "substring_dedup.remove", padded("3"))
    assert (cut["start"], cut["length"], cut["bytes"], cut["excerpt"]) == (0, 15, 16, "the cät sat on")
    assert len(found.removals.in_file(0).rows) == 0  # something is left of both


@pytest.mark.parametrize(
    ("removal", "rule", "removed"),
    [
        (SpanRemoval("dedup", "min_count"), "dedup.nothing_left", [(2, 0.0)]),
        (SpanRemoval("dedup", "drop", is_applied=False, drop_share=0.5), "dedup.drop_share", [(0, 0.75), (2, 0.5625)]),
        (SpanRemoval("dedup", "annotate", is_applied=False), "dedup.nothing_left", []),
    ],
)
def test_documents_that_an_edit_removes(tmp_path: Path, removal: SpanRemoval, rule: str, removed: list):
    """The spans hold 6 of 8 bytes, 1 of 2 and 9 of 16 (the rest is white space)."""
    part = write_part(tmp_path / "p.parquet", {"1": "abcdefgh", "2": "ab", "3": "  abcdefghi     "})
    spans = spans_of(tmp_path / "spans", [("1", 0, 6), ("2", 0, 1), ("3", 2, 11)])
    found = edit_document_files([part], spans, removal, engine(), tmp_path / "work").removals
    step = found.in_file(0)
    assert list(zip(step.rows.tolist(), step.values.tolist(), strict=True)) == removed
    assert (step.labels, len(found.in_file(1).rows)) == ((rule,), 0)


def test_what_is_only_recorded_changes_no_text(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", TEXTS)
    spans = find_repeated_substrings([part], TEN, engine(), tmp_path / "repeats")
    found = edit_document_files(
        [part],
        spans,
        SpanRemoval("substring_dedup", "annotate", in_bytes=True, is_applied=False),
        engine(),
        tmp_path / "left",
    )
    assert found.document_files == [part]
    assert len(found.removed_spans) == 2


def test_a_part_without_spans_is_the_one_given(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "abcdef"})
    spans = spans_of(tmp_path / "spans", [])
    for _ in range(2):
        assert edit_document_files([part], spans, PLAIN, engine(), tmp_path / "work").document_files == [part]


def test_other_spans_are_removed_again(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "abcdef"})
    for start, left in ((1, "adef"), (2, "abef")):
        spans = spans_of(tmp_path / "spans", [("1", start, start + 2)])
        (rewritten,) = edit_document_files([part], spans, PLAIN, engine(), tmp_path / "work").document_files
        assert pq.read_table(rewritten.path).column("text").to_pylist() == [left]
