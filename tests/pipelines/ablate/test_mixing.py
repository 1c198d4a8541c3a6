"""A swarm from end to end with models of a few thousand parameters, and what is refused before it."""

import json
from pathlib import Path

import numpy as np
import pytest

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.ablate import corpora, mixing, runs
from gristmill.pipelines.ablate.arms import Arm
from gristmill.pipelines.ablate.budget import ProxySize
from gristmill.pipelines.ablate.experiment import prepared, with_sources
from gristmill.pipelines.ablate.mixing import MixPlan, mix
from gristmill.pipelines.cli.mix import parse_floors
from gristmill.pipelines.python_api import run as run_recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.training_data import sampling

HERE = LocalEngine(1, Reporter.silent())
WORDS = ["".join(np.random.default_rng(number).choice(list("abcdefghijklmnopqrstuvwxyz"), 6)) for number in range(80)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[Path, str]:
    """(a corpus of words and of digits, its recipe)."""
    folder = tmp_path_factory.mktemp("mix")
    rng = np.random.default_rng(1)
    for name, alphabet in (("words", WORDS), ("digits", list("0123456789"))):
        lines = [json.dumps({"text": f"{number} " + " ".join(rng.choice(alphabet, 60))}) for number in range(200)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [
        {"name": name, "format": "jsonl", "paths": [str(folder / f"{name}.jsonl")]} for name in ("words", "digits")
    ]
    recipe = {
        "name": "mix",
        "sources": sources,
        "curate": {"filters": [], "near_dedup": None, "splits": {"validation": 0.0, "test": 0.3}},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return run_recipe(recipe, folder / "work", "curate") / "curate", str(folder / "recipe.yaml")


def plan(folder: Path, **changes) -> MixPlan:
    fields = {"runs": 4, "seconds": None, "flops": 1e12, "target_tokens": 1000, "max_epochs": 4.0, "floors": {}}
    return MixPlan(folder, **(fields | changes))


def test_from_a_corpus_to_weights_and_again_from_what_is_there(corpus, tmp_path, monkeypatch):
    curated, recipe = corpus
    monkeypatch.setattr(mixing, "choose_size", lambda *_: (ProxySize(1, 32, 64, 8, 600), 8 * 512))
    first = mix(load_recipe(recipe), curated, plan(tmp_path, floors={"digits": 0.2}), HERE)
    assert first.names == ["words", "digits"] and first.sets == ["source words", "source digits"]
    assert first.losses.shape == (4, 2) and first.proposal.weights.sum() == pytest.approx(1)
    assert first.proposal.weights[1] >= 0.2 - 1e-9
    # more words, fewer bits for words
    assert np.corrcoef(first.mixtures[:, 0], first.losses[:, 0])[0, 1] < 0
    monkeypatch.setattr(runs, "Run", None)  # nothing is trained again
    second = mix(load_recipe(recipe), curated, plan(tmp_path, floors={"digits": 0.2}), HERE)
    assert np.array_equal(second.proposal.weights, first.proposal.weights)


def test_what_cannot_be_mixed_is_refused_before_training(corpus, tmp_path, monkeypatch):
    curated, recipe = corpus
    monkeypatch.setattr(runs, "Run", None)
    with pytest.raises(RecipeError, match="--floor books: no source has this name; the sources are words, digits"):
        mix(load_recipe(recipe), curated, plan(tmp_path, floors={"books": 0.1}), HERE)
    with pytest.raises(
        InputError, match=r"1,000,000,000 tokens at most 4 times each: words at most 0\.\d%.*raise --max"
    ):
        mix(load_recipe(recipe), curated, plan(tmp_path, target_tokens=10**9), HERE)
    with pytest.raises(InputError, match=r"--floor digits=0\.5: the text of digits suffices for a weight of 0\.\d+ \("):
        mix(load_recipe(recipe), curated, plan(tmp_path, target_tokens=200_000, floors={"digits": 0.5}), HERE)
    with pytest.raises(RecipeError, match="1 source to train on; a mixture needs at least 2"):
        one = load_recipe(recipe)
        mix(one.model_copy(update={"sources": one.sources[:1]}), curated, plan(tmp_path), HERE)


def test_floors():
    assert parse_floors(["books=0.1"]) == {"books": 0.1}
    for text in ("books", "books=2", "books=much"):
        with pytest.raises(RecipeError, match=f"--floor {text}: write SOURCE=WEIGHT"):
            parse_floors([text])


def test_cells_of_a_mix_are_sources_of_an_arm(corpus, tmp_path):
    curated, reference = corpus
    cells = {"score": "mean_word_length", "sources": ["words"], "buckets": 2, "power": 3}
    recipe = load_recipe(reference, [f"index.mix={json.dumps(cells)}"])
    groups = {"held out": list(corpora.read_split(curated, "test", ["words", "digits"]))}
    material = prepared([Arm("mixed", recipe)], [curated], tmp_path, corpora.drawn_groups(groups, 30), HERE)
    assert material.sources == [["words.q00", "words.q01", "digits"]]
    tokens = material.tokens(0)
    assert sorted(tokens) == ["digits", "words.q00", "words.q01"]
    assert abs(tokens["words.q00"] - tokens["words.q01"]) < 0.1 * tokens["words.q00"]
    kept = with_sources(material.arms[0], material.sources[0])
    weights = sampling(kept, read_dataset(material.folders[0] / "index")).phases[0].weights
    assert weights["words.q01"] / tokens["words.q01"] > 10 * weights["words.q00"] / tokens["words.q00"]
