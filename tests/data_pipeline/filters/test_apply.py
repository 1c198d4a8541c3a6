"""Filter rules on hand-made tables of signals."""

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.corpus.splits import SPLITS, one_split
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.filters import apply as apply_module
from gristmill.data_pipeline.filters.apply import (
    EXAMPLES_PER_SIDE,
    KEPT,
    QUARANTINED,
    FilterResults,
    FilterTask,
    apply_filters,
    apply_filters_to_files,
    failures,
    signal_values,
)
from gristmill.data_pipeline.filters.presets import FilterChoice, Rule
from gristmill.data_pipeline.filters.profiles import EMPTY_RULE, WANTED_LANGUAGE, Rules, rules_of
from gristmill.data_pipeline.filters.threshold_sweep import heavy_removals, parse_sweep, sweep
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import annotated
from gristmill.data_pipeline.signals.language import LanguageConfig
from gristmill.foundation.checksums import checksummed_path
from gristmill.foundation.lock import Lock
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.report.curation import language_blocks
from gristmill.pipelines.report.render import Paragraph, Table
from tests.support.corpora import prose, run_curate, write_jsonl

WORDS = Rule("gopher", "min_words", "num_words", ">=", 50, "a paper")
SHARE = Rule("gopher", "max_share", "share", "<=", 0.5, "a paper")
LANGUAGE = Rule("language", "min_score", WANTED_LANGUAGE, ">=", 0.65, "a paper")


ENGINE = LocalEngine(1, Reporter.silent())


def languages_of(results: FilterResults) -> list[str]:
    return [results.language_names[code] for code in results.languages.tolist()]


def signals(**columns) -> pa.Table:
    return pa.table(columns)


def test_values_on_the_threshold_pass():
    table = signals(num_words=[49, 50, 51], share=[0.4, 0.5, 0.6])
    assert failures(table, Rules((WORDS, SHARE), ())).tolist() == [[True, False, False], [False, False, True]]


@pytest.mark.parametrize(("keep", "failed"), [(">=", [1, 0, 0]), (">", [1, 1, 0]), ("<=", [0, 0, 1]), ("<", [0, 1, 1])])
def test_each_comparison(keep, failed):
    rule = Rule("f", "n", "x", keep, 2, "")
    assert failures(signals(x=[1.0, 2.0, 3.0]), Rules((rule,), ())).tolist() == [[bool(f) for f in failed]]


def test_a_missing_value_passes_every_comparison():
    for keep in (">=", ">", "<=", "<"):
        rule = Rule("f", "n", "x", keep, 2, "")
        assert not failures(signals(x=[float("nan")]), Rules((rule,), ())).any()


def test_the_wanted_language_score_is_zero_for_other_languages():
    table = signals(detected_language=["en", "de", "fr"], language_score=[0.9, 0.8, 0.99])
    assert signal_values(table, WANTED_LANGUAGE, ("en", "de")).tolist() == [0.9, 0.8, 0.0]
    assert failures(table, Rules((LANGUAGE,), ("en",))).tolist() == [[False, True, True]]


def test_rules_read_only_the_columns_that_they_compare():
    assert Rules((WORDS, SHARE), ()).columns == ["num_words", "share"]
    assert Rules((LANGUAGE,), ("en",)).columns == ["detected_language", "language_score"]
    assert Rules((WORDS,), (), {"en": (50.0,)}).columns == ["num_words", "profile"]


def test_thresholds_of_a_language_profile_replace_the_rule_s_own():
    """en: at least 50 words; th: the rule is off; a profile without thresholds uses the rule's own, 50."""
    rules = Rules((WORDS,), (), {"en": (40.0,), "th": (float("nan"),)})
    table = signals(num_words=[45, 45, 45], profile=["en", "th", "xx"])
    thresholds = rules.thresholds(table)
    assert thresholds.shape == (1, 3)
    np.testing.assert_array_equal(thresholds[0], [40.0, np.nan, 50.0])
    assert failures(table, rules).tolist() == [[False, False, True]]


def test_only_and_without_select_rules_with_their_profile_thresholds():
    rules = Rules((WORDS, SHARE), ("en",), {"en": (40.0, 0.3)})
    assert rules.only(1) == Rules((SHARE,), ("en",), {"en": (0.3,)})
    assert rules.without(1) == Rules((WORDS,), ("en",), {"en": (40.0,)})


def test_no_rules_fail_no_document():
    table = signals(num_words=[1, 2])
    assert failures(table, Rules((), ())).shape == (0, 2)


