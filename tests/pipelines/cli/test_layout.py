"""The command `gristmill layout`: tables, JSON, plots, errors."""

import json

import pytest
import typer
from model_counts import count_parameters
from typer.testing import CliRunner

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.cli.layout import layout
from gristmill.pipelines.recipes.recipe_file import load_recipe, recipe_names
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(layout)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_named_model_as_json():
    said = json.loads(run("--model", "gpt-7.5b", "--gpus", "16", "--batch-tokens", "128Ki", "--tokens", "1B", "--json"))
    best = said["layouts"][0]
    assert said["batch_samples"] == 64 and said["gpus"] == 16
    assert best["bytes"]["total"] <= 79.1 * 2**30
    assert best["days"] * 86400 * best["tokens_per_second"] == pytest.approx(1e9)


def test_tables_end_with_the_lines_of_a_recipe():
    said = run("--model", "gpt-1.7b", "--gpus", "8", "--batch-tokens", "128Ki", "--top", "2")
    assert "layouts fit 8 x h100" in said
    assert "train:\n  compile: true\n  float8: false\n  layout:" in said


def test_a_recipes_layout_is_compared_with_the_best():
    assert "the recipe's layout (one GPU" in run("demo", "--hardware", "a100-80g")


def test_a_plot_is_written(tmp_path):
    run("--model", "gpt-1.7b", "--gpus", "16", "--batch-tokens", "64Ki", "--plot", str(tmp_path / "curve.svg"))
    assert (tmp_path / "curve.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-1.7b"], "give --gpus N"),
        ([], "takes a RECIPE or --model"),
        (["--model", "gpt-1.7b", "--gpus", "0"], "at least one GPU"),
        (["--model", "gpt-1.7b", "--gpus", "8", "--batch-tokens", "many"], "not a number"),
        (["--model", "gpt-1.7b", "--gpus", "8", "--recompute", "some"], "it is one of none"),
        (["--model", "gpt-1.7b", "--gpus", "8", "--hardware", "h1000"], "did you mean h100"),
    ],
)
def test_wrong_calls_say_how_to_fix_them(arguments, message):
    with pytest.raises(RecipeError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize("name", [name for name in recipe_names() if load_recipe(name).model])
def test_every_recipes_parameter_count_is_the_real_models(name):
    recipe = load_recipe(name)
    vocab = recipe.tokenizer.vocab_size
    shape = shape_of(recipe.model, vocab)
    assert parameter_count(shape) == count_parameters(recipe.model, vocab)
