"""Scores of fastText classifiers as columns: equal to fastText's own, filtered by, and checked before work."""

import json
import random
from pathlib import Path

import fasttext
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fasttext_file import write_model, write_random_model, write_random_quantized_model

from gristmill.data_pipeline.quality.scores import QualityScoreConfig, locked_scores, score_columns
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.python_api import run as run_recipe

WORDS = ["</s>", "the", "mill", "der", "mühle", "a", "река"]
LABELS = ["de", "en", "ru", "fr", "it"]


def random_texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    texts = [" ".join(rng.choices([*WORDS, "flour", "é", "wheel"], k=rng.randint(1, 9))) for _ in range(60)]
    return [*texts, "the mill\n\n der  wheel\n", "mühle " * 300]


def scores_of(path: Path, label: str, texts: list[str]) -> np.ndarray:
    locked = locked_scores({"s": QualityScoreConfig(model=str(path), label=label)})
    (column,) = score_columns(TextBuffer.of(texts), locked)
    return column.to_numpy(zero_copy_only=False)


def assert_equal_to_fasttext(path: Path, labels: list[str], texts: list[str]) -> None:
    reference = fasttext.load_model(str(path))
    lines = [" ".join(text.split()) + "\n" for text in texts]
    expected = [dict((name, score) for score, name in reference.f.predict(line, -1, 0.0, "strict")) for line in lines]
    for label in labels:
        values = scores_of(path, label, texts)
        # fastText leaves out what is below 1e-5, and gives no label where no word is known
        wanted = [scores.get(f"__label__{label}", 0.0) if scores else np.nan for scores in expected]
        assert values == pytest.approx(wanted, abs=1.1e-5, nan_ok=True)


@pytest.mark.parametrize("loss", [1, 2, 3, 4])
@pytest.mark.parametrize(("chars", "word_ngrams"), [((0, 0), 2), ((2, 4), 1)])
def test_scores_are_those_of_fasttext_for_every_label(tmp_path, loss, chars, word_ngrams):
    path = write_random_model(tmp_path / "m.bin", WORDS, LABELS, loss, chars, word_ngrams)
    assert_equal_to_fasttext(path, LABELS, random_texts(loss))


def test_scores_of_a_quantized_model(tmp_path):
    path = write_random_quantized_model(tmp_path / "m.ftz", WORDS, LABELS[:3], 3, True)
    assert_equal_to_fasttext(path, LABELS[:3], random_texts(9))


def test_a_text_without_words_has_no_score(tmp_path):
    path = write_model(tmp_path / "m.bin", {"good": "hq", "bad": "cc"})
    values = scores_of(path, "__label__hq", ["good good", "bad", "", " \n "])
    assert values[0] > 0.5 > values[1] and np.isnan(values[2:]).all()


