import json
from pathlib import Path

import pyarrow as pa

from gristmill.data_pipeline.decontamination.matches import KINDS
from gristmill.pipelines.report.curation import contamination_blocks, duplicate_blocks, removed_span_blocks
from gristmill.pipelines.report.render import Paragraph, Table


def test_removed_spans_by_step_and_source():
    cut = {"line_dedup": {"documents": 2, "spans": 3000, "bytes": 90000}}
    blocks = removed_span_blocks(
        {"web": {"removed_spans": cut, "pieces": 4}, "books": {"removed_spans": {}, "pieces": 0}}
    )
    assert isinstance(blocks[1], Table) and blocks[1].rows == (("line_dedup", "web", "2", "3,000", "90,000"),)
    assert "adds 4 documents" in blocks[1].caption
    assert removed_span_blocks({"books": {"removed_spans": {}, "pieces": 0}}) == []


def test_matches_stand_side_by_side(tmp_path):
    assert contamination_blocks(tmp_path) == []
    shown = {
        "example": "7",
        "field": "q",
        "kind": "partial",
        "matched": 3,
        "of": 4,
        "benchmark_text": "a\nb",
        "excerpt": "x  a b",
    }
    numbers = dict.fromkeys(("examples", "searched", "found", *KINDS, "documents", "dropped", "characters"), 1234)
    (tmp_path / "decontamination").mkdir()
    path = tmp_path / "decontamination" / "report.json"
    path.write_text(json.dumps({"rivers": {**numbers, "shown": [shown]}}))
    tables = [block for block in contamination_blocks(tmp_path) if isinstance(block, Table)]
    assert tables[0].rows == (("rivers", *["1,234"] * 10),)
    assert tables[1].rows == (("7 (q)", "partial, 3 of 4", "a b", "x a b"),)
    path.write_text(json.dumps({"rivers": {**numbers, "shown": []}}))
    assert isinstance(contamination_blocks(tmp_path)[-1], Paragraph)


def test_the_largest_groups_of_duplicates_come_first(monkeypatch):
    """Thirty groups of 1 to 30 duplicates: the table has the largest, in falling order."""
    monkeypatch.setattr(
        "gristmill.pipelines.report.curation.kept_texts", lambda folder, ids: dict.fromkeys(ids, "text")
    )
    kept = [f"{number:032x}" for number in range(1, 31) for _ in range(number)]
    ledger = pa.table({"doc_id": [f"{n:032x}" for n in range(1000, 1000 + len(kept))], "duplicate_of": kept,
                       "similarity": [1.0] * len(kept), "bytes": [10] * len(kept),
                       "step": ["exact_dedup"] * len(kept)})  # fmt: skip
    (table,) = [block for block in duplicate_blocks(ledger, Path("corpus")) if isinstance(block, Table)]
    assert [int(row[1]) for row in table.rows] == list(range(30, 30 - len(table.rows), -1)) and len(table.rows) > 2
