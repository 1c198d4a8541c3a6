"""Ladders of sizes: the curve that made the losses is found, and the sizes have the compute that was asked."""

import json
import math
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gristmill.data_pipeline.indexed.dataset import Dataset, IndexedSource, SplitCounts
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.ablate.ladder import (
    MIN_RUNGS,
    LadderBase,
    Rung,
    RungLosses,
    ScalingCurve,
    extrapolate,
    isoflop_rungs,
    profile,
    rungs,
    seed_noise,
)
from gristmill.pipelines.cli.commands import app
from gristmill.pipelines.cli.ladder import (
    LadderOptions,
    LadderRuns,
    check_same_text,
    final_loss,
    profile_sentence,
    read_reference,
    repeats,
    sentences,
    table,
    text_of,
    to_json,
    untrained_loss,
)
from gristmill.pipelines.init.dial import DEPTHS, ModelSize, optimizer_of
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import active_parameters, parameter_count

START = 4.5
COMPUTE = [1e13, 2e13, 4e13, 8e13, 64e13]
MODEL = ModelConfig(layers=8, width=512, heads=16, sequence_length=256, tied_embeddings=True, init_std=0.03)
BASE = LadderBase(MODEL, 2048, 4096, {"learning_rate": 8e-3})


def base_of(model: ModelConfig, vocabulary: int = 2048) -> LadderBase:
    return LadderBase(model, vocabulary, BASE.batch_tokens, BASE.optimizer)


def fields_of(rung: Rung) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in (override.split("=", 1) for override in rung.overrides)}


def one_seed(losses: list[float]) -> list[list[float]]:
    return [[loss] for loss in losses]


def test_the_curve_that_made_the_losses_is_fitted() -> None:
    made = ScalingCurve(1.0, 20.0, 0.11, START)
    fitted = extrapolate(RungLosses(COMPUTE, [[made(value)] * 2 for value in COMPUTE]), START).curve
    assert (fitted.floor, fitted.scale) == pytest.approx((made.floor, made.scale), rel=0.05)
    assert fitted.exponent == pytest.approx(made.exponent, abs=0.0025)


def test_the_floor_does_not_jump_with_the_noise_of_a_few_sizes() -> None:
    """With the likeliest floors, which go from 0 to 2.4, forecasts are up to 4.2 % off."""
    made, floors, errors = ScalingCurve(1.0, 40.0, 0.12, START), [], []
    for draw in range(12):
        noise = 1 + np.random.default_rng(draw).normal(scale=0.003, size=len(COMPUTE) - 1)
        losses = [made(value) * moved for value, moved in zip(COMPUTE, [*noise, 1.0], strict=True)]
        outcome = extrapolate(RungLosses(COMPUTE, one_seed(losses)), START)
        floors.append(outcome.curve.floor)
        errors.append(abs(outcome.error))
    assert all(0.5 < floor < 1.7 for floor in floors) and max(errors) < 0.02


def test_eight_seeds_forecast_within_a_hundredth_where_two_do_half_of_the_time() -> None:
    """Sizes of docs/defaults.md, Ladders, whose losses lie on a curve but for seeds that differ by 0.3 %."""
    compute, start = [4.8e10, 1.13e11, 2.25e11, 6.7e11, 1.04e12, 9.3e12], 5.093
    within: dict[int, list[bool]] = {2: [], 8: []}
    for floor in (0.8, 1.1, 1.4):
        logs = [math.log((loss - floor) / (start - loss)) for loss in (2.69, 1.81)]
        exponent = (logs[0] - logs[1]) / math.log(compute[-1] / compute[0])
        made = ScalingCurve(floor, math.exp(logs[0]) * compute[0] ** exponent, exponent, start)
        for draw, seeds in product(range(40), within):
            noise = 1 + np.random.default_rng(draw).normal(scale=0.003, size=(len(compute) - 1, seeds))
            losses = [(made(value) * row).tolist() for value, row in zip(compute, noise, strict=False)]
            outcome = extrapolate(RungLosses(compute, [*losses, [made(compute[-1])]]), start)
            within[seeds].append(abs(outcome.error) < 0.01)
    assert np.mean(within[2]) < 0.6 and np.mean(within[8]) > 0.7