@pytest.fixture
def recipe(tmp_path) -> dict:
    """Documents with one to ten good words of ten; a model whose score rises with them."""
    write_model(tmp_path / "m.bin", {"good": "hq", "bad": "cc"})
    lines = [{"text": f"number {n} " + "good " * n + "bad " * (10 - n)} for n in range(1, 11)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {
        "name": "scores",
        "sources": [{"name": "s", "format": "jsonl", "paths": [str(tmp_path / "a.jsonl")]}],
        "curate": {
            "quality_scores": {"dclm": {"model": str(tmp_path / "m.bin"), "label": "__label__hq"}},
            "filters": [{"quality_dclm": {"min": 0.5}}],
            "near_dedup": None,
            "splits": {"validation": 0.0, "test": 0.0},
        },
    }


def signals(workdir: Path) -> pa.Table:
    return pq.read_table(workdir / "curate" / "signals" / "train" / "s-00000.parquet")


def test_a_recipe_stores_the_score_and_keeps_by_it(recipe, tmp_path):
    workdir = run_recipe(recipe, tmp_path / "work", "curate")
    scores = signals(workdir)["quality_dclm"].to_pylist()
    assert len(scores) == 6 and min(scores) >= 0.5  # five good words of ten are as likely as not
    ledger = pq.read_table(next((workdir / "curate" / "ledger").glob("*.parquet")))
    assert ledger["rule"].to_pylist().count("quality_dclm.min") == 4


def test_another_file_scores_again_and_the_same_elsewhere_does_not(recipe, tmp_path):
    run_recipe(recipe, tmp_path / "work", "curate")
    recipe["curate"]["quality_scores"]["dclm"]["model"] = str((tmp_path / "m.bin").rename(tmp_path / "moved.bin"))
    annotated = sorted((tmp_path / "work").rglob("annotated/*.parquet"))
    run_recipe(recipe, tmp_path / "work", "curate")
    assert sorted((tmp_path / "work").rglob("annotated/*.parquet")) == annotated
    write_model(tmp_path / "moved.bin", {"good": "hq", "bad": "cc"}, strength=1.0)
    run_recipe(recipe, tmp_path / "work", "curate")
    assert sorted((tmp_path / "work").rglob("annotated/*.parquet")) != annotated


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"quality_scores": {"dclm": {"model": "none.bin", "label": "hq"}}},
            RecipeError,
            r"curate\.quality_scores\.dclm\.model: no file none\.bin",
        ),
        (
            {"quality_scores": {"dclm": {"model": "MODEL", "label": "good"}}},
            RecipeError,
            r"dclm\.label: .*m\.bin has no label 'good'; its labels are cc, hq",
        ),
        ({"quality_scores": {"Dclm": {"model": "MODEL", "label": "hq"}}}, RecipeError, "write small letters"),
        ({"quality_scores": {"score": {"model": "MODEL", "label": "hq"}}}, RecipeError, "and not `score`"),
        ({"filters": [{"quality_edu": {"min": 0.5}}]}, RecipeError, "quality_scores has no 'edu'; it has dclm"),
        ({"filters": ["quality_dclm"]}, RecipeError, "quality_dclm has no threshold"),
        ({"filters": [{"quality_dclm": {"least": 0.5}}]}, RecipeError, "no threshold 'least'; a score has `min`"),
        ({"quality_scores": {"dclm": {"model": "CUT", "label": "hq"}}}, InputError, "the fastText model cannot be"),
    ],
)
def test_what_cannot_be_scored_is_refused(recipe, tmp_path, change, error, message):
    (tmp_path / "cut.bin").write_bytes((tmp_path / "m.bin").read_bytes()[:90])
    text = json.dumps(recipe["curate"] | change)
    recipe["curate"] = json.loads(
        text.replace("MODEL", str(tmp_path / "m.bin")).replace("CUT", str(tmp_path / "cut.bin"))
    )
    with pytest.raises(error, match=message):
        run_recipe(recipe, tmp_path / "work", "curate")


def test_the_likeliest_label_is_a_column_and_an_axis_of_a_mix(recipe, tmp_path):
    recipe["curate"] |= {"labels": {"kind": {"model": str(tmp_path / "m.bin")}}, "filters": [], "quality_scores": {}}
    labels = signals(run_recipe(recipe, tmp_path / "work", "curate"))["label_kind"].to_pylist()
    assert labels[:4] == ["cc"] * 4 and labels[5:] == ["hq"] * 5
    mix = {"score": "num_chars", "topic": "label_kind", "buckets": 2, "power": 0, "topics": {"hq": 3.0}}
    recipe |= {
        "tokenizer": {"vocab_size": 290, "sample_bytes": 10**6},
        "index": {"mix": mix},
        "model": {"layers": 1, "width": 16, "heads": 1, "sequence_length": 8},
        "train": {"tokens": 1024, "batch_tokens": 64},
    }
    index = run_recipe(recipe, tmp_path / "work", "index") / "index"
    cells = pq.read_table(index / "cells/s.parquet")["cell"].to_pylist()
    assert {cell.partition(".t-")[2] for cell in cells} == {"cc", "hq"} and len(cells) == 10


def test_a_label_model_that_is_not_there_is_refused(recipe, tmp_path):
    recipe["curate"]["labels"] = {"kind": {"model": "none.bin"}}
    with pytest.raises(RecipeError, match=r"curate\.labels\.kind\.model: no file none\.bin"):
        run_recipe(recipe, tmp_path / "work", "curate")
