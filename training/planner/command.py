"""Entry points of `gristmill layout` and `train.layout: auto`: arguments to a plan, and a plan to a layout."""

from collections.abc import Sequence
from dataclasses import replace
from math import log2
from pathlib import Path

import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.training.config import ModelConfig, TrainConfig
from gristmill.training.costs.model_shape import ModelShape, shape_of
from gristmill.training.parallel.layout import micro_batch_size, objections
from gristmill.training.planner.explain import compare
from gristmill.training.planner.framework import FRAMEWORKS
from gristmill.training.planner.hardware import load_hardware
from gristmill.training.planner.layout import Layout, from_config
from gristmill.training.planner.legality import context_skip_reason, illegal_reason
from gristmill.training.planner.plan_request import MEMORY_MARGIN, FixedChoices, PlanRequest
from gristmill.training.planner.plot import default_gpu_counts, plot_throughput, throughput_by_gpus
from gristmill.training.planner.search import Forecast, Planner, SearchResult, nothing_fits, search


def make_request(
    shape: ModelShape,
    gpus: int,
    hardware: str = "h100",
    batch_tokens: int | None = None,
    tokens: int | None = None,
    framework: str = "gristmill",
    fixed: FixedChoices = FixedChoices(),  # noqa: B008 (frozen)
    offload: bool = False,
    float8: bool = False,
    memory_margin: float = MEMORY_MARGIN,
) -> PlanRequest:
    """The request for command-line arguments. batch_tokens: of one step, 4 million by default; rounded to a near whole
    number of samples. Raises RecipeError where a name, a count or the batch is wrong."""
    if framework not in FRAMEWORKS:
        raise RecipeError(f"--framework {framework}: no such framework; choose one of {', '.join(FRAMEWORKS)}")
    if gpus < 1:
        raise RecipeError(f"--gpus {gpus}: at least one GPU is needed")
    samples = about_samples(4_000_000 if batch_tokens is None else batch_tokens, shape.sequence_length, gpus)
    return PlanRequest(
        shape=shape,
        hardware=load_hardware(hardware),
        gpus=gpus,
        samples=samples,
        tokens=tokens,
        framework=FRAMEWORKS[framework],
        offload=offload,
        float8=float8,
        fixed=fixed,
        memory_margin=memory_margin,
    )


def about_samples(batch_tokens: int, sequence_length: int, gpus: int) -> int:
    """Samples of a step: exact where the tokens are a multiple of the sequence length; else rounded to a multiple of
    the GPUs, or to a power of two if fewer than the GPUs. 4194304, 2048 -> 2048; 4M on 512 GPUs -> 2048; 4M on 3072
    -> 2048."""
    samples, rest = divmod(batch_tokens, sequence_length)
    if not rest or samples < 1:
        return samples
    if samples >= gpus:
        return gpus * round(samples / gpus)
    return 2 ** round(log2(samples))


def plan_recipe(
    model: ModelConfig,
    vocab: int,
    train: TrainConfig,
    gpus: int,
    hardware: str = "h100",
    fixed: FixedChoices = FixedChoices(),  # noqa: B008 (frozen)
    memory_margin: float = MEMORY_MARGIN,
) -> SearchResult:
    """Rank the layouts of a recipe's training on so many GPUs."""
    framework = "gristmill" if train.compile else "gristmill-eager"
    shape = shape_of(model, vocab)
    request = make_request(
        shape, gpus, hardware, train.batch_tokens, train.tokens, framework, fixed, float8=train.float8
    )
    return search(replace(request, memory_margin=memory_margin))


def resolve_layout(model: ModelConfig, vocab: int, train: TrainConfig, gpus: int) -> TrainConfig:
    """Replace `train.layout: auto` by the fastest layout that fits on so many GPUs and that the engine runs.

    Includes its split points and rank order; with train.compile only schedules that torch.compile supports. Raises
    RecipeError where there is none, with what to change."""
    if train.batch_tokens % model.sequence_length:
        nearest = max(1, round(train.batch_tokens / model.sequence_length)) * model.sequence_length
        raise RecipeError(
            f"train.batch_tokens: {train.batch_tokens} is not a multiple of the sequence length of "
            f"{model.sequence_length} tokens; try {nearest}"
        )
    plan = plan_recipe(model, vocab, train, gpus, train.layout.hardware)
    fields = train.model_dump()
    for forecast in plan.ranked:
        if train.compile and forecast.layout.schedule in ("zbv", "dualpipev"):
            continue
        layout = forecast.layout.config(forecast.cuts, forecast.placement.rank_order)
        chosen = TrainConfig.model_validate(fields | {"layout": layout.model_dump()})
        if not any(objections(model, chosen, vocab, gpus)):
            return chosen
    raise RecipeError(f"train.layout auto: {nothing_fits(plan)}")


def recipe_forecast(plan: SearchResult, model: ModelConfig, train: TrainConfig) -> Forecast:
    """Forecast the recipe's own layout. Raises RecipeError where the engine rejects it."""
    layout: Layout = from_config(train.layout, micro_batch_size(model, train))
    reason = illegal_reason(layout, plan.request.shape, plan.request.samples)
    if reason is not None:
        raise RecipeError(f"the recipe's layout cannot run: {reason}")
    return Planner(plan.request).forecast(layout)


def compare_recipe(plan: SearchResult, model: ModelConfig, train: TrainConfig) -> str:
    """One sentence that compares the recipe's layout with the best one on as many GPUs."""
    return compare(plan, recipe_forecast(plan, model, train))


def write_plot(request: PlanRequest, path: Path, counts: Sequence[int] = ()) -> None:
    """Plot throughput against the number of GPUs, up to the request's."""
    curve = throughput_by_gpus(request, counts or default_gpu_counts(request.gpus, request.hardware.node_gpus))
    plot_throughput(request, curve, path)


def recipe_text(plan: SearchResult) -> str:
    """The best layout as recipe lines, or why the engine cannot run it."""
    best = plan.best
    reason = context_skip_reason(plan.request.shape, best.layout.context)
    if reason is not None:
        return f"forecast only: {reason}"
    if plan.request.offload:
        return "forecast only: the engine does not keep the optimizer's state on the host"
    layout = best.layout.config(best.cuts, best.placement.rank_order)
    fields = layout.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump({"train": {"layout": fields}}, sort_keys=False)