def test_a_held_back_size_is_forecast_with_an_interval() -> None:
    losses = [ScalingCurve(1.0, 40.0, 0.12, START)(value) for value in COMPUTE]
    exact = extrapolate(RungLosses(COMPUTE, one_seed(losses)), START)
    assert exact.error == pytest.approx(0, abs=2e-3) and exact.seed_noise is None
    assert exact.residuals == pytest.approx([0] * 4, abs=2e-4)
    assert exact.forecast_range[0] < exact.measured < exact.forecast_range[1]
    off = extrapolate(RungLosses(COMPUTE, one_seed([*losses[:-1], 1.1 * losses[-1]])), START)
    assert off.error == pytest.approx(1 / 1.1 - 1, abs=2e-3) and "outside" in sentences(off, [1.0])[1]


def test_noise_of_seeds_is_relative_and_pooled_over_sizes() -> None:
    """Deviations of 1 % up and down at each size: sqrt(4 * 0.01^2 / 2) over the two degrees of freedom."""
    assert seed_noise([[1.98, 2.02], [0.99, 1.01]]) == pytest.approx(0.01 * 2**0.5)
    assert seed_noise([[1.98, 2.02], [1.0]]) == pytest.approx(0.01 * 2**0.5)
    assert seed_noise([[2.0], [1.0]]) is None


def test_losses_that_fall_faster_and_faster_are_followed() -> None:
    """Bits per byte of the dense `ladder_cpu`, three seeds (docs/defaults.md): a power law through the first five is
    4 % above the last one, though 0.7 % off the five at most."""
    compute = [2.297e10, 4.541e10, 7.783e10, 1.832e11, 3.574e11, 3.620e12]
    losses = [
        [2.7632, 2.7716, 2.7736],
        [2.6388, 2.6366, 2.6339],
        [2.5469, 2.5406, 2.5334],
        [2.3611, 2.3640, 2.3650],
        [2.2087, 2.2189, 2.2109],
        [1.7741, 1.7867, 1.7482],
    ]
    measured = RungLosses(compute, losses)
    outcome = extrapolate(measured, 4.251)
    assert abs(outcome.error) < 0.01 and max(map(abs, outcome.residuals)) < 0.006
    power_law = np.polyfit(np.log(compute[:-1]), np.log(measured.means[:-1]), 1)
    assert math.exp(np.polyval(power_law, math.log(compute[-1]))) / outcome.measured > 1.03


def test_a_reference_of_the_same_text_fixes_the_floor() -> None:
    """The reference has another scale and exponent, the same floor, and a million times the compute from end to end."""
    made, of_reference = ScalingCurve(1.0, 40.0, 0.12, START), ScalingCurve(1.0, 20.0, 0.10, START)
    wide = [1e11 * 10**size for size in range(7)]
    reference = RungLosses(wide, one_seed([of_reference(value) for value in wide]))
    alone, beside = [], []
    for draw in range(5):
        noise = 1 + np.random.default_rng(draw).normal(scale=0.003, size=len(COMPUTE))
        measured = RungLosses(COMPUTE, one_seed((np.array([made(value) for value in COMPUTE]) * noise).tolist()))
        alone.append(extrapolate(measured, START))
        beside.append(extrapolate(measured, START, reference))
    for one, other in zip(alone, beside, strict=True):
        assert np.diff(other.forecast_range) < 0.8 * np.diff(one.forecast_range)
        assert other.curve.floor == pytest.approx(1.0, abs=0.1)


def reference_file(path: Path) -> tuple[dict[str, Any], list[list[float]]]:
    """Writes a ladder of 20 tokens a parameter. (its text, its losses)."""
    steps = rungs(BASE, 20, 4)
    losses = one_seed([ScalingCurve(1.0, 40.0, 0.12, START)(rung.flops) for rung in steps])
    outcome = extrapolate(RungLosses([rung.flops for rung in steps], losses), START)
    text = text_of(dataset_of({"train": 10_000, "validation": 1000}), BASE)
    path.write_text(json.dumps({"text": text, **to_json(steps, losses, outcome)}))
    return text, losses