def test_the_first_failed_rule_decides_and_unreadable_rows_are_quarantined(tmp_path):
    """Row 1 fails both rules and counts for the first; row 2 fails the second; row 3 could not be read."""
    path = tmp_path / "annotated.parquet"
    table = signals(
        doc_id=["a" * 32, "b" * 32, "c" * 32, "d" * 32],
        unreadable=[None, None, None, "invalid_json"],
        num_bytes=[400, 10, 300, 0],
        text_hash=pa.array([1, 2, 3, 4], pa.uint64()),
        detected_language=["en", "en", "de", ""],
        num_words=[80, 2, 60, 0],
        share=[0.1, 0.9, 0.8, 0.0],
    )
    pq.write_table(table, path)
    results = apply_filters(FilterTask(path, Rules((WORDS, SHARE), ()), split_of=lambda hashes: hashes.astype(np.int8)))
    assert results.failed_rule.tolist() == [KEPT, 0, 1, QUARANTINED]
    assert (results.bytes.tolist(), results.splits.tolist()) == ([400, 10, 300, 0], [1, 2, 3, 4])
    assert languages_of(results) == ["en", "en", "de", ""]


def test_the_documents_nearest_a_threshold_on_either_side(tmp_path):
    """Threshold 50: 49, 48 and 10 are removed, 50, 50, 60 and 70 kept; NaN is at no distance. Of equals the first."""
    path = tmp_path / "annotated.parquet"
    num_words = [10.0, 60.0, 49.0, 50.0, 48.0, 70.0, 50.0, float("nan")]
    table = signals(
        unreadable=pa.nulls(8, pa.string()),
        num_bytes=[400] * 8,
        text_hash=pa.array(range(8), pa.uint64()),
        detected_language=["en"] * 8,
        num_words=num_words,
    )
    pq.write_table(table, path)
    nearest = apply_filters(FilterTask(path, Rules((WORDS,), ()))).nearest
    assert nearest.rows.tolist() == [[[2, 4, 0, -1, -1], [3, 6, 1, 5, -1]]]
    assert nearest.values[0, 0, :3].tolist() == [49.0, 48.0, 10.0]
    assert nearest.values[0, 1, :4].tolist() == [50.0, 50.0, 60.0, 70.0]
    assert (nearest.thresholds[nearest.rows >= 0] == 50).all()


def test_the_languages_of_the_results_are_profiles_where_profiles_are_used(tmp_path):
    path = tmp_path / "annotated.parquet"
    table = signals(
        doc_id=["a" * 32],
        unreadable=pa.array([None], pa.string()),
        num_bytes=[400],
        text_hash=pa.array([1], pa.uint64()),
        detected_language=["de"],
        profile=["de_Latn"],
        num_words=[80],
    )
    pq.write_table(table, path)
    results = apply_filters(FilterTask(path, Rules((WORDS,), (), {"de_Latn": (100.0,)})))
    assert (results.failed_rule.tolist(), languages_of(results)) == ([0], ["de_Latn"])


def test_rules_stand_in_the_order_language_filters_last():
    filters = [FilterChoice(preset="gopher_quality", thresholds={"min_words": 20})]
    rules = rules_of(filters, ("en",), LanguageConfig(threshold=0.7), last=(SHARE,)).rules
    assert rules[0] == EMPTY_RULE
    assert (rules[1].label, rules[1].threshold) == ("language.min_score", 0.7)
    assert rules[-1] == SHARE
    by_label = {rule.label: rule.threshold for rule in rules}
    assert by_label["gopher_quality.min_words"] == 20


def test_rules_on_unmeasured_signals_are_left_out():
    filters = [FilterChoice(preset="gopher_quality")]
    every = rules_of(filters, (), None).rules
    signal = next(rule.signal for rule in every if rule.label == "gopher_quality.min_words")
    measured = rules_of(filters, (), None, unmeasured={signal}).rules
    assert [rule for rule in every if rule.signal != signal] == list(measured) and len(measured) < len(every)


