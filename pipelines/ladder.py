"""A ladder of model sizes: small models of a recipe's shape at equal tokens per parameter, the curve of loss against
compute through them, and how far off it is at a larger size that was held back.

    loss = E + A / C^alpha        C: FLOPs of the run, forward and backward (Kaplan et al. 2020, Hoffmann et al. 2022)

Each rung is the recipe with another `model` and `train.tokens`, trained by the stage `train` in one work folder, so
that the corpus, the tokenizer and the index are made once, and the same command goes on after a stop."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import flops_per_token, shape_of
from gristmill.training.planner.costs.parameters import parameter_count

HELD_BACK = 8.0  # times the compute of the largest fitted rung
STEP = 2.0  # between the fitted rungs
MIN_RUNGS = 4  # one more than the curve has numbers
DRAWS = 400
NOISE = 0.002  # of a loss, relative: what two seeds differ by at these sizes; the residuals of few rungs say too little
EXPONENTS = np.linspace(0.01, 0.6, 237)
RATES = ("learning_rate", "muon_learning_rate")


@dataclass(frozen=True)
class Rung:
    """One size. overrides: of the recipe, as `--set` takes them."""

    layers: int
    width: int
    parameters: int
    tokens: int
    flops: float
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class ScalingCurve:
    """loss(C) = floor + scale / C^exponent."""

    floor: float
    scale: float
    exponent: float

    def __call__(self, flops: float) -> float:
        return float(self.floor + self.scale * flops**-self.exponent)


@dataclass(frozen=True)
class Extrapolation:
    """The curve through the smaller rungs and the held-back one. forecast_range, exponent_range: 95 % of refits to
    losses that are moved by the residuals. error: of the forecast, relative to the measured loss."""

    curve: ScalingCurve
    exponent_range: tuple[float, float]
    forecast: float
    forecast_range: tuple[float, float]
    measured: float

    @property
    def error(self) -> float:
        return self.forecast / self.measured - 1


def rungs(
    model: ModelConfig, train: dict[str, Any], vocabulary: int, per_parameter: float, count: int
) -> tuple[Rung, ...]:
    """`count` sizes to fit and last the recipe's own, which is held back. Each has twice the compute of the one before,
    the last eight times. train: batch_tokens, and the optimizer's fields that the recipe sets.

    Heads keep their width; layers go with the width. Rates go with width^-1/2, as `gristmill init` writes them.
    Raises RecipeError where sizes come out equal."""
    if count < MIN_RUNGS:
        raise RecipeError(f"--sizes {count}: the curve has three numbers; fit at least {MIN_RUNGS} sizes")
    if model.pattern or model.moe is not None:
        raise RecipeError("gristmill ladder scales models of equal layers; this one has a pattern or experts")
    largest = parameter_count(shape_of(model, vocabulary))
    shares = [(HELD_BACK * STEP ** (count - 1 - rung)) ** -0.5 for rung in range(count)]
    sizes = [_nearest(model, vocabulary, share * largest) for share in shares]
    if len(set(sizes)) < len(sizes):
        raise RecipeError(
            f"model.width {model.width} with {model.layers} layers has too few smaller sizes whose heads are "
            f"{model.width // model.heads} wide: {sizes}; start from a larger model, or from narrower "
            f"heads: --set model.heads={2 * model.heads}"
        )
    return tuple(_rung(model, train, vocabulary, per_parameter, size) for size in [*sizes, (model.layers, model.width)])


def _nearest(model: ModelConfig, vocabulary: int, parameters: float) -> tuple[int, int]:
    """(layers, width) with about so many parameters, of the recipe's ratio of layers to width, or near it."""
    candidates, head = [], model.width // model.heads
    for heads in range(1, model.heads + 1):
        even = model.layers * heads / model.heads
        for layers in {max(1, math.floor(even)), max(1, math.ceil(even))}:
            count = parameter_count(shape_of(_scaled(model, layers, heads * head), vocabulary))
            candidates.append((abs(math.log(count / parameters)), layers, heads * head))
    return min(candidates)[1:]


def _scaled(model: ModelConfig, layers: int, width: int) -> ModelConfig:
    return ModelConfig.model_validate(model.model_dump(exclude_unset=True) | _fields(model, layers, width))


def _fields(model: ModelConfig, layers: int, width: int) -> dict[str, Any]:
    """The fields of `model` that change with the size."""
    heads = width * model.heads // model.width
    fields: dict[str, Any] = {"layers": layers, "width": width, "heads": heads}
    if model.kv_heads:
        grouped = model.heads // model.kv_heads
        fields["kv_heads"] = heads // grouped if heads % grouped == 0 else heads
    if model.ffn_hidden_size:
        fields["ffn_hidden_size"] = max(8, round(model.ffn_hidden_size * width / model.width / 8) * 8)
    if "init_std" in model.model_fields_set:
        fields["init_std"] = round(model.init_std * (model.width / width) ** 0.5, 4)
    return fields