def dataset_of(tokens: dict[str, int], tokenizer: str = "bpe") -> Dataset:
    splits = {
        name: SplitCounts(documents=1, tokens=count, bytes=2 * count, sha256=f"{name} {count}")
        for name, count in tokens.items()
    }
    source = IndexedSource(name="a", weight=1.0, tokenizer=tokenizer, splits=splits)
    return Dataset(vocab_size=1024, end_of_document=1, dtype="uint16", fim=None, sources=(source,))


def test_a_reference_of_another_number_of_tokens_a_parameter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ladder.json"
    text, losses = reference_file(path)
    reference = read_reference(path, 20)
    assert reference.text == text and list(reference.measured.means) == [seeds[0] for seeds in losses]
    with pytest.raises(InputError, match=r"of 20 tokens a parameter, here 1; take a ladder of as many"):
        read_reference(path, 1)


@pytest.mark.parametrize(
    ("train", "validation", "tokenizer", "length", "said"),
    [
        (10_001, 1000, "bpe", 256, r'sources\.a\.train: "train 10000" -> "train 10001"'),
        (10_000, 900, "bpe", 256, r"sources\.a\.validation"),
        (10_000, 1000, "other", 256, r'tokenizer: "bpe" -> "other"'),
        (10_000, 1000, "bpe", 128, r"sequence_length: 256 -> 128"),
    ],
)
def test_a_reference_of_other_text_is_refused(
    tmp_path: Path, train: int, validation: int, tokenizer: str, length: int, said: str
) -> None:
    path = tmp_path / "ladder.json"
    text, _ = reference_file(path)
    check_same_text(path, text, text)
    base = base_of(MODEL.model_copy(update={"sequence_length": length}))
    other = text_of(dataset_of({"train": train, "validation": validation}, tokenizer), base)
    with pytest.raises(InputError, match=said):
        check_same_text(path, text, other)


def test_held_out_text_without_a_whole_sample_is_refused() -> None:
    """A sample of 256 tokens has 257 with the last target."""
    assert text_of(dataset_of({"train": 999, "validation": 257}), BASE)["sequence_length"] == 256
    for splits in ({"train": 999, "validation": 256}, {"train": 999}):
        with pytest.raises(InputError, match="no source holds out 257 tokens"):
            text_of(dataset_of(splits), BASE)


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("text"),
        lambda fields: fields.update(sizes=fields["sizes"][:3]),
        lambda fields: fields["sizes"][0].update(losses=[]),
        lambda fields: fields["sizes"][0].update(losses=["high"]),
        lambda fields: fields["sizes"][-1].update(active=0),
    ],
)
def test_a_reference_of_another_kind_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = tmp_path / "ladder.json"
    reference_file(path)
    fields = json.loads(path.read_text())
    change(fields)
    for content in (json.dumps(fields), "[]", "{", '"text"'):
        path.write_text(content)
        with pytest.raises(InputError, match="no result of `gristmill ladder`"):
            read_reference(path, 20)


def test_far_below_an_untrained_model_the_curve_is_a_power_law() -> None:
    curve = ScalingCurve(1.0, 2e-6, 0.1, 1e6)
    assert curve(1e10) == pytest.approx(1 + 2 / 1e10**0.1, rel=1e-5)


def test_an_untrained_model_has_equally_likely_tokens() -> None:
    splits = {"validation": SplitCounts(documents=1, tokens=100, bytes=250, sha256="")}
    source = IndexedSource(name="a", weight=1.0, tokenizer="", splits=splits)
    dataset = Dataset(vocab_size=1024, end_of_document=1, dtype="uint16", fim=None, sources=(source,))
    assert untrained_loss(dataset) == pytest.approx(4.0)