def test_results_are_kept_for_the_same_documents_and_rules(tmp_path, monkeypatch):
    calls = []
    whole = apply_module.apply_filters
    monkeypatch.setattr(apply_module, "apply_filters", lambda task: calls.append(task.rules) or whole(task))
    path = tmp_path / "s-1.parquet"

    def results_of(threshold: float, rows: int = 20, split: str | None = None) -> list[int]:
        table = signals(
            unreadable=pa.nulls(rows, pa.string()),
            num_bytes=[5] * rows,
            text_hash=pa.array(range(rows), pa.uint64()),
            detected_language=["en"] * rows,
            num_words=range(rows),
        )
        with checksummed_path(path) as temporary:
            pq.write_table(table, temporary)
        rules = Rules((replace(WORDS, threshold=threshold),), ())
        split_of = None if split is None else partial(one_split, split=split)
        [stored] = apply_filters_to_files([FilterTask(path, rules, split_of)], ENGINE, tmp_path / "results")
        assert set(stored.load().splits.tolist()) == {0 if split is None else SPLITS.index(split)}
        assert stored.num_documents == rows and stored.present_languages == ("en",)
        assert np.array_equal(stored.nearest.rows, whole(FilterTask(path, rules)).nearest.rows)
        return np.flatnonzero(stored.load().failed_rule == KEPT).tolist()

    assert results_of(15) == results_of(15) == [15, 16, 17, 18, 19] and len(calls) == 1
    assert results_of(18) == [18, 19] and len(calls) == 2
    assert results_of(18, rows=19) == [18] and len(calls) == 3
    assert results_of(18, 19, "test") == results_of(18, 19, "validation") == [18] and len(calls) == 5
    assert len([path for path in (tmp_path / "results").iterdir() if not path.name.startswith(".")]) == 2


def test_row_groups_decide_nothing(tmp_path):
    """One row group at a time gives the results of the whole file, with equal distances and languages in any order."""
    rng = np.random.default_rng(0)
    size = 500
    table = pa.table(
        {
            "unreadable": pa.array([None if k % 50 else "encoding" for k in range(size)], pa.string()),
            "num_bytes": rng.integers(0, 900, size),
            "text_hash": rng.integers(0, 3, size).astype(np.uint64),
            "detected_language": rng.choice(["de_Latn", "en_Latn", "fr_Latn"], size),
            "num_words": rng.integers(30, 70, size),  # many documents lie as near to the threshold as others
            "share": rng.random(size),
        }
    )
    found = []
    for rows in (size, 97, 1):
        pq.write_table(table, tmp_path / f"{rows}.parquet", row_group_size=rows)
        task = FilterTask(
            tmp_path / f"{rows}.parquet", Rules((WORDS, SHARE), ()), lambda hashes: hashes.astype(np.int8)
        )
        found.append(apply_filters(task))
    for other in found[1:]:
        for name in ("failed_rule", "bytes", "splits", "languages"):
            assert np.array_equal(getattr(other, name), getattr(found[0], name))
        assert other.language_names == found[0].language_names
        for name in ("rows", "values", "thresholds"):
            assert np.array_equal(getattr(other.nearest, name), getattr(found[0].nearest, name))
    assert len(set(found[0].nearest.rows.ravel().tolist())) == 4 * EXAMPLES_PER_SIDE


# Removal by language, from documents to counts and the loud line, and thresholds tried by language.

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
    assert (
        "documents of web in de. If" in line
        and "{gopher_quality: {min_stop_words: null}}" in line
        and "profiles fit" in line
    )
    _, said, table = language_blocks(counts)
    assert isinstance(said, Paragraph) and said.text == line
    assert (
        isinstance(table, Table)
        and ("web", "de", "gopher_quality.min_stop_words (12)", "12", "12", "100.0") in table.rows
    )


def test_a_whole_source_is_named_once_when_it_has_one_language():
    entry = {"languages": {"de": {"documents": 10, "removed": {"gopher_quality.min_words": 6}}}}
    [line] = heavy_removals({"web": entry})
    assert "6 of 10 documents of web. If" in line
    assert heavy_removals({"web": {"languages": {"de": {"documents": 9, "removed": {"a.b": 9}}}}}) == []
    assert heavy_removals({"web": {"languages": {"de": {"documents": 12, "removed": {"a.b": 6}}}}}) == []


def test_a_rule_is_one_line_and_excluded_languages_are_not_told_apart():
    """Five languages of which the recipe wants one, whose documents are not recognized for sure."""
    rule = "language.min_score"
    languages = {name: {"documents": 20, "removed": {rule: 20}} for name in ("fr_Latn", "ru_Cyrl", "ko_Hang", "und")}
    languages["de_Latn"] = {"documents": 100, "removed": {rule: 60}}
    [line] = heavy_removals({"web": {"languages": languages}}, {"web": ("de",)})
    assert f"{rule} took 140 of 180 documents of web, 60 of 100 documents of web in de_Latn. If" in line
    [line] = heavy_removals({"web": {"languages": languages}}, {"web": ("fr", "ru", "ko", "de")})
    assert line.count("documents of web in") == 3 and " and 1 more. If" in line


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
    lock = Lock(sources=tuple(resolve([source], engine)))
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
