"""A ladder of model sizes: small models of a recipe's shape at equal tokens per parameter, the curve of loss against
compute through them, and how far off it is at a larger size that was held back.

    (loss - E) / (L0 - loss) = A / C^alpha     C: FLOPs of the run, forward and backward; L0: loss of an untrained model

(Alabdulmohsin et al. 2022, arXiv 2209.06640, estimator M4 with its power of L0 - loss at 1; far below L0 it is the
power law E + A L0 / C^alpha of Hoffmann et al. 2022). At the sizes of a CPU the loss still falls faster and faster with
compute, which a power law cannot follow. E is of the text and its tokens, whatever the model (docs/defaults.md).

Each rung is the recipe with another `model` and `train.tokens`, trained by the stage `train` in one work folder, so
that corpus, tokenizer and index are made once, and the same command goes on after a stop. Only the width changes: a
depth of few layers does not fall evenly (4, 2, 2, 1), and the loss hardly depends on the shape (Kaplan et al. 2020,
figure 5)."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import ValidationError

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.init.dial import WIDTH_EXPONENTS, rate_at_width
from gristmill.pipelines.recipes.config import Recipe
from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import flops_per_token, shape_of
from gristmill.training.planner.costs.parameters import active_parameters, parameter_count

HELD_BACK = 8.0  # times the compute of the largest fitted rung
STEP = 2.0  # between the fitted rungs
MIN_RUNGS = MIN_PROFILE = 4  # one more than the curve, or a parabola, has numbers
MIN_STEPS = 20  # of a run
DRAWS = 400
NOISE = 0.003  # of a loss of one seed, relative: 17 runs of six sizes of `ladder_cpu` differ by 0.0033 (1 sd)
EXPONENTS = (0.01, 0.6)  # least and most
LEAST_NOISE = 1e-6  # relative, where seeds and curve agree exactly
FLOORS = np.linspace(0.0, 0.98, 197)  # of the lowest loss
MAX_OFF = 0.5  # of the logarithm of compute: how far a size may be below the one that the ladder asks for
# The batch beyond which a larger one saves few steps goes with about the square root of the tokens of a run (Zhang et
# al. 2024, arXiv 2410.21676). With one batch for all the smallest sizes have too few steps (docs/defaults.md).
BATCH_EXPONENT = 0.5
# At least: the ratio of two neighbours' losses moves with the text by 0.7 % (1 sd) at 4,096 tokens, the default, and by
# 0.2 % at 65,536 (widths 12 to 44 of `ladder_cpu`, 2026-11-28).
VALIDATION_TOKENS = 65_536
FINE_WIDTH = 512  # hidden widths below it go by 2, so that rounding stays below 1 %; above by 8, as GPUs ask


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

    def seeded(self, seed: int) -> tuple[str, ...]:
        """Overrides with a seed of training; the corpus and what is held out stay."""
        return (*self.overrides, f"train.seed={seed}")


@dataclass(frozen=True)
class LadderBase:
    """The recipe's fields that its sizes have in common. batch_tokens: of its own size. optimizer: fields that it sets.
    batch_unit: samples of which every batch is a multiple."""

    model: ModelConfig
    vocabulary: int
    batch_tokens: int
    optimizer: dict[str, Any]
    validation_samples: int = 1
    batch_unit: int = 1

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        model, train = recipe.training()
        optimizer = train.optimizer.model_dump(exclude_unset=True)
        unit = train.layout.data * max(1, train.layout.micro_batch) * train.layout.pipeline
        if train.batch_ramp is not None:  # its increments fit the recipe's batch
            unit = train.batch_tokens // model.sequence_length
        vocabulary, samples = recipe.tokenizer.vocab_size, train.validation.samples
        return cls(model, vocabulary, train.batch_tokens, optimizer, samples, unit)

    def batch_of(self, tokens: float, own_tokens: float) -> int:
        """Tokens of a step of a run of `tokens`, where the recipe's own has `own_tokens`."""
        unit = self.batch_unit * self.model.sequence_length
        scaled = self.batch_tokens * (tokens / own_tokens) ** BATCH_EXPONENT
        return min(self.batch_tokens, max(1, round(scaled / unit)) * unit)


class RungLosses(NamedTuple):
    """Sizes of one kind of model after training. losses: of each size, by seed."""

    flops: Sequence[float]
    losses: Sequence[Sequence[float]]

    @property
    def means(self) -> np.ndarray:
        return np.array([np.mean(seeds) for seeds in self.losses])