def test_a_size_that_learned_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"not below an untrained model's 4\.000; train longer"):
        extrapolate(RungLosses(COMPUTE, one_seed([4.1, 3.9, 3.8, 3.7, 3.0])), 4.0)


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_run_is_in_about_95_of_100_intervals(seeds: int) -> None:
    """The held-back size is one run, which has the noise of a seed itself."""
    made, inside = ScalingCurve(1.0, 40.0, 0.12, START), 0
    for draw in range(20):
        noise = np.random.default_rng(draw).normal(scale=0.002, size=(len(COMPUTE), seeds))
        losses = [[made(value) * (1 + moved) for moved in row] for value, row in zip(COMPUTE, noise, strict=True)]
        outcome = extrapolate(RungLosses(COMPUTE, [*losses[:-1], losses[-1][:1]]), START, seed=draw)
        inside += outcome.forecast_range[0] <= outcome.measured <= outcome.forecast_range[1]
    assert inside >= 17


def test_more_seeds_and_more_sizes_narrow_the_forecast() -> None:
    made = ScalingCurve(1.0, 40.0, 0.12, START)

    def width(sizes: int, seeds: int) -> float:
        compute = [2.0**size * 1e12 for size in range(sizes)]
        compute.append(8 * compute[-1])
        moved = np.linspace(-1, 1, seeds) * 0.002 if seeds > 1 else np.zeros(1)
        losses = [[made(value) * (1 + part) for part in moved] for value in compute]
        low, high = extrapolate(RungLosses(compute, losses), START).forecast_range
        return high - low

    assert width(6, 3) < 0.75 * width(4, 3) and width(4, 9) < 0.75 * width(4, 3)


def test_sizes_rise_by_two_in_compute_and_the_last_by_eight() -> None:
    steps = rungs(BASE, 20, 5)
    ratios = [after.flops / before.flops for before, after in pairwise(steps)]
    assert all(1.4 < ratio < 2.8 for ratio in ratios[:-1]) and 8 <= ratios[-1] < 10
    assert all(rung.tokens / rung.parameters == pytest.approx(20, rel=0.01) for rung in steps)


def test_only_the_width_changes() -> None:
    """Heads keep their width, hidden widths go with the model's: swiglu's 1,408 of 512 is 704 of 256."""
    *smaller, own = rungs(BASE, 20, 5)
    assert (own.layers, own.width, own.heads) == (8, 512, 16)
    assert not any(name.startswith("model.") for name in fields_of(own))
    for rung in smaller:
        assert (rung.layers, rung.width) == (8, 32 * rung.heads)
        assert fields_of(rung)["model.ffn_hidden_size"] == pytest.approx(1408 * rung.width / 512, rel=0.01)


def test_heads_that_are_too_few_keep_their_number() -> None:
    few = ModelConfig(layers=8, width=512, heads=4, kv_heads=2, head_width=160, sequence_length=256)
    for rung in rungs(base_of(few), 20, 5):
        scaled = ModelConfig(**few.model_dump(exclude_unset=True) | fields_of_model(rung))
        assert (scaled.heads, scaled.kv_heads) == (4, 2)
        assert scaled.head_width == pytest.approx(160 * rung.width / 512, abs=1)


def fields_of_model(rung: Rung) -> dict[str, Any]:
    return {name.removeprefix("model."): value for name, value in fields_of(rung).items() if name.startswith("model.")}


def test_batches_go_with_the_root_of_the_tokens() -> None:
    """A sixteenth of the tokens has a quarter of the batch, in whole samples of which a layout asks for a multiple."""
    assert BASE.batch_of(1e6, 16e6) == 4096 // 4
    assert BASE.batch_of(2e6, 16e6) == 6 * 256  # 5.66 samples
    assert BASE.batch_of(1, 16e6) == 256 and BASE.batch_of(99e6, 16e6) == 4096
    assert LadderBase(MODEL, 2048, 4096, {}, batch_unit=4).batch_of(2e6, 16e6) == 4 * 256
    *smaller, own = [fields_of(rung)["train.batch_tokens"] for rung in rungs(BASE, 20, 5)]
    assert own == 4096 and smaller == sorted(smaller) and smaller[-1] < own


