"""`import gristmill`: its names, and what they return on a small recipe."""

import re
import subprocess
import sys

import pytest
from corpora import prose, write_jsonl

import gristmill
from gristmill.foundation.errors import InputError, RecipeError

RECIPE = {
    "name": "small",
    "sources": [{"name": "web", "format": "jsonl", "paths": ["web.jsonl"]}],
    "curate": {"splits": {"validation": 0.1, "test": 0.1}},
    "tokenizer": {"vocab_size": 300},
    "model": {"layers": 1, "width": 16, "heads": 2, "sequence_length": 32},
    "train": {"tokens": 2048, "batch_tokens": 512, "precision": "fp32", "monitoring": {"trackers": []}},
    "evaluate": {"tasks": ["bits_per_byte"], "num_continuations": 0},
}


def test_the_public_names_are_these():
    names = ["Corpus", "Model", "compare", "curate", "evaluate", "load", "open_corpus", "plan_layout", "run", "train"]
    assert gristmill.__all__ == names
    assert all(getattr(gristmill, name).__doc__ for name in names)
    assert re.match(r"\d+\.\d+", gristmill.__version__)
    with pytest.raises(AttributeError, match="gristmill has no 'tarin'; it has Corpus, Model"):
        gristmill.tarin  # noqa: B018


def test_importing_it_loads_nothing():
    script = "import sys, gristmill; print([n for n in sys.modules if n.startswith('gristmill.') or n == 'torch'])"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


def test_a_corpus_a_model_and_its_scores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "web.jsonl", [{"text": prose(k), "number": k} for k in range(120)])
    corpus = gristmill.curate(RECIPE, workers=1)
    splits = dict(corpus.sql("SELECT split, count(*) FROM documents GROUP BY split").fetchall())
    assert sum(splits.values()) == 120 == corpus.table("ledger").num_rows
    assert corpus.table("documents", "test").num_rows == splits["test"] == len(list(corpus.documents("test")))
    assert corpus.dataset("train").num_rows == splits["train"]
    document = next(corpus.documents("train"))
    assert document["text"] == prose(document["metadata"]["number"])
    assert corpus.why(document["doc_id"])[0][:2] == ("read", "read")
    model = gristmill.train(RECIPE, workers=1)
    assert model.generate(["The mill"], 5) == gristmill.load("work/small").generate(["The mill"], 5)
    likely, unlikely = model.score([prose(7)[:60], "\u6c34\u8eca" * 20])
    assert unlikely < likely < 0
    assert model.score(["", "The mill"])[0] == 0 > model.score(["", "The mill"])[1]
    for wrong, message in (
        (lambda: model.generate("The mill"), "prompts must be a list of texts"),
        (lambda: model.score("The mill"), "texts must be a list of texts"),
        (lambda: model.generate(["The mill"], 0), "max_new_tokens is 0"),
        (lambda: corpus.table("documents", "tests"), "no split 'tests'; splits with documents are test, train"),
    ):
        with pytest.raises(RecipeError, match=message):
            wrong()
    scores = gristmill.evaluate(RECIPE, workers=1)
    assert 0 < scores["bits_per_byte_web"]["bits_per_byte,none"] < 8
    (comparison,) = gristmill.compare("work/small/evaluate", "work/small/evaluate")
    assert comparison.difference == 0 and comparison.verdict == "no difference shown"


def test_errors_are_those_of_the_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="did you mean 'curate'"):
        gristmill.run({**RECIPE, "curat": {}})
    with pytest.raises(RecipeError, match="overrides are for recipe files"):
        gristmill.run(RECIPE, overrides=["seed=2"])
    with pytest.raises(InputError):
        gristmill.open_corpus(tmp_path)
    with pytest.raises(InputError):
        gristmill.load(tmp_path)


def test_layouts_are_ranked_as_the_command_ranks_them(call):
    forecasts = gristmill.plan_layout("llama_1b", gpus=8, hardware="h200")
    speeds = [forecast.tokens_per_second for forecast in forecasts]
    assert speeds == sorted(speeds, reverse=True) and all(forecast.layout.gpus == 8 for forecast in forecasts)
    said = call("layout", "llama_1b", "--gpus", 8, "--hardware", "h200")[1]
    assert f"{len(forecasts)} of" in said and f"{speeds[0]:,.0f}" in said
    with pytest.raises(RecipeError, match="give the number of GPUs, gpus=64"):
        gristmill.plan_layout("llama_1b", overrides=["train.layout=auto"])
