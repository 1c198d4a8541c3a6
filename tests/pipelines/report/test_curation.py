import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.decontamination.matches import KINDS
from gristmill.data_pipeline.quality.linear_model import LinearModel
from gristmill.data_pipeline.quality.scores import QualityScoreConfig, write_model_reports
from gristmill.pipelines.report.curation import (
    cluster_size_table,
    contamination_blocks,
    duplicate_blocks,
    kept_blocks,
    personal_data_blocks,
    quality_blocks,
    removed_span_blocks,
    rule_language_blocks,
    step_table,
)
from gristmill.pipelines.report.render import Paragraph, Table


def test_removed_spans_by_step_and_source():
    cut = {"line_dedup": {"documents": 2, "spans": 3000, "bytes": 90000}}
    blocks = removed_span_blocks(
        {"web": {"removed_spans": cut, "pieces": 4}, "books": {"removed_spans": {}, "pieces": 0}}
    )
    assert isinstance(blocks[1], Table) and blocks[1].rows == (("line_dedup", "web", "2", "3,000", "90,000"),)
    assert "adds 4 documents" in blocks[1].caption
    assert removed_span_blocks({"books": {"removed_spans": {}, "pieces": 0}}) == []


def test_models_of_quality_with_their_reliability(tmp_path):
    """A model of 2**10 weights fitted to nothing, as curation describes it for the report."""
    report = {
        "auc": 0.75,
        "calibration_error": 0.1,
        "measured_documents": 1200,
        "reliability": [
            {"score": 0.2, "positive": 0.25, "documents": 600},
            {"score": 0.7, "positive": 0.8, "documents": 600},
        ],
    }
    assert quality_blocks(tmp_path) == []
    LinearModel(np.zeros(2**10, np.float32), 1, 1.0, 0.0, ("law", "spam"), report).save(tmp_path / "m.safetensors")
    write_model_reports({"mine": QualityScoreConfig(model=str(tmp_path / "m.safetensors"))}, tmp_path / "quality")
    _, table, figure = quality_blocks(tmp_path)
    assert table.rows == (("quality_mine", "law against spam", "0.7500", "0.1000", "1,200"),)
    assert figure.name == "reliability" and b"quality_mine" in figure.svg


def test_documents_and_bytes_left_after_each_step():
    """10 documents of 1,000 bytes: one unreadable, two filtered by two rules of one step, one a duplicate."""
    tally = {"documents": 1, "bytes": 50}
    entry = {
        "read": {"documents": 10, "bytes": 1000},
        "removed": {
            "gopher.min_words": tally,
            "exact_dedup": {"documents": 1, "bytes": 200},
            "gopher.max_words": tally,
        },
        "quarantined": {"invalid JSON": {"documents": 1}},
    }
    rows = step_table({"web": entry}, ["gopher.min_words", "gopher.max_words", "exact_dedup"]).rows
    assert rows == (
        ("read", "", "", "10", "1,000"),
        ("quarantine", "1", "0", "9", "1,000"),
        ("gopher", "2", "100", "7", "900"),
        ("exact_dedup", "1", "200", "6", "700"),
    )


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
    _, table = [block for block in duplicate_blocks(ledger, Path("corpus")) if isinstance(block, Table)]
    assert {row[1] for row in table.rows} == {"text"}
    assert [int(row[2]) for row in table.rows] == list(range(30, 30 - len(table.rows), -1)) and len(table.rows) > 2


def test_groups_of_duplicates_by_size():
    """Groups of 2, 3 and 6 documents: one document of each was kept."""
    table = cluster_size_table([1, 2, 5])
    assert table.rows == (("2 to 3", "2", "3"), ("4 to 7", "1", "5"))


def test_rules_by_source_and_language_the_most_first():
    languages = {"en": {"documents": 8, "removed": {"a.low": 2}}, "": {"documents": 4, "removed": {"a.low": 3}}}
    (table,) = rule_language_blocks({"sources": {"web": {"languages": languages}}})
    assert table.rows == (("a.low", "web", "none", "3", "75.0"), ("a.low", "web", "en", "2", "25.0"))
    assert rule_language_blocks({"sources": {"web": {"languages": {}}}}) == []


@pytest.fixture
def kept(tmp_path):
    """Three kept documents of two hosts; two placeholders were written into one of them."""
    urls = ["https://a.example/x", "http://user@A.example:80/y", None]
    signals = {"detected_language": ["eng", "eng", None], "num_bytes": [10, 5, 1], "pii_replaced": [2, 0, 0]}
    for name, table in (("documents", pa.table({"url": urls})), ("signals", pa.table(signals))):
        (tmp_path / name / "train").mkdir(parents=True)
        pq.write_table(table, tmp_path / name / "train" / "web-00000.parquet")
    return tmp_path


def test_languages_and_hosts_of_kept_documents(kept):
    languages, hosts = [block for block in kept_blocks(kept) if isinstance(block, Table)]
    assert languages.rows == (("web", "eng", "2", "15"), ("web", "none", "1", "1"))
    assert hosts.rows == (("a.example", "2", "15"),)


def test_personal_data_by_source(kept):
    blocks = personal_data_blocks(kept, {"web": {"removed": {"pii.email": {"documents": 4}}}, "books": {"removed": {}}})
    assert blocks[1].rows == (("web", "1", "2", "4"),)
    assert personal_data_blocks(kept / "none", {"books": {"removed": {}}}) == []