def test_a_batch_that_ramps_stays() -> None:
    ramp = "train.batch_ramp={start_tokens: 1024, increment_tokens: 512, over_tokens: 100000}"
    base = LadderBase.of(load_recipe("demo", [ramp]))
    assert base.batch_of(1, 1e6) == base.batch_tokens == 2048


def test_each_size_is_scored_on_enough_text() -> None:
    """256 samples of 256 tokens, where the recipe asks for 1; a recipe that asks for more has more."""
    assert fields_of(rungs(BASE, 20, 5)[0])["train.validation.samples"] == 256
    many = LadderBase(MODEL, 2048, 4096, {}, 1000)
    assert fields_of(rungs(many, 20, 5)[0])["train.validation.samples"] == 1000


def test_the_overrides_of_a_size_load_with_the_recipe() -> None:
    wide = ["model.width=384", "model.heads=16", "model.kv_heads=8"]
    recipe = load_recipe("demo", wide)
    for rung in rungs(LadderBase.of(recipe), 20, 4):
        scaled_recipe = load_recipe("demo", [*wide, *rung.seeded(recipe.train_seed + 1)])
        scaled, trained = scaled_recipe.training()
        assert (scaled.width, scaled.layers, trained.tokens) == (rung.width, rung.layers, rung.tokens)
        assert trained.optimizer.learning_rate == pytest.approx(8e-3 * (384 / rung.width) ** 0.5, rel=1e-3)
        assert (scaled_recipe.seed, scaled_recipe.train_seed) == (recipe.seed, recipe.seed + 1)


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(RecipeError, match="at least 4"):
        rungs(BASE, 20, MIN_RUNGS - 1)
    with pytest.raises(RecipeError, match=r"fewer than 6 smaller sizes .*start from a wider model"):
        rungs(base_of(ModelConfig(layers=2, width=64, heads=2)), 20, 6)
    with pytest.raises(RecipeError, match="at least 4 sizes"):
        isoflop_rungs(BASE, 1e14, 20, 3)


