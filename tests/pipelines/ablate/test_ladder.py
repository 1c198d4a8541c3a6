"""Ladders of sizes: the curve that made the losses is found, and the sizes have the compute that was asked."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.ablate.ladder import (
    MIN_RUNGS,
    ScalingCurve,
    extrapolate,
    final_loss,
    fit,
    isoflop_rungs,
    profile,
    rungs,
    to_json,
)
from gristmill.pipelines.cli.ablate import profile_sentence, sentences
from gristmill.pipelines.cli.commands import app
from gristmill.pipelines.init.dial import DEPTHS, ModelSize, optimizer_of
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import active_parameters, parameter_count

COMPUTE = [1e13, 2e13, 4e13, 8e13, 64e13]
TRAIN = {"batch_tokens": 4096, "optimizer": {"learning_rate": 8e-3}}
MODEL = ModelConfig(layers=8, width=512, heads=16, sequence_length=256, tied_embeddings=True, init_std=0.03)


def test_the_curve_that_made_the_losses_is_fitted() -> None:
    made = ScalingCurve(1.0, 2.0, 0.1)
    fitted = fit(COMPUTE, [made(value) for value in COMPUTE])
    assert (fitted.floor, fitted.scale, fitted.exponent) == pytest.approx((1.0, 2.0, 0.1), rel=1e-6)


def test_a_held_back_size_is_forecast_with_an_interval() -> None:
    losses = [ScalingCurve(1.0, 40.0, 0.12)(value) for value in COMPUTE]
    exact = extrapolate(COMPUTE, losses)
    assert exact.error == pytest.approx(0, abs=1e-3)
    assert exact.forecast_range[0] < exact.measured < exact.forecast_range[1]
    off = extrapolate(COMPUTE, [*losses[:-1], 1.1 * losses[-1]])
    assert off.error == pytest.approx(1 / 1.1 - 1, abs=1e-3) and "outside" in sentences(off)[1]


def test_noisy_losses_have_their_true_loss_in_about_95_of_100_intervals() -> None:
    made, inside = ScalingCurve(1.0, 40.0, 0.12), 0
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(scale=0.002, size=len(COMPUTE))
        losses = [made(value) * (1 + moved) for value, moved in zip(COMPUTE, noise, strict=True)]
        low, high = extrapolate(COMPUTE, losses, seed).forecast_range
        inside += low <= made(COMPUTE[-1]) <= high
    assert inside >= 17


def test_sizes_rise_by_two_in_compute_and_the_last_by_eight() -> None:
    steps = rungs(MODEL, TRAIN, 2048, 20, 4)
    ratios = [after.flops / before.flops for before, after in pairwise(steps)]
    assert (steps[-1].layers, steps[-1].width) == (8, 512)
    assert all(1.4 < ratio < 2.8 for ratio in ratios[:-1]) and 5 < ratios[-1] < 12
    assert all(rung.tokens / rung.parameters == pytest.approx(20, rel=0.01) for rung in steps)
    assert all(rung.width % 32 == 0 for rung in steps)


def test_the_overrides_of_a_size_load_with_the_recipe() -> None:
    recipe = load_recipe("demo")
    model, train = recipe.training()
    settings = {"batch_tokens": train.batch_tokens, "optimizer": train.optimizer.model_dump(exclude_unset=True)}
    wide = ModelConfig.model_validate(model.model_dump(exclude_unset=True) | {"width": 384, "heads": 16, "kv_heads": 8})
    for rung in rungs(wide, settings, 4096, 20, 4):
        scaled, trained = load_recipe("demo", list(rung.overrides)).training()
        assert (scaled.width, scaled.layers, trained.tokens) == (rung.width, rung.layers, rung.tokens)
        assert trained.optimizer.learning_rate == pytest.approx(8e-3 * (384 / rung.width) ** 0.5, rel=1e-3)


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(RecipeError, match="at least 4"):
        rungs(MODEL, TRAIN, 2048, 20, MIN_RUNGS - 1)
    with pytest.raises(
        RecipeError, match=r"too few smaller sizes, even with heads of 8 .*: .*; start from a larger model"
    ):
        rungs(ModelConfig(layers=2, width=64, heads=2), TRAIN, 2048, 20, 6)
    with pytest.raises(RecipeError, match="at least 4 sizes"):
        isoflop_rungs(MODEL, TRAIN, 2048, 1e14, 20, 3)


@pytest.mark.parametrize("depth", DEPTHS[:6])
def test_models_of_init_have_a_ladder_of_valid_sizes(depth: int) -> None:
    size = ModelSize(depth, 2048 if depth < 4 else 4096, 256)
    model, train = ModelConfig(**size.fields), {"batch_tokens": 4096, "optimizer": optimizer_of(size)}
    steps = rungs(model, train, size.vocabulary, 20, 4)
    assert len({(rung.layers, rung.width) for rung in steps}) == 5
    for rung in [*steps, *isoflop_rungs(model, train, size.vocabulary, steps[-2].flops, 20, 5)]:
        assert rung.width % rung.heads == 0 and rung.width // rung.heads in (8, 16, 32, 64)
        if rung.width % 64 == 0:  # a width that init knows has the rates that it writes
            written = optimizer_of(ModelSize(rung.width // 64, size.vocabulary, 256))
            fields = dict(override.split("=", 1) for override in rung.overrides)
            name = "embedding_learning_rate"
            assert float(fields[f"train.optimizer.{name}"]) == pytest.approx(written[name], rel=1e-3)


@pytest.mark.parametrize("name", ["moe_tiny", "qwen3_30b_a3b", "prmoe_31b", "mamba2_hybrid_8b"])
def test_sizes_of_experts_and_hybrids_keep_the_recipes_shape(name: str) -> None:
    """Tokens and sizes go by active parameters; experts keep their number, patterns their periods."""
    recipe = load_recipe(name)
    model, train = recipe.training()
    settings = {"batch_tokens": train.batch_tokens, "optimizer": train.optimizer.model_dump(exclude_unset=True)}
    steps = rungs(model, settings, recipe.tokenizer.vocab_size, 20, 4)
    ratios = [after.active / before.active for before, after in pairwise(steps)]
    assert all(1.1 < ratio < 2.1 for ratio in ratios[:-1]) and 2.2 < ratios[-1] < 3.5
    for rung in steps:
        scaled, trained = load_recipe(name, list(rung.overrides)).training()
        shape = shape_of(scaled, recipe.tokenizer.vocab_size)
        assert (parameter_count(shape), active_parameters(shape)) == (rung.parameters, rung.active)
        assert trained.tokens / rung.active == pytest.approx(20, rel=0.01)
        assert scaled.pattern == model.pattern and (scaled.layers == model.layers or not model.pattern)
        if model.moe is not None:
            assert (scaled.moe.experts, scaled.moe.top_k) == (model.moe.experts, model.moe.top_k)
            assert rung.active < rung.parameters


def test_hidden_widths_of_experts_go_with_the_width() -> None:
    moe = {"experts": [0, 8], "ffn_hidden_size": [0, 192]}
    model = ModelConfig(layers=8, width=256, heads=8, sequence_length=256, moe=moe)
    for rung in rungs(model, TRAIN, 2048, 20, 4):
        fields = dict(override.split("=", 1) for override in rung.overrides)
        dense, expert = json.loads(fields["model.moe"])["ffn_hidden_size"]
        assert dense == 0 and expert == round(192 * rung.width / 256 / 8) * 8
        assert rung.layers % 2 == 0


def test_sizes_of_a_profile_have_equal_compute_around_the_tokens_per_parameter() -> None:
    profiled = isoflop_rungs(MODEL, TRAIN, 2048, 1e14, 20, 5)
    assert [rung.flops for rung in profiled] == pytest.approx([1e14] * 5, rel=0.02)
    ratios = [rung.tokens / rung.parameters for rung in profiled]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > 20 > ratios[-1]


def test_the_least_of_a_parabola_is_the_best_size() -> None:
    profiled = isoflop_rungs(MODEL, TRAIN, 2048, 1e14, 20, 5)
    middle = profiled[2].parameters
    fitted = profile(profiled, [2 + math.log(rung.parameters / middle) ** 2 for rung in profiled])
    assert fitted.best == pytest.approx(middle, rel=1e-6)
    assert fitted.interval is not None and fitted.tokens_per_parameter is not None
    assert fitted.interval[0] < fitted.tokens_per_parameter < fitted.interval[1]
    falling = profile(profiled, [3 - math.log(rung.parameters / middle) / 10 for rung in profiled])
    assert falling.best is None and "no least inside" in profile_sentence(falling)


def test_the_loss_is_the_mean_of_the_sources_bits(tmp_path: Path) -> None:
    sources = {"a": {"loss": 3.0, "bits_per_byte": 1.0}, "b": {"loss": 3.0, "bits_per_byte": 2.0}}
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "validation": {"loss": 3.0, "sources": sources}}) + "\n")
    assert final_loss(tmp_path) == 1.5
    path.write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(InputError, match="hold out more text"):
        final_loss(tmp_path)


def test_the_result_is_json() -> None:
    steps = rungs(MODEL, TRAIN, 2048, 20, 4)
    losses = [ScalingCurve(1.0, 40.0, 0.12)(rung.flops) for rung in steps]
    answer = json.loads(json.dumps(to_json(steps, losses, extrapolate([rung.flops for rung in steps], losses))))
    assert len(answer["sizes"]) == 5 and abs(answer["error"]) < 1e-3


def test_a_recipe_that_holds_nothing_out_is_refused_before_work() -> None:
    result = CliRunner().invoke(app, ["ladder", "demo", "--set", "curate.splits.validation=0"])
    assert isinstance(result.exception, RecipeError) and "curate.splits.validation is 0" in str(result.exception)