@dataclass(frozen=True)
class ScalingCurve:
    """loss(C) = (floor + start x odds) / (1 + odds), odds = scale / C^exponent. start: loss of an untrained model."""

    floor: float
    scale: float
    exponent: float
    start: float

    def __call__(self, flops: float) -> float:
        odds = self.scale * flops**-self.exponent
        return float((self.floor + self.start * odds) / (1 + odds))


@dataclass(frozen=True)
class Extrapolation:
    """The curve through the smaller rungs and the held-back one. seed_noise: standard deviation of the loss of one run
    over seeds, relative, of the fitted sizes; None where each has one seed. last_noise: of the held-back size.
    residuals: of the mean losses, relative to the curve. forecast_range, exponent_range: 95 % of refits with floors by
    how likely they are, to losses that are moved by the residuals or the noise, whichever is more; the forecast's is
    that of the mean of the held-back size's runs. error: of the forecast, relative to the measured loss."""

    curve: ScalingCurve
    seed_noise: float | None
    last_noise: float | None
    residuals: tuple[float, ...]
    exponent_range: tuple[float, float]
    forecast: float
    forecast_range: tuple[float, float]
    measured: float

    @property
    def error(self) -> float:
        return self.forecast / self.measured - 1


def rungs(base: LadderBase, per_parameter: float, count: int) -> tuple[Rung, ...]:
    """`count` sizes to fit and last the recipe's own, which is held back. Each has twice the compute of the one before,
    the last eight times.

    Layers stay, and so does the number of experts; heads keep their width, or else their number, and hidden widths and
    those inside a mixer go with the model's. Rates go with the width as those of `gristmill init`, and the batch with
    BATCH_EXPONENT. Raises RecipeError where sizes come out equal."""
    if count < MIN_RUNGS:
        raise RecipeError(f"--sizes {count}: the curve has three numbers; fit at least {MIN_RUNGS} sizes")
    own = Size(base.model.width, base.model.heads)
    sizes = _sizes(base, _cost(base, own) / HELD_BACK, count)
    own_tokens = per_parameter * _active(base, own)
    return tuple(_rung(base, per_parameter * _active(base, size), own_tokens, size) for size in [*sizes, own])


def isoflop_rungs(base: LadderBase, flops: float, per_parameter: float, count: int) -> tuple[Rung, ...]:
    """`count` sizes trained with the same FLOPs, the middle one with about so many tokens per parameter, the others
    by factors of 2."""
    if count < MIN_PROFILE:
        raise RecipeError(f"--isoflop {count}: a parabola has three numbers; take at least {MIN_PROFILE} sizes")
    sizes = _sizes(base, flops / per_parameter * STEP ** ((count - 1) / 2), count)
    own_tokens = per_parameter * _active(base, Size(base.model.width, base.model.heads))
    return tuple(_rung(base, flops * _active(base, size) / _cost(base, size), own_tokens, size) for size in sizes)


class Size(NamedTuple):
    width: int
    heads: int


def _sizes(base: LadderBase, highest: float, count: int) -> list[Size]:
    """`count` sizes whose cost goes by STEP, the last one the largest of at most `highest`, by the first rule for heads
    that has enough of them."""
    for candidates in _size_rules(base.model):
        costs = {size: cost for size in candidates if (cost := _cost(base, size))}
        sizes = _on_steps(costs, highest, count)
        if sizes is not None:
            return sizes
    raise RecipeError(
        f"model.width {base.model.width} with {base.model.heads} heads has fewer than {count} smaller sizes of about "
        "twice the compute each; start from a wider model, or one with fewer heads"
    )


def _on_steps(costs: dict[Size, float], highest: float, count: int) -> list[Size] | None:
    """None where two come out equal or one is far from what was asked. Costs {a: 1, b: 2.1, c: 3.9, d: 5}, highest 4.5,
    count 3: [a, b, c]."""
    logs = {size: math.log(cost) for size, cost in costs.items() if cost <= highest}
    if not logs:
        return None
    last = max(logs, key=logs.__getitem__)
    sizes, off = [last], math.log(highest) - logs[last]
    for place in range(1, count):
        offs = {size: abs(log - logs[last] + place * math.log(STEP)) for size, log in logs.items()}
        sizes.append(min(offs, key=offs.__getitem__))
        off = max(off, offs[sizes[-1]])
    return sizes[::-1] if len(set(sizes)) == count and off <= MAX_OFF else None