@pytest.mark.parametrize("depth", DEPTHS[:6])
def test_models_of_init_have_a_ladder_of_valid_sizes(depth: int) -> None:
    size = ModelSize(depth, 2048 if depth < 4 else 4096, 256)
    base = LadderBase(ModelConfig(**size.fields), size.vocabulary, 4096, optimizer_of(size))
    steps = rungs(base, 20, 5)
    assert len({rung.width for rung in steps}) == 6
    for rung in [*steps, *isoflop_rungs(base, steps[-2].flops, 20, 5)]:
        assert rung.layers == depth and rung.heads == depth and rung.width // rung.heads >= 8
        if rung.width % 64 == 0:  # a width that init knows has the rates that it writes
            written = optimizer_of(ModelSize(rung.width // 64, size.vocabulary, 256))
            name = "embedding_learning_rate"
            assert fields_of(rung)[f"train.optimizer.{name}"] == pytest.approx(written[name], rel=1e-3)


@pytest.mark.parametrize("name", ["moe_tiny", "qwen3_30b_a3b", "prmoe_31b", "mamba2_hybrid_8b"])
def test_sizes_of_experts_and_hybrids_keep_the_recipes_shape(name: str) -> None:
    """Tokens and sizes go by active parameters; experts keep their number, layers what repeats over them."""
    recipe = load_recipe(name)
    model, _ = recipe.training()
    steps = rungs(LadderBase.of(recipe), 20, 4)
    ratios = [after.flops / before.flops for before, after in pairwise(steps)]
    assert all(1.4 < ratio < 2.8 for ratio in ratios[:-1]) and 8 <= ratios[-1] < 13
    for rung in steps:
        scaled, trained = load_recipe(name, list(rung.overrides)).training()
        shape = shape_of(scaled, recipe.tokenizer.vocab_size)
        assert (parameter_count(shape), active_parameters(shape)) == (rung.parameters, rung.active)
        assert trained.tokens / rung.active == pytest.approx(20, rel=0.01)
        assert (scaled.layers, scaled.pattern) == (model.layers, model.pattern)
        assert scaled.heads // scaled.num_kv_heads == model.heads // model.num_kv_heads
        if model.moe is not None:
            assert (scaled.moe.experts, scaled.moe.top_k) == (model.moe.experts, model.moe.top_k)
            assert rung.active < rung.parameters


def test_hidden_widths_of_experts_go_with_the_width() -> None:
    moe = {"experts": [0, 8], "ffn_hidden_size": [0, 192]}
    model = ModelConfig(layers=8, width=256, heads=8, sequence_length=256, moe=moe)
    for rung in rungs(base_of(model), 20, 4)[:-1]:
        dense, expert = fields_of(rung)["model.moe"]["ffn_hidden_size"]
        assert dense == 0 and expert == round(192 * rung.width / 256 / 2) * 2


@pytest.mark.parametrize(
    ("name", "heads", "given", "widths", "head_widths"),
    [
        ("mamba2", 16, {"head_width": 8, "groups": 2}, {"state": 128}, {}),
        ("tcnca", 16, {"chunk": 64, "shared": 48}, {"shared": 48}, {}),
        (
            "latent_attention",
            16,
            {"query_rank": 256, "value_width": 32},
            {"key_value_rank": 512, "query_rank": 256},
            {},
        ),
        ("latent_attention", 2, {"value_width": 32}, {"key_value_rank": 512}, {"value_width": 32}),
    ],
)
def test_widths_inside_a_mixer_go_with_the_width(
    name: str, heads: int, given: dict[str, Any], widths: dict[str, int], head_widths: dict[str, int]
) -> None:
    """Those of its heads with attention's: 16 keep their width, two their number. State and rank have defaults."""
    fields: dict[str, Any] = {"layers": 8, "width": 512, "heads": heads, "mixer": name, "mixers": {name: given}}
    latent = {"head_width": 768 // heads, "rope_width": 16}
    model = ModelConfig(**fields, **latent if name == "latent_attention" else {"positions": "none"})
    for rung in rungs(base_of(model), 20, 5)[:-1]:
        scaled = fields_of(rung)["model.mixers"][name]
        for option, width in (widths | head_widths).items():
            assert scaled.pop(option) == pytest.approx(width * rung.width / 512, abs=1)
        assert scaled == {option: value for option, value in given.items() if option not in widths | head_widths}


def test_sizes_of_a_profile_have_equal_compute_around_the_tokens_per_parameter() -> None:
    profiled = isoflop_rungs(BASE, 1e14, 20, 5)
    assert [rung.flops for rung in profiled] == pytest.approx([1e14] * 5, rel=0.02)
    ratios = [rung.tokens / rung.parameters for rung in profiled]
    assert [before / after for before, after in pairwise(ratios)] == pytest.approx([2] * 4, rel=0.3)
    assert 15 < ratios[2] < 30


def test_the_least_of_a_parabola_is_the_best_size() -> None:
    profiled = isoflop_rungs(BASE, 1e14, 20, 5)
    middle = profiled[2].parameters
    losses = [2 + math.log(rung.parameters / middle) ** 2 for rung in profiled]
    fitted = profile(profiled, losses, None)
    assert fitted.best == pytest.approx(middle, rel=1e-6)
    assert fitted.interval is not None and fitted.tokens_per_parameter is not None
    assert fitted.interval[0] < fitted.tokens_per_parameter < fitted.interval[1]
    noisy = profile(profiled, losses, 0.02)
    assert noisy.interval is not None and noisy.interval[0] < fitted.interval[0]
    falling = profile(profiled, [3 - math.log(rung.parameters / middle) / 10 for rung in profiled], None)
    assert falling.best is None and "no least inside" in profile_sentence(falling)


def test_the_loss_is_the_mean_of_the_sources_bits(tmp_path: Path) -> None:
    sources = {"a": {"loss": 3.0, "bits_per_byte": 1.0}, "b": {"loss": 3.0, "bits_per_byte": 2.0}}
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "validation": {"loss": 3.0, "sources": sources}}) + "\n")
    assert final_loss(tmp_path) == 1.5
    path.write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(InputError, match="hold out more text"):
        final_loss(tmp_path)


