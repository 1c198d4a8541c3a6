"""Removal by language, from documents to counts and the loud line, and thresholds tried by language."""

import pyarrow.parquet as pq

from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.filters.removal_by_language import heavy_removals
from gristmill.data_pipeline.filters.threshold_sweep import parse_sweep, sweep
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import annotated
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.lock import Lock
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.report.blocks import Paragraph, Table
from gristmill.pipelines.report.curation import language_blocks
from tests.support.corpora import prose, run_curate, write_jsonl

GERMAN = (
    "Der Fluss treibt die Mühle Nummer {}, und der Müller mahlt das Korn für das ganze Dorf. Am Abend gehen die Kinder "
    "über die Brücke nach Hause, weil es dunkel wird und die Mutter wartet. Im Winter liegt viel Schnee auf den "
    "Feldern, aber die Bauern haben genug Brot und Holz, und niemand muss frieren oder hungern."
)


def mixed(folder) -> SourceConfig:
    """20 English texts and 12 German ones."""
    texts = [prose(k) for k in range(20)] + [GERMAN.format(k) for k in range(12)]
    write_jsonl(folder / "s.jsonl", [{"text": text} for text in texts])
    return SourceConfig(name="web", format="jsonl", paths=(str(folder / "s.jsonl"),))


def test_german_is_kept_with_its_profile_and_its_removal_without_one_is_said_loudly(tmp_path):
    source = mixed(tmp_path)
    counts = run_curate([source], tmp_path / "ours", near_dedup=None)["sources"]
    assert counts["web"]["languages"]["de_Latn"] == {"documents": 12, "removed": {}}
    assert heavy_removals(counts) == []
    counts = run_curate([source], tmp_path / "published", near_dedup=None, profiles=None)["sources"]
    assert counts["web"]["languages"]["de"] == {"documents": 12, "removed": {"gopher_quality.min_stop_words": 12}}
    [line] = heavy_removals(counts)
    assert line.startswith("MORE THAN HALF REMOVED BY ONE RULE: gopher_quality.min_stop_words took 12 of 12 documents")
    assert "language de" in line and "{gopher_quality: {min_stop_words: null}}" in line and "profiles fit" in line
    _, said, table = language_blocks(counts)
    assert isinstance(said, Paragraph) and said.text == line
    assert (
        isinstance(table, Table)
        and ("web", "de", "gopher_quality.min_stop_words (12)", "12", "12", "100.0") in table.rows
    )


def test_a_whole_source_is_named_once_when_it_has_one_language():
    entry = {"languages": {"de": {"documents": 10, "removed": {"gopher_quality.min_words": 6}}}}
    [line] = heavy_removals({"web": entry})
    assert "6 of 10 documents of source web. If" in line
    assert heavy_removals({"web": {"languages": {"de": {"documents": 9, "removed": {"a.b": 9}}}}}) == []
    assert heavy_removals({"web": {"languages": {"de": {"documents": 12, "removed": {"a.b": 6}}}}}) == []


def test_the_ledger_has_the_threshold_of_the_profile(tmp_path):
    write_jsonl(tmp_path / "s.jsonl", [{"text": text} for text in (prose(1), GERMAN.format(1), GERMAN[:119])])
    source = SourceConfig(name="web", format="jsonl", paths=(str(tmp_path / "s.jsonl"),))
    run_curate([source], tmp_path, splits={"validation": 0, "test": 0})
    rows = {row["record"]: row for row in pq.read_table(tmp_path / "curate/ledger/web-00000.parquet").to_pylist()}
    assert [rows[k]["outcome"] for k in range(3)] == ["kept", "kept", "removed"]
    profile_words = 46.6  # de_Latn.yaml
    assert (rows[2]["rule"], rows[2]["threshold"]) == ("gopher_quality.min_words", profile_words)


def test_a_sweep_by_language_adds_up_to_the_sweep(tmp_path):
    source, engine = mixed(tmp_path), LocalEngine(1, Reporter.silent())
    lock = Lock(sources=(resolve(source, engine),))
    found = annotated([source], CurateConfig(), lock, tmp_path / "cache", engine)
    wanted = parse_sweep("gopher_quality.min_words=50:130:3")
    together, apart = (sweep(found, wanted, engine, by_language) for by_language in (False, True))
    assert [(row.language, row.threshold, row.documents) for row in apart] == [
        ("de_Latn", 50, 12), ("de_Latn", 90, 0), ("de_Latn", 130, 0), ("en_Latn", 50, 20), ("en_Latn", 90, 20),
        ("en_Latn", 130, 0),
    ]  # fmt: skip
    for row in together:
        assert row.documents == sum(other.documents for other in apart if other.threshold == row.threshold)
        assert row.taken == sum(other.taken for other in apart if other.threshold == row.threshold)
