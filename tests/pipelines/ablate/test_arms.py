"""Arms from recipes and variations, and what cannot be compared."""

import pytest
from typer.testing import CliRunner

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.ablate.corpora import arms_of, missing_sources, mixed_sources, parse_variation
from gristmill.pipelines.cli.ablate import AblateOptions, parse_budget, task_questions
from gristmill.pipelines.cli.commands import app
from gristmill.pipelines.recipes.recipe_file import load_recipe

RECIPE = """\
name: {name}
seed: {seed}
sources:
  - {{name: web, format: jsonl, paths: [web.jsonl], weight: 0.5}}
  - {{name: {other}, format: jsonl, paths: [books.jsonl], weight: 0.5}}
curate: {{near_dedup: {{threshold: 0.8}}, splits: {{test: {test}}}}}
"""


@pytest.fixture
def recipe(tmp_path):
    def write(name: str = "a", seed: int = 1, other: str = "books", test: float = 0.1) -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(RECIPE.format(name=name, seed=seed, other=other, test=test))
        return str(path)

    return write


def test_an_arm_for_each_other_value_of_each_variation(recipe):
    arms = arms_of([recipe()], ["curate.near_dedup.threshold=0.7,0.8,none", "sources.web.weight=0.9"])
    assert [(arm.name, arm.changes) for arm in arms] == [
        ("baseline", ""),
        ("arm1", "curate.near_dedup.threshold: 0.7"),
        ("arm2", "curate.near_dedup: none"),  # a threshold cannot be none: the whole step is switched off
        ("arm3", "sources.web.weight: 0.9"),
    ]
    assert arms[2].recipe.curate.near_dedup is None
    assert arms[3].recipe.source_weights == {"web": 0.9, "books": 0.5}


def test_variations_are_read_as_yaml():
    assert parse_variation("a.b=0.7,none,[x, y],true") == ("a.b", [0.7, None, ["x", "y"], True])
    with pytest.raises(RecipeError, match=r"--vary a\.b: write FIELD=VALUE,VALUE"):
        parse_variation("a.b")


def test_a_variation_of_a_field_that_does_not_exist_is_named(recipe):
    with pytest.raises(RecipeError, match=r"curate\.near_dedup\.treshold"):
        arms_of([recipe()], ["curate.near_dedup.treshold=0.7"])
    with pytest.raises(RecipeError, match="'wep' must be a position from 0 to 1, or one of web, books"):
        arms_of([recipe()], ["sources.wep.weight=0.7"])


def test_what_cannot_be_compared_is_refused(recipe):
    first = recipe()
    with pytest.raises(RecipeError, match="nothing to compare"):
        arms_of([first], [])
    with pytest.raises(RecipeError, match="nothing to compare"):
        arms_of([first], ["seed=1"])
    with pytest.raises(RecipeError, match=r"arm1 \(b\) and the baseline cannot be compared: seed is 2 and 1"):
        arms_of([first, recipe("b", seed=2)], [])
    with pytest.raises(RecipeError, match=r"curate\.splits is"):
        arms_of([first, recipe("b", test=0.2)], [])
    with pytest.raises(RecipeError, match="--vary changes one recipe, and 2 are given"):
        arms_of([first, recipe("b")], ["seed=2"])
    masked = [
        "model={layers: 1, width: 8, heads: 1, attention: bidirectional}",
        "train={tokens: 64, batch_tokens: 64, objective: masked}",
    ]
    with pytest.raises(RecipeError, match="an arm trains masked"):
        arms_of([first, recipe("b")], [], masked)


def test_a_source_that_one_arm_lacks_is_said(recipe):
    arms = arms_of([recipe(), recipe("b", other="code")], [])
    assert missing_sources(arms) == ["source books is in baseline alone", "source code is in arm1 alone"]


def test_files_of_tasks_are_looked_for_in_the_shared_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRISTMILL_SHARED_DATA", str(tmp_path))
    with pytest.raises(InputError, match=f"{tmp_path}/benchmarks"):
        task_questions(AblateOptions(task=["arc_easy"]))


def test_budgets():
    assert parse_budget("30m") == (1800.0, None) and parse_budget("2h") == (7200.0, None)
    assert parse_budget("1e16") == (None, 1e16)
    for text in ("soon", "5", "1.2.3m", "nan"):
        with pytest.raises(RecipeError, match=f"--budget {text}"):
            parse_budget(text)


def test_what_cannot_be_mixed_is_refused_before_curation(recipe):
    loaded = load_recipe(recipe())
    assert mixed_sources(loaded, {"books": 0.3, "web": 0.7}) == ["web", "books"]
    with pytest.raises(RecipeError, match="--floor code: no source has this name; the sources are web, books"):
        mixed_sources(loaded, {"code": 0.1})
    with pytest.raises(RecipeError, match=r"the least weights are 1\.2 together"):
        mixed_sources(loaded, {"books": 0.5, "web": 0.7})
    with pytest.raises(RecipeError, match="1 source to train on; a mixture needs at least 2"):
        mixed_sources(loaded.model_copy(update={"sources": loaded.sources[:1]}), {})
    result = CliRunner().invoke(app, ["mix", recipe(), "--tokens", "1000", "--floor", "code=0.1"])
    assert isinstance(result.exception, RecipeError)  # web.jsonl does not exist: nothing was read
