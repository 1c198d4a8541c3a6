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
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.init.dial import WIDTH_EXPONENTS, rate_at_width
from gristmill.training.config.model import PATTERNS, ModelConfig
from gristmill.training.planner.costs.model_shape import flops_per_token, shape_of
from gristmill.training.planner.costs.parameters import active_parameters, parameter_count

HELD_BACK = 8.0  # times the compute of the largest fitted rung
STEP = 2.0  # between the fitted rungs
MIN_RUNGS = 4  # one more than the curve has numbers
MIN_PROFILE = 4  # one more than a parabola has
MIN_STEPS = 20  # of a run
DRAWS = 400
NOISE = 0.002  # of a loss, relative: what two seeds differ by at these sizes; the residuals of few rungs say too little
EXPONENTS = np.linspace(0.01, 0.6, 237)
MIN_HEAD_WIDTH = 8
MAX_OFF = 0.3  # of the logarithm of parameters: how far a size may be from the one that the ladder asks for
SHAPE_WEIGHT = 0.2  # of the logarithm of layers over width, against that of parameters


@dataclass(frozen=True)
class Rung:
    """One size. active: parameters that a token meets, all but those of other experts; tokens go by them. overrides: of
    the recipe, as `--set` takes them."""

    layers: int
    width: int
    heads: int
    parameters: int
    active: int
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

    Heads keep their width where there are enough sizes so, else narrower ones; layers go with the width, by whole
    periods of what repeats over them, and stay as they are under `model.pattern`. Experts keep their number, and their
    hidden width goes with the model's. Rates go with the width as those of `gristmill init`. Raises RecipeError where
    sizes come out equal."""
    if count < MIN_RUNGS:
        raise RecipeError(f"--sizes {count}: the curve has three numbers; fit at least {MIN_RUNGS} sizes")
    largest = active_parameters(shape_of(model, vocabulary))
    shares = [(HELD_BACK * STEP ** (count - 1 - rung)) ** -0.5 for rung in range(count)]
    sizes = _sizes(model, vocabulary, [share * largest for share in shares])
    own = Size(model.layers, model.width, model.heads)
    return tuple(_rung(model, train, vocabulary, per_parameter, size) for size in [*sizes, own])


def isoflop_rungs(
    model: ModelConfig, train: dict[str, Any], vocabulary: int, flops: float, per_parameter: float, count: int
) -> tuple[Rung, ...]:
    """`count` sizes trained with the same FLOPs, the middle one with about so many tokens per parameter. Active
    parameters go by factors of sqrt(2), so that tokens per parameter go by 2."""
    if count < MIN_PROFILE:
        raise RecipeError(f"--isoflop {count}: a parabola has three numbers; take at least {MIN_PROFILE} sizes")
    middle = (flops / (6 * per_parameter)) ** 0.5
    sizes = _sizes(model, vocabulary, [middle * 2 ** ((place - (count - 1) / 2) / 2) for place in range(count)])
    return tuple(_rung(model, train, vocabulary, None, size, flops) for size in sizes)


class Size(NamedTuple):
    layers: int
    width: int
    heads: int


def _sizes(model: ModelConfig, vocabulary: int, wanted: Sequence[float]) -> list[Size]:
    """Sizes of about so many active parameters, with the widest heads of which there are enough."""
    head = model.width // model.heads
    sizes: list[Size] = []
    while head >= MIN_HEAD_WIDTH and head % 2 == 0:
        candidates = [_nearest(model, vocabulary, parameters, head) for parameters in wanted]
        sizes = [size for size, _ in candidates]
        if len(set(sizes)) == len(sizes) and max(off for _, off in candidates) <= MAX_OFF:
            return sizes
        head //= 2
    raise RecipeError(
        f"model.width {model.width} with {model.layers} layers has too few smaller sizes, even with heads of "
        f"{MIN_HEAD_WIDTH} (layers x width that its mixers and patterns allow: "
        f"{', '.join(f'{size.layers} x {size.width}' for size in sizes)}); start from a larger model"
    )


def _nearest(model: ModelConfig, vocabulary: int, parameters: float, head: int) -> tuple[Size, float]:
    """The size with about so many active parameters, of the recipe's ratio of layers to width, or near it; and how far
    off its parameters are."""
    candidates = []
    for width in range(head, 2 * model.width + 1, head):
        even = model.layers if model.pattern else model.layers * width / model.width
        for layers in _layer_counts(model, even):
            size = Size(layers, width, width // head)
            try:
                scaled = _scaled(model, size)
            except ValidationError:  # a width that a mixer's heads do not divide
                continue
            off = abs(math.log(active_parameters(shape_of(scaled, vocabulary)) / parameters))
            candidates.append((off + SHAPE_WEIGHT * abs(math.log(layers / even)), size, off))
    _, size, off = min(candidates, default=(0.0, Size(model.layers, model.width, model.heads), math.inf))
    return size, off


def _layer_counts(model: ModelConfig, even: float) -> set[int]:
    """Whole periods of what repeats over the layers, below and above: [0, 8] experts and even = 3.5 -> {2, 4}."""
    if model.pattern:
        return {model.layers}
    repeated = [getattr(model, name) for name in (*PATTERNS, "rope_layers")]
    lengths = [len(value) for value in repeated if isinstance(value, tuple)]
    lengths += map(len, () if model.moe is None else model.moe.patterns().values())
    period = math.lcm(*lengths)
    return {period * max(1, rounded(even / period)) for rounded in (math.floor, math.ceil)}


def _scaled(model: ModelConfig, size: Size) -> ModelConfig:
    return ModelConfig.model_validate(model.model_dump(exclude_unset=True) | _fields(model, size))


def _fields(model: ModelConfig, size: Size) -> dict[str, Any]:
    """The fields of `model` that change with the size."""
    fields: dict[str, Any] = dict(size._asdict())
    if model.kv_heads:
        grouped = model.heads // model.kv_heads
        fields["kv_heads"] = size.heads // grouped if size.heads % grouped == 0 else size.heads
    if model.ffn_hidden_size:
        fields["ffn_hidden_size"] = _hidden_size(model, model.ffn_hidden_size, size)
    if model.moe is not None:
        hidden = model.moe.ffn_hidden_size
        scaled: Any = (
            _hidden_size(model, hidden, size)
            if isinstance(hidden, int)
            else [_hidden_size(model, layer, size) for layer in hidden]
        )
        fields["moe"] = model.moe.model_dump(exclude_unset=True, mode="json") | {"ffn_hidden_size": scaled}
    if "init_std" in model.model_fields_set:
        fields["init_std"] = round(model.init_std * (model.width / size.width) ** 0.5, 4)
    return fields


def _hidden_size(model: ModelConfig, hidden: int, size: Size) -> int:
    """Hidden width in proportion to the width of the model; 0, which means that the width decides, stays."""
    return max(8, round(hidden * size.width / model.width / 8) * 8) if hidden else 0


def _rung(
    model: ModelConfig,
    train: dict[str, Any],
    vocabulary: int,
    per_parameter: float | None,
    size: Size,
    flops: float = 0.0,
) -> Rung:
    """per_parameter: tokens; None: as many as the FLOPs allow."""
    shape = shape_of(_scaled(model, size), vocabulary)
    active, batch, cost = active_parameters(shape), int(train["batch_tokens"]), flops_per_token(shape)
    wanted = flops / cost if per_parameter is None else per_parameter * active
    tokens = max(MIN_STEPS, round(wanted / batch)) * batch
    changes = {f"model.{name}": value for name, value in _fields(model, size).items()}
    for name in WIDTH_EXPONENTS:
        if (rate := train["optimizer"].get(name)) is not None:
            scaled = rate_at_width(name, rate, size.width / model.width)
            changes[f"train.optimizer.{name}"] = float(f"{scaled:.3e}")
    changes |= {"train.tokens": tokens, "train.validation.every": 10**6}
    overrides = tuple(f"{name}={json.dumps(value)}" for name, value in changes.items())
    return Rung(*size, parameter_count(shape), active, tokens, cost * tokens, overrides)


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


@dataclass(frozen=True)
class IsoflopProfile:
    """Losses of sizes with equal FLOPs. best: active parameters at the least of the parabola through loss against the
    logarithm of parameters; None where that is no valley inside the sizes. tokens_per_parameter: there, with the
    interval of 95 % of refits to losses moved by the residuals, or None where most refits have no valley."""

    flops: float
    best: float | None
    tokens_per_parameter: float | None
    interval: tuple[float, float] | None


def profile(steps: Sequence[Rung], losses: Sequence[float], seed: int = 0) -> IsoflopProfile:
    """Hoffmann et al. 2022, arXiv 2203.15556, section 3.2. Losses 1 + log(N / 1e6)^2 at any N around 1e6: best 1e6."""
    logs, target = np.log([rung.active for rung in steps]), np.asarray(losses, dtype=float)
    ratios = np.log([rung.tokens / rung.active for rung in steps])
    flops = float(np.mean([rung.flops for rung in steps]))
    fitted = np.polyfit(logs - logs.mean(), target, 2)
    residuals = target - np.polyval(fitted, logs - logs.mean())
    spread = max(NOISE * float(target.mean()), float(np.sqrt(np.square(residuals).sum() / max(1, len(target) - 3))))
    draws = target + np.random.default_rng(seed).normal(scale=spread, size=(DRAWS, len(target)))
    valleys = [valley for row in draws if (valley := _valley(logs, row)) is not None]
    best = _valley(logs, target)
    if best is None:
        return IsoflopProfile(flops, None, None, None)
    by_ratio = np.polyfit(logs, ratios, 1)  # tokens per parameter along the profile
    interval: tuple[float, float] | None = None
    if len(valleys) > DRAWS / 2:
        low, high = (float(np.exp(np.polyval(by_ratio, end))) for end in np.percentile(valleys, [97.5, 2.5]))
        interval = low, high
    return IsoflopProfile(flops, float(np.exp(best)), float(np.exp(np.polyval(by_ratio, best))), interval)


def _valley(logs: np.ndarray, losses: np.ndarray) -> float | None:
    """Logarithm of the parameters at the least of the parabola, where it opens upwards and lies inside the sizes."""
    square, line, _ = np.polyfit(logs - logs.mean(), losses, 2)
    if square <= 0:
        return None
    least = float(logs.mean() - line / (2 * square))
    return least if logs.min() <= least <= logs.max() else None


def to_json(
    steps: Sequence[Rung],
    losses: Sequence[float],
    outcome: Extrapolation,
    isoflop: tuple[Sequence[Rung], Sequence[float], IsoflopProfile] | None = None,
) -> dict[str, Any]:
    sizes = [{**vars(rung), "loss": loss} for rung, loss in zip(steps, losses, strict=True)]
    fields = {name: getattr(outcome, name) for name in ("exponent_range", "forecast", "forecast_range", "measured")}
    answer = {"sizes": sizes, "curve": vars(outcome.curve), **fields, "error": outcome.error}
    if isoflop is not None:
        profiled, own, fitted = isoflop
        answer["isoflop"] = vars(fitted) | {
            "sizes": [{**vars(rung), "loss": loss} for rung, loss in zip(profiled, own, strict=True)]
        }
    return answer