def test_text_that_the_largest_size_repeats_is_said() -> None:
    """Half of the held-back size's tokens are of each source of `demo`."""
    recipe = load_recipe("demo")
    held_back = rungs(LadderBase.of(recipe), 20, 4)[-1]
    tokens = {"python_prose": held_back.tokens, "python_code": held_back.tokens // 4}
    (warning,) = repeats(tokens, recipe, held_back)
    assert "'python_code' 2.0 times" in warning


def test_the_result_is_json() -> None:
    steps = rungs(BASE, 20, 4)
    losses = one_seed([ScalingCurve(1.0, 40.0, 0.12, START)(rung.flops) for rung in steps])
    outcome = extrapolate(RungLosses([rung.flops for rung in steps], losses), START)
    answer = json.loads(json.dumps(to_json(steps, losses, outcome)))
    assert [size["losses"] for size in answer["sizes"]] == losses and abs(answer["error"]) < 2e-3
    assert len(table(steps, losses, outcome).rows) == 5


def test_a_work_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(InputError, match=r"--workdir /proc/x: no folder can be made there; name another one"):
        CliRunner().invoke(app, ["ladder", "demo", "--workdir", "/proc/x", "--sizes", "4"], catch_exceptions=False)


def test_a_size_says_nothing_of_the_evaluation_that_a_ladder_does_not_make(tmp_path: Path) -> None:
    runs = LadderRuns("demo", tmp_path, LadderOptions())
    for rung in rungs(LadderBase.of(load_recipe("demo")), 20, 4):
        assert load_recipe("demo", runs.overrides(rung)).evaluate.tasks == ()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("curate.splits.validation=0", r"curate\.splits\.validation is 0"),
        ("train.init_from=checkpoint", r"train\.init_from has weights of one size"),
        ("train.objective=masked", r"train\.objective is masked"),
        ("train.lr_schedule.over_tokens=100000", r"over_tokens is of one size"),
        ("train.layout.tensor=8", r"at width \d+ with"),
    ],
)
def test_what_would_stop_a_size_is_refused_before_work(override: str, said: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    arguments = ["ladder", "demo", "--set", override, "--sizes", "4", "--workdir", str(work)]
    with pytest.raises(RecipeError, match=said):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert not work.exists()


def test_sizes_that_hardly_learned_have_a_forecast_with_a_wide_interval() -> None:
    """A loss just below an untrained model's is moved above it by the noise of the refits."""
    losses = [[4.4999], [4.49], [4.47], [4.4], [2.0]]
    outcome = extrapolate(RungLosses(COMPUTE, losses), START)
    assert np.diff(outcome.forecast_range) > 0.3
    assert sentences(outcome, losses[-1])[0].startswith("warning: the exponent is at the edge")


def test_the_held_back_size_may_have_several_seeds() -> None:
    """The forecast is compared with their mean, and its interval is as wide as their noise makes it."""
    losses = [[ScalingCurve(1.0, 40.0, 0.12, START)(value)] for value in COMPUTE]
    mean = losses[-1][0]
    calm, noisy = (RungLosses(COMPUTE, [*losses[:-1], [mean - off, mean + off]]) for off in (0.002, 0.06))
    outcome, moved = extrapolate(calm, START), extrapolate(noisy, START)
    assert outcome.measured == pytest.approx(mean) and moved.last_noise == pytest.approx(0.06 / mean * 2**0.5)
    assert np.diff(moved.forecast_range) > 1.5 * np.diff(outcome.forecast_range)
    (_, said), (warning, *_) = sentences(outcome, calm.losses[-1]), sentences(moved, noisy.losses[-1])
    assert f"measured {mean:.4f} (the mean of 2, {mean - 0.002:.4f} to {mean + 0.002:.4f}; seeds differ by" in said
    assert warning.startswith("warning: seeds of the held-back size differ more than three times as much")
