"""What `gristmill layout` and `train.layout: auto` call: from plain arguments to a plan, from a plan to a layout."""

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
from gristmill.training.planner.framework import PROGRAMS
from gristmill.training.planner.hardware import load_hardware
from gristmill.training.planner.layout import Layout, from_config
from gristmill.training.planner.legality import context_objection, objection
from gristmill.training.planner.plan_request import MEMORY_MARGIN, FixedChoices, PlanRequest
from gristmill.training.planner.plot import plot_throughput, throughput_curve, usual_counts
from gristmill.training.planner.search import Forecast, Planner, SearchResult, nothing_fits, search


def make_job(
    shape: ModelShape,
    gpus: int,
    hardware: str = "h100",
    batch_tokens: int | None = None,
    tokens: int | None = None,
    software: str = "gristmill",
    pins: FixedChoices = FixedChoices(),  # noqa: B008 (frozen)
    offload: bool = False,
    float8: bool = False,
    memory_margin: float = MEMORY_MARGIN,
) -> PlanRequest:
    """A job from the command line's words. batch_tokens: of one step, 4 million by default; a number that is no whole
    number of samples is taken as about so many. Raises RecipeError where a name, a count or the batch is wrong."""
    if software not in PROGRAMS:
        raise RecipeError(f"--software {software}: no such program; they are {', '.join(PROGRAMS)}")
    if gpus < 1:
        raise RecipeError(f"--gpus {gpus}: at least one GPU is needed")
    samples = about_samples(4_000_000 if batch_tokens is None else batch_tokens, shape.sequence_length, gpus)
    return PlanRequest(
        shape=shape,
        hardware=load_hardware(hardware),
        gpus=gpus,
        samples=samples,
        tokens=tokens,
        software=PROGRAMS[software],
        offload=offload,
        float8=float8,
        pins=pins,
        memory_margin=memory_margin,
    )


def about_samples(batch_tokens: int, sequence_length: int, gpus: int) -> int:
    """Samples of a step: exact where the tokens are a multiple of the sequence length; else rounded to a multiple of
    the GPUs, or below one each to a power of two. 4194304, 2048 -> 2048; 4M on 512 GPUs -> 2048; 4M on 3072 -> 2048."""
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
    pins: FixedChoices = FixedChoices(),  # noqa: B008 (frozen)
    memory_margin: float = MEMORY_MARGIN,
) -> SearchResult:
    """Every layout of a recipe's training on so many GPUs."""
    software = "gristmill" if train.compile else "gristmill-eager"
    shape = shape_of(model, vocab)
    job = make_job(shape, gpus, hardware, train.batch_tokens, train.tokens, software, pins, float8=train.float8)
    return search(replace(job, memory_margin=memory_margin))


def resolve_layout(model: ModelConfig, vocab: int, train: TrainConfig, gpus: int) -> TrainConfig:
    """What `train.layout: auto` stands for on so many GPUs: the training with the fastest layout that fits and that the
    engine runs (with torch.compile too, if that is wanted), its cuts and its order of ranks.

    Raises RecipeError where there is none, with the mend."""
    if train.batch_tokens % model.sequence_length:
        nearest = max(1, round(train.batch_tokens / model.sequence_length)) * model.sequence_length
        raise RecipeError(
            f"train.batch_tokens: {train.batch_tokens} is no whole number of samples of "
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


def own_forecast(plan: SearchResult, model: ModelConfig, train: TrainConfig) -> Forecast:
    """The forecast of the recipe's own layout. Raises RecipeError where the engine would refuse it."""
    layout: Layout = from_config(train.layout, micro_batch_size(model, train))
    reason = objection(layout, plan.job.shape, plan.job.samples)
    if reason is not None:
        raise RecipeError(f"the recipe's layout cannot run: {reason}")
    return Planner(plan.job).forecast(layout)


def compare_recipe(plan: SearchResult, model: ModelConfig, train: TrainConfig) -> str:
    """A sentence on the recipe's layout beside the best one on as many GPUs."""
    return compare(plan, own_forecast(plan, model, train))


def write_plot(job: PlanRequest, path: Path, counts: Sequence[int] = ()) -> None:
    """Throughput against the number of GPUs, up to the job's."""
    curve = throughput_curve(job, counts or usual_counts(job.gpus, job.hardware.node_gpus))
    plot_throughput(job, curve, path)


def recipe_text(plan: SearchResult) -> str:
    """The best layout as the lines that go into a recipe, or why no recipe takes it."""
    best = plan.best
    reason = context_objection(plan.job.shape, best.layout.context)
    if reason is not None:
        return f"forecast only: {reason}"
    if plan.job.offload:
        return "forecast only: the engine does not keep the optimizer's state on the host"
    layout = best.layout.config(best.cuts, best.placement.rank_order)
    fields = layout.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump({"train": {"layout": fields}}, sort_keys=False)
