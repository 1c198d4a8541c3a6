"""`gristmill quality fit`, and the recipe that names its model."""

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.cli.commands import app
from gristmill.pipelines.cli.fit import LabelledDocuments, labelled_texts
from gristmill.pipelines.python_api import run as run_recipe
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages.preflight import preflight
from gristmill.pipelines.stages.stage_list import STAGES
from tests.support.corpora import prose, write_jsonl

GOOD = [prose(k) for k in range(60)]
BAD = [prose(1000 + k).replace("the", "buy now").replace("river", "cheap") for k in range(60)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good").mkdir()
    for number, text in enumerate(GOOD):
        (tmp_path / "good" / f"{number}.txt").write_text(text)
    write_jsonl(tmp_path / "bad.jsonl", [{"text": text} for text in BAD])
    labelled = [{"text": text, "kind": kind} for kind, texts in (("hq", GOOD), ("spam", BAD)) for text in texts]
    write_jsonl(tmp_path / "labelled.jsonl", labelled)
    return tmp_path


def recipe(model: str, **score) -> dict:
    return {
        "name": "scores",
        "sources": [{"name": "s", "format": "jsonl", "paths": ["labelled.jsonl"]}],
        "curate": {
            "quality_scores": {"mine": {"model": model, **score}},
            "filters": [{"quality_mine": {"min": 0.5}}],
            "near_dedup": None,
            "splits": {"validation": 0.0, "test": 0.0},
        },
    }


def fit(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["quality", "fit", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_fitted_model_scores_and_filters_in_a_recipe(folder):
    output = fit("good", "bad.jsonl", "--output", "m.safetensors", "--bits", "12")
    assert "60 good, 60 bad; AUC" in output
    kept = run_recipe(recipe("m.safetensors"), folder / "work", "curate") / "curate"
    table = pq.read_table(kept / "signals/train/s-00000.parquet")
    assert 55 <= len(table) <= 65 and min(table["quality_mine"].to_pylist()) >= 0.5
    opposite = recipe("m.safetensors", label="bad")
    kept = run_recipe(opposite, folder / "other", "curate") / "curate"
    assert 55 <= len(pq.read_table(kept / "signals/train/s-00000.parquet")) <= 65


def test_a_folder_and_a_labelled_file_give_the_same_weights(folder):
    fit("good", "bad.jsonl", "--output", "a.safetensors", "--bits", "12")
    fit("labelled.jsonl", "--label-field", "kind", "--good", "hq", "--bad", "spam", "--output", "b", "--bits", "12")
    size = 4 * 2**12
    assert (folder / "a.safetensors").read_bytes()[-size:] == (folder / "b").read_bytes()[-size:]


@pytest.mark.parametrize(
    ("paths", "options", "error", "message"),
    [
        (["good"], {}, RecipeError, "1 paths; name good and bad documents"),
        (["none", "bad.jsonl"], {}, InputError, "none: no such file or folder"),
        (["good", "bad.jsonl"], {"label_field": "kind"}, RecipeError, "2 paths and --label-field; name one path"),
        (["labelled.jsonl"], {"label_field": "kind"}, InputError, "no record has kind='good'.*its labels are hq, spam"),
        (["labelled.jsonl"], {"label_field": "sort"}, InputError, "record 0 has no field 'sort'"),
        (["labelled.jsonl"], {"label_field": "k", "good": "a", "bad": "b,a"}, RecipeError, "both name 'a'"),
        (["good", "bad.jsonl"], {"text_field": "body"}, InputError, r"bad\.jsonl: record 0: .*body"),
    ],
)
def test_calls_without_two_classes_are_refused(folder, paths, options, error, message):
    with pytest.raises(error, match=message):
        labelled_texts([folder / path for path in paths], LabelledDocuments(**options))


@pytest.mark.parametrize(
    ("model", "score", "message"),
    [
        ("none.safetensors", {}, "curate.quality_scores.mine.model: no file none.safetensors"),
        ("m.safetensors", {"label": "hq"}, "mine.label: m.safetensors has no label 'hq'; its labels are good, bad"),
        ("bad.jsonl", {}, "mine.model: bad.jsonl is no fastText model"),
    ],
)
def test_check_looks_at_the_models_before_work(folder, model, score, message):
    fit("good", "bad.jsonl", "--output", "m.safetensors", "--bits", "10")
    parsed = Recipe.model_validate(recipe(model, **score))
    findings = preflight(parsed, [stage for stage in STAGES if stage.name == "curate"], 1)
    assert [finding.text for finding in findings if message in finding.text]


def test_a_language_model_scores_in_a_recipe_and_has_no_label(folder):
    result = CliRunner().invoke(app, ["quality", "language-model", "good", "--output", "lm.safetensors"])
    assert result.exit_code == 0 and "60 documents" in result.output
    settings = recipe("lm.safetensors")
    settings["curate"]["filters"] = []
    kept = run_recipe(settings, folder / "work", "curate") / "curate"
    table = pq.read_table(kept / "signals/train/s-00000.parquet")
    scores = table["quality_mine"].to_pylist()
    assert max(scores) < 0 and sum(scores[:60]) > sum(scores[60:])
    parsed = Recipe.model_validate(recipe("lm.safetensors", label="good"))
    findings = preflight(parsed, [stage for stage in STAGES if stage.name == "curate"], 1)
    assert any("is a language model, which has no labels; leave label out" in finding.text for finding in findings)