def _size_rules(model: ModelConfig) -> Iterator[list[Size]]:
    """Sizes with heads of the same width; with as many heads, of 8 or more; with narrower heads; with as many, of 4 or
    more. Heads go by whole groups of those that share keys and values."""
    own, limit = model.width // model.heads, 2 * model.width
    group = model.heads // model.kv_heads if model.kv_heads else 1
    narrow = own // 2 if own % 4 == 0 else 8

    def of_head_width(head: int) -> list[Size]:
        return [Size(heads * head, heads) for heads in range(group, limit // head + 1, group)]

    def of_num_heads(least: int) -> list[Size]:
        return [Size(model.heads * head, model.heads) for head in range(least, limit // model.heads + 1, 2)]

    yield of_head_width(own)
    yield of_num_heads(8)
    while narrow >= 8:
        yield of_head_width(narrow)
        narrow = narrow // 2 if narrow % 4 == 0 else 0
    yield of_num_heads(4)


def _cost(base: LadderBase, size: Size) -> float:
    """FLOPs of a token times active parameters: the FLOPs of a run of one token a parameter. 0 of a width that heads or
    mixers do not divide."""
    try:
        shape = shape_of(_scaled(base.model, size), base.vocabulary)
    except ValidationError:
        return 0.0
    return flops_per_token(shape) * active_parameters(shape)


def _active(base: LadderBase, size: Size) -> int:
    return active_parameters(shape_of(_scaled(base.model, size), base.vocabulary))


def _scaled(model: ModelConfig, size: Size) -> ModelConfig:
    return ModelConfig.model_validate(model.model_dump(exclude_unset=True) | _fields(model, size))


def _fields(model: ModelConfig, size: Size) -> dict[str, Any]:
    """The fields of `model` that change with the size; none at the recipe's own."""
    if size == (model.width, model.heads):
        return {}
    fields: dict[str, Any] = dict(size._asdict())
    if model.kv_heads:
        fields["kv_heads"] = size.heads * model.kv_heads // model.heads
    narrower, of_head = size.width / model.width, size.width * model.heads / (size.heads * model.width)
    for name in ("head_width", "rope_width"):
        if given := getattr(model, name):
            fields[name] = _scaled_width(given, of_head)
    if mixers := _mixers(model, narrower, of_head):
        fields["mixers"] = mixers
    if isinstance(model.mlp, str) and model.mlp != "none":  # by default swiglu's goes by steps of 64
        fields["ffn_hidden_size"] = _scaled_width(model.hidden_width(model.mlp), narrower)
    elif model.ffn_hidden_size:
        fields["ffn_hidden_size"] = _scaled_width(model.ffn_hidden_size, narrower)
    if model.moe is not None:
        hidden = model.moe.ffn_hidden_size
        layers = [_scaled_width(layer, narrower) for layer in ([hidden] if isinstance(hidden, int) else hidden)]
        scaled = {"ffn_hidden_size": layers[0] if isinstance(hidden, int) else layers}
        fields["moe"] = model.moe.model_dump(exclude_unset=True, mode="json") | scaled
    if "init_std" in model.model_fields_set:
        fields["init_std"] = round(model.init_std * (model.width / size.width) ** 0.5, 4)
    return fields


def _mixers(model: ModelConfig, narrower: float, of_head: float) -> dict[str, dict[str, Any]]:
    """`model.mixers` of a size: a state of 128 numbers in a model of half the width has 64."""
    mixers = dict(model.mixers)
    for name in model.used_mixers:
        mixer = model.mixer_named(name)
        ratios = dict.fromkeys(mixer.widths, narrower) | dict.fromkeys(mixer.head_widths, of_head)
        given = {option: value for option in ratios if (value := getattr(mixer, option))}  # 0: the width decides
        if given:
            scaled = {option: _scaled_width(value, ratios[option]) for option, value in given.items()}
            mixers[name] = mixers.get(name, {}) | scaled
    return mixers


def _scaled_width(width: int, ratio: float) -> int:
    """In even numbers, so that rounding stays below 1 %. 0, which means that the model's width decides, stays."""
    step = 2 if width * ratio < FINE_WIDTH else 8
    return max(step, round(width * ratio / step) * step) if width else 0


def _rung(base: LadderBase, tokens: float, own_tokens: float, size: Size) -> Rung:
    """tokens: of the run, rounded to whole batches here. own_tokens: of the recipe's own size."""
    model = base.model
    batch = base.batch_of(tokens, own_tokens)
    num_tokens = max(MIN_STEPS, round(tokens / batch)) * batch
    scaled = _scaled(model, size)
    shape = shape_of(scaled, base.vocabulary)
    changes = {f"model.{name}": value for name, value in _fields(model, size).items()}
    for name in WIDTH_EXPONENTS:
        if (rate := base.optimizer.get(name)) is not None:
            rate_of_size = rate_at_width(name, rate, size.width / model.width)
            changes[f"train.optimizer.{name}"] = float(f"{rate_of_size:.3e}")
    samples = max(base.validation_samples, math.ceil(VALIDATION_TOKENS / model.sequence_length))
    changes |= {"train.tokens": num_tokens, "train.batch_tokens": batch}
    changes |= {"train.validation.every": 10**6, "train.validation.samples": samples}
    overrides = tuple(f"{name}={json.dumps(value)}" for name, value in changes.items())
    flops = flops_per_token(shape) * num_tokens
    return Rung(scaled.layers, *size, parameter_count(shape), active_parameters(shape), num_tokens, flops, overrides)


def check_learned(loss: float, start: float) -> None:
    if not loss < start:
        raise InputError(f"a size ended at {loss:.3f}, not below an untrained model's {start:.3f}; train longer")


def _lines(ladder: RungLosses, losses_DN: np.ndarray, floor_DF: np.ndarray, start: float) -> tuple[np.ndarray, ...]:
    """(log scale [D, F], exponent [D, F], relative errors of the loss [D, F, N]) of the curves with these floors
    through draws of the losses: log (loss - floor) / (start - loss) = log scale - exponent log C is a line, fitted by
    the least squares of relative errors."""
    logs_N, loss_D1N, floor_DF1 = np.log(ladder.flops), losses_DN[:, None, :], floor_DF[:, :, None]
    odds_DFN = (loss_D1N - floor_DF1) / (start - loss_D1N)
    # A relative error of the odds is one of the loss times this
    relative_DFN = (loss_D1N - floor_DF1) * (start - loss_D1N) / ((start - floor_DF1) * loss_D1N)
    weight_DFN = relative_DFN**2 / np.square(relative_DFN).sum(axis=2, keepdims=True)
    level_DF, middle_DF = (weight_DFN * np.log(odds_DFN)).sum(axis=2), (weight_DFN * logs_N).sum(axis=2)
    offset_DFN = logs_N - middle_DF[:, :, None]
    slope_DF = (weight_DFN * offset_DFN * np.log(odds_DFN)).sum(axis=2) / (weight_DFN * offset_DFN**2).sum(axis=2)
    exponent_DF = (-slope_DF).clip(*EXPONENTS)
    fitted_DFN = np.exp(level_DF[:, :, None] - exponent_DF[:, :, None] * offset_DFN)
    errors_DFN = (floor_DF1 + start * fitted_DFN) / (1 + fitted_DFN) / loss_D1N - 1
    return level_DF + exponent_DF * middle_DF, exponent_DF, errors_DFN


def curves_through(ladder: RungLosses, losses_DN: np.ndarray, floor_D: np.ndarray, start: float) -> list[ScalingCurve]:
    """A curve with its floor for each draw of losses."""
    levels, exponents, _ = _lines(ladder, losses_DN, floor_D[:, None], start)
    numbers = zip(floor_D.tolist(), np.exp(levels[:, 0]).tolist(), exponents[:, 0].tolist(), strict=True)
    return [ScalingCurve(*numbers_of_draw, start) for numbers_of_draw in numbers]


def weigh_floors(ladders: Sequence[RungLosses], start: float, noise: float) -> tuple[np.ndarray, np.ndarray, float]:
    """(floors, how likely each is, standard deviation of mean losses around the curves of the likeliest). noise: of a
    run, relative. All floors are equally likely before the losses are seen, and the ladders have one. Raises InputError
    where a loss is not below `start`."""
    check_learned(max(float(ladder.means.max()) for ladder in ladders), start)
    floors = min(float(ladder.means.min()) for ladder in ladders) * FLOORS
    squares = [np.square(_lines(own, own.means[None], floors[None], start)[2][0]) for own in ladders]
    free = sum(len(own.losses) for own in ladders) - 1 - 2 * len(ladders)
    spread = float((sum(own.sum(axis=1) for own in squares).min() / max(1, free)) ** 0.5)
    terms = [own / _deviations(ladder, noise, spread) ** 2 for own, ladder in zip(squares, ladders, strict=True)]
    unlikely = sum(term.sum(axis=1) for term in terms)
    likely = np.exp((unlikely.min() - unlikely) / 2)
    return floors, likely / likely.sum(), spread


def _deviations(ladder: RungLosses, noise: float, spread: float) -> np.ndarray:
    """Standard deviation of the mean loss of each size, relative: that of its seeds, and at least `spread`."""
    return np.array([max(spread, noise / len(seeds) ** 0.5, LEAST_NOISE) for seeds in ladder.losses])


def extrapolate(trained: RungLosses, start: float, reference: RungLosses | None = None, seed: int = 0) -> Extrapolation:
    """Fit all but the last rung and forecast that one. start: `untrained_loss`. reference: all sizes of another kind of
    model on the same text; the curves have one floor.

    Few sizes leave the floor open, and the likeliest one jumps with their noise: the curve has the mean of the floors
    by how likely each is. Intervals: floors drawn likewise, and curves with them through losses that are moved by a
    normal error of the size of the residuals, and at least that of the seeds."""
    own = RungLosses(trained.flops[:-1], trained.losses[:-1])
    ladders, last = [own, *([reference] if reference else [])], trained.losses[-1]
    noise, last_noise = map(seed_noise, ([seeds for ladder in ladders for seeds in ladder.losses], [last]))
    of_run = NOISE if noise is None else noise
    floors, weights, spread = weigh_floors(ladders, start, of_run)
    (curve,) = curves_through(own, own.means[None], np.array([weights @ floors]), start)
    residuals = tuple((own.means / [*map(curve, own.flops)] - 1).tolist())
    random = np.random.default_rng(seed)
    drawn = random.choice(floors, size=DRAWS, p=weights)
    moved = own.means * (1 + random.normal(scale=_deviations(own, of_run, spread), size=(DRAWS, len(own.flops))))
    # At its floor or an untrained model's a loss has next to no weight in the fit
    moved = np.clip(moved, drawn[:, None] + 1e-3 * (start - drawn[:, None]), start * (1 - 1e-9))
    refits = curves_through(own, moved, drawn, start)
    of_last = random.normal(scale=max(of_run, last_noise or 0) / len(last) ** 0.5, size=DRAWS)
    forecasts = [refit(trained.flops[-1]) for refit in refits] * (1 + of_last)
    values = [[refit.exponent for refit in refits], forecasts]
    exponents, ends = (tuple(pair) for pair in np.percentile(values, [2.5, 97.5], axis=1).T.tolist())
    forecast, measured = curve(trained.flops[-1]), float(np.mean(last))
    return Extrapolation(curve, noise, last_noise, residuals, exponents, forecast, ends, measured)


def seed_noise(losses: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation over seeds relative to the mean, pooled over sizes; None where each has one. Losses (1.98,
    2.02) and (0.99, 1.01): 0.0141."""
    degrees = sum(len(seeds) - 1 for seeds in losses)
    squares = sum(float(np.square(np.asarray(seeds) / np.mean(seeds) - 1).sum()) for seeds in losses)
    return (squares / degrees) ** 0.5 if degrees else None


def _spread(residuals: np.ndarray, numbers: int = 3) -> float:
    """Standard deviation of what a fit of so many numbers leaves."""
    return float(np.sqrt(np.square(residuals).sum() / max(1, len(residuals) - numbers)))


@dataclass(frozen=True)
class IsoflopProfile:
    """Losses of sizes with equal FLOPs. best: active parameters at the least of the parabola through loss against the
    logarithm of parameters; None where that is no valley inside the sizes. tokens_per_parameter: there, with the
    interval of 95 % of refits to losses moved by the residuals or the noise of seeds, whichever is more, or None where
    most refits have no valley."""

    flops: float
    best: float | None
    tokens_per_parameter: float | None
    interval: tuple[float, float] | None


def profile(steps: Sequence[Rung], losses: Sequence[float], noise: float | None, seed: int = 0) -> IsoflopProfile:
    """Hoffmann et al. 2022, arXiv 2203.15556, section 3.2. losses: of one run each. noise: of seeds, relative, None:
    NOISE. Losses 1 + log(N / 1e6)^2 at any N around 1e6: best 1e6."""
    logs, target = np.log([rung.active for rung in steps]), np.asarray(losses, dtype=float)
    ratios = np.log([rung.tokens / rung.active for rung in steps])
    flops = float(np.mean([rung.flops for rung in steps]))
    best = _valley(logs, target)
    if best is None:
        return IsoflopProfile(flops, None, None, None)
    residuals = target - np.polyval(np.polyfit(logs - logs.mean(), target, 2), logs - logs.mean())
    spread = max((NOISE if noise is None else noise) * float(target.mean()), _spread(residuals))
    draws = target + np.random.default_rng(seed).normal(scale=spread, size=(DRAWS, len(target)))
    valleys = [valley for row in draws if (valley := _valley(logs, row)) is not None]
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
