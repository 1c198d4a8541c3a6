"""Recipe files: size suffixes, overrides, and errors with line and fix."""

import re

import pytest

from gristmill.foundation.config import read_yaml
from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.recipes.config import Recipe, identity
from gristmill.pipelines.recipes.recipe_file import NAMES_ELSEWHERE, fields_at, load_recipe, recipe_names

TINY = """\
name: tiny
sources:
  - {name: notes, format: text, paths: [notes/*.txt]}
model: {layers: 2, width: 32, heads: 2, kv_heads: 1, sequence_length: 64}
train:
  tokens: 64k
  batch_tokens: 1024
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize(
    ("written", "meant"),
    [("4M", 4_000_000), ("16k", 16_000), ("0.5B", 500_000_000), ("64Ki", 65_536), ("2T", 2 * 10**12), ('"4M"', "4M")],
)
def test_sizes(written, meant):
    assert read_yaml(written, "text").value == meant


@pytest.mark.parametrize(("written", "meant"), [("no", "no"), ("true", True), ("1e-3", 0.001), ("3e4", 30000.0)])
def test_yaml_without_the_old_traps(written, meant):
    assert read_yaml(written, "text").value == meant


def test_a_recipe_and_its_overrides(tiny):
    recipe = load_recipe(str(tiny), ["train.tokens=1M", "sources.0.paths=[a.txt, b.txt]", "model.layers=3"])
    assert recipe.train.tokens == 1_000_000
    assert recipe.sources[0].paths == ("a.txt", "b.txt")
    assert recipe.model.layers == 3


@pytest.mark.parametrize("name", recipe_names())
def test_our_own_recipes_are_valid(name):
    assert load_recipe(name).name == name


def test_unknown_key_names_the_line_and_the_nearest(tiny):
    tiny.write_text(TINY.replace("batch_tokens", "batch_tokns"))
    with pytest.raises(
        RecipeError, match=r"tiny\.yaml:7: train\.batch_tokns: unknown field, did you mean 'batch_tokens'\?"
    ):
        load_recipe(str(tiny))


@pytest.mark.parametrize("section", NAMES_ELSEWHERE)
def test_names_of_other_tools_lead_to_ours(tiny, section):
    """Every one of them, and each to a field that there is."""
    for name, elsewhere in NAMES_ELSEWHERE[section].items():
        path = name.partition(" ")[0].split(".")
        path = path if path[0] in Recipe.model_fields else [section, *path]
        assert path[-1] in fields_at(Recipe, tuple(path[:-1])), name
        for word in elsewhere.split():
            with pytest.raises(RecipeError, match=rf"{section}\.{word}: unknown field; here it is {re.escape(name)}"):
                load_recipe(str(tiny), [f"{section}.{word}=4"])


def test_unknown_key_in_a_list(tiny):
    tiny.write_text(TINY.replace("paths:", "pathes:"))
    with pytest.raises(RecipeError, match=r"tiny\.yaml:3: sources\.0\.pathes: unknown field, did you mean 'paths'\?"):
        load_recipe(str(tiny))


def test_wrong_type_names_the_line_and_the_value(tiny):
    tiny.write_text(TINY.replace("64k", "many"))
    with pytest.raises(RecipeError, match=r"tiny\.yaml:6: train\.tokens: .*integer.*many"):
        load_recipe(str(tiny))


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'demo'"):
        load_recipe("demoo")


def test_missing_file():
    with pytest.raises(RecipeError, match="no such recipe file"):
        load_recipe("nowhere/x.yaml")


@pytest.mark.parametrize("override", ["train.tokens", "=3", "sources.7.name=x", "name.inner=x"])
def test_overrides_that_cannot_be(tiny, override):
    with pytest.raises(RecipeError, match="--set"):
        load_recipe(str(tiny), [override])


def test_two_sources_of_one_name(tiny):
    doubled = TINY.replace("model:", "  - {name: notes, format: text, paths: [other.txt]}\nmodel:")
    tiny.write_text(doubled)
    with pytest.raises(RecipeError, match="two sources are named 'notes'"):
        load_recipe(str(tiny))


def test_weights_of_some_sources_alone(tiny):
    both = TINY.replace("model:", "  - {name: more, format: text, paths: [other.txt], weight: 2}\nmodel:")
    tiny.write_text(both)
    with pytest.raises(RecipeError, match="source 'more' has a weight and source 'notes' has none; give every source"):
        load_recipe(str(tiny))


def test_identity_leaves_out_how_it_is_executed(tiny):
    one = load_recipe(str(tiny), ["train.layout.data=1"])
    two = load_recipe(str(tiny), ["train.layout.data=2"])
    other = load_recipe(str(tiny), ["train.tokens=65k"])
    assert identity(one.train) == identity(two.train) != identity(other.train)


def test_a_tied_head_has_no_rate_of_its_own():
    rate = "train.optimizer.head_learning_rate=0.01"
    with pytest.raises(RecipeError, match="makes the head the embedding; set embedding_learning_rate"):
        load_recipe("demo", ["model.tied_embeddings=true", rate])
    assert load_recipe("demo", ["model.tied_embeddings=false", rate]).train is not None