def _rung(
    model: ModelConfig, train: dict[str, Any], vocabulary: int, per_parameter: float, size: tuple[int, int]
) -> Rung:
    layers, width = size
    shape = shape_of(_scaled(model, layers, width), vocabulary)
    parameters, batch = parameter_count(shape), int(train["batch_tokens"])
    tokens = max(20, round(per_parameter * parameters / batch)) * batch
    changes = {f"model.{name}": value for name, value in _fields(model, layers, width).items()}
    scale = (model.width / width) ** 0.5
    rates = {name: train["optimizer"][name] for name in RATES if train["optimizer"].get(name) is not None}
    changes |= {f"train.optimizer.{name}": float(f"{rate * scale:.3e}") for name, rate in rates.items()}
    changes |= {"train.tokens": tokens, "train.validation.every": 10**6}
    overrides = tuple(f"{name}={json.dumps(value)}" for name, value in changes.items())
    return Rung(layers, width, parameters, tokens, flops_per_token(shape) * tokens, overrides)


def final_loss(folder: Path) -> float:
    """Held-out bits per byte after the last step, the mean over the sources; nats a token where bytes are unknown."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    validation = lines[-1].get("validation") if lines else None
    if validation is None:
        raise InputError(f"{folder}: no validation loss; hold out more text (curate.splits.validation)")
    sources = validation["sources"].values()
    if all("bits_per_byte" in source for source in sources):
        return float(sum(source["bits_per_byte"] for source in sources) / len(sources))
    return float(validation["loss"])


def fit(flops: Sequence[float], losses: Sequence[float]) -> ScalingCurve:
    """The curve with the least squares of relative errors; floor and scale are not negative. Of losses 1 + 2 / C^0.1
    at any four C: floor 1, scale 2, exponent 0.1."""
    return fit_each(np.asarray(flops, dtype=float), np.asarray(losses, dtype=float)[None])[0]


def fit_each(flops: np.ndarray, losses_DN: np.ndarray) -> list[ScalingCurve]:
    """The curve through each row of losses. For every exponent the two numbers solve normal equations; where the floor
    would be negative it is zero. Losses are divided out, so that errors are relative."""
    falls_EN = (flops / flops[0]) ** -EXPONENTS[:, None]
    weights_DN = 1 / losses_DN
    floors = weights_DN.sum(axis=1)[:, None]  # [D, 1]: the columns' products with the target, which is 1
    scales = weights_DN @ falls_EN.T  # [D, E]
    squares = np.square(weights_DN)
    of_floor, of_both, of_scale = squares.sum(axis=1)[:, None], squares @ falls_EN.T, squares @ np.square(falls_EN).T
    determinant = of_floor * of_scale - of_both**2
    floor = (of_scale * floors - of_both * scales) / determinant
    scale = (of_floor * scales - of_both * floors) / determinant
    free = (floor >= 0) & (scale >= 0)
    floor, scale = np.where(free, floor, 0.0), np.where(free, scale, scales / of_scale)
    errors = losses_DN.shape[1] - 2 * (floor * floors + scale * scales)
    errors += floor**2 * of_floor + 2 * floor * scale * of_both + scale**2 * of_scale
    best = errors.argmin(axis=1)
    return [
        ScalingCurve(float(floor[row, at]), float(scale[row, at] * flops[0] ** EXPONENTS[at]), float(EXPONENTS[at]))
        for row, at in enumerate(best)
    ]


def extrapolate(flops: Sequence[float], losses: Sequence[float], seed: int = 0) -> Extrapolation:
    """Fit all but the last rung and forecast that one. Intervals: refits to losses moved by a normal error of the size
    of the residuals, and at least NOISE."""
    compute, target = np.asarray(flops[:-1]), np.asarray(losses[:-1])
    curve = fit_each(compute, target[None])[0]
    residuals = target / np.array([curve(value) for value in compute]) - 1
    spread = max(NOISE, float(np.sqrt(np.square(residuals).sum() / max(1, len(target) - 3))))
    draws = np.random.default_rng(seed).normal(scale=spread, size=(DRAWS, len(target)))
    refits = fit_each(compute, target * (1 + draws))
    ends = [
        np.percentile(values, [2.5, 97.5]).tolist()
        for values in ([refit.exponent for refit in refits], [refit(flops[-1]) for refit in refits])
    ]
    return Extrapolation(curve, tuple(ends[0]), curve(flops[-1]), tuple(ends[1]), float(losses[-1]))


def to_json(steps: Sequence[Rung], losses: Sequence[float], outcome: Extrapolation) -> dict[str, Any]:
    sizes = [{**vars(rung), "loss": loss} for rung, loss in zip(steps, losses, strict=True)]
    fields = {name: getattr(outcome, name) for name in ("exponent_range", "forecast", "forecast_range", "measured")}
    return {"sizes": sizes, "curve": vars(outcome.curve), **fields, "error": outcome.error}
