"""Entry points of `gristmill layout` and `train.layout: auto`: arguments to a plan, and a plan to a layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.layout import ON_DEVICE, OffloadConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.costs.model_shape import ModelShape, shape_of
from gristmill.training.planner.framework import FRAMEWORKS
from gristmill.training.planner.hardware import GIB, load_hardware
from gristmill.training.planner.layout import Layout, from_config
from gristmill.training.planner.layout_checks import micro_batch_size, objections
from gristmill.training.planner.report import compare, default_gpu_counts, plot_throughput, throughput_by_gpus
from gristmill.training.planner.request import MEMORY_MARGIN, FixedChoices, PlanRequest, illegal_reason
from gristmill.training.planner.search import Forecast, Planner, SearchResult, nothing_fits, search_with_offload


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan by their names on the command line. batch_tokens: of one step, rounded to a near whole number
    of samples. tokens: of the whole training; None: its days and cost are not forecast."""

    hardware: str = "h100"
    batch_tokens: int = 4_000_000
    tokens: int | None = None
    framework: str = "gristmill"
    offload: OffloadConfig = ON_DEVICE
    float8: bool = False
    memory_margin: float = MEMORY_MARGIN
    optimizer: str = "adamw"


def make_request(
    shape: ModelShape,
    gpus: int,
    options: PlanOptions = PlanOptions(),
    fixed: FixedChoices = FixedChoices(),  # noqa: B008 (frozen)
) -> PlanRequest:
    """The request of these options. Raises RecipeError where a name, a count or the batch is wrong."""
    if options.framework not in FRAMEWORKS:
        raise RecipeError(f"--framework {options.framework}: no such framework; choose one of {', '.join(FRAMEWORKS)}")
    if gpus < 1:
        raise RecipeError(f"--gpus {gpus}: at least one GPU is needed")
    return PlanRequest(
        shape=shape,
        hardware=load_hardware(options.hardware),
        gpus=gpus,
        samples=about_samples(options.batch_tokens, shape.sequence_length, gpus),
        tokens=options.tokens,
        framework=FRAMEWORKS[options.framework].with_optimizer(options.optimizer),
        offload=options.offload,
        float8=options.float8,
        fixed=fixed,
        memory_margin=options.memory_margin,
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
    shape: ModelShape,
    train: TrainConfig,
    gpus: int,
    hardware: str = "h100",
    fixed: FixedChoices = FixedChoices(),  # noqa: B008 (frozen)
    memory_margin: float = MEMORY_MARGIN,
) -> SearchResult:
    """Rank the layouts of a recipe's training on so many GPUs."""
    framework = "gristmill" if train.compile else "gristmill-eager"
    options = PlanOptions(
        hardware,
        train.batch_tokens,
        train.tokens,
        framework,
        train.layout.offload,
        train.float8,
        memory_margin,
        train.optimizer.name,
    )
    return search_with_offload(make_request(shape, gpus, options, fixed))


def resolve_layout(model: ModelConfig, vocab: int, train: TrainConfig, gpus: int) -> TrainConfig:
    """Replace `train.layout: auto` by the fastest layout that fits on so many GPUs and that the engine runs.

    Includes its split points and rank order; with train.compile only schedules that torch.compile supports. Raises
    RecipeError where there is none, with what to change."""
    if model.has_experts and train.compile:
        raise RecipeError("train.compile is not built for experts yet; set it false")
    if train.batch_tokens % model.sequence_length:
        nearest = max(1, round(train.batch_tokens / model.sequence_length)) * model.sequence_length
        raise RecipeError(
            f"train.batch_tokens: {train.batch_tokens} is not a multiple of the sequence length of "
            f"{model.sequence_length} tokens; try {nearest}"
        )
    plan = plan_recipe(shape_of(model, vocab), train, gpus, train.layout.hardware)
    fields = train.model_dump()
    for forecast in plan.ranked:
        if train.compile and forecast.layout.schedule in ("zbv", "dualpipev"):
            continue
        layout = forecast.layout.config(forecast.split_points, forecast.placement.rank_order)
        layout = layout.model_copy(update={"offload": plan.request.offload})
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
    planner = Planner(plan.request)
    return planner.forecast(planner.with_share(layout))


def with_token_share(model: ModelConfig, vocab: int, train: TrainConfig) -> tuple[TrainConfig, str]:
    """(the training with the planned share of swapped tokens, a sentence that states it); unchanged and empty where the
    recipe leaves nothing open. Raises RecipeError where host memory does not hold even what is always swapped."""
    config = train.layout
    if config.recompute != "tokens" or config.swapped_tokens is not None:
        return train, ""
    options = PlanOptions(config.hardware, train.batch_tokens, offload=config.offload, float8=train.float8)
    shape = shape_of(model, vocab)
    planner = Planner(make_request(shape, config.world_size, options))
    plan = planner.swap_plan(from_config(config, micro_batch_size(model, train)))
    if plan.host_share < 0:
        raise RecipeError(
            f"layout.recompute: tokens keeps each layer's input and attention output in host memory, which is "
            f"{plan.host_bytes / GIB:,.1f} GiB for each GPU; the profile {config.hardware} has "
            f"{planner.request.host_bytes / GIB:,.1f}: lower model.sequence_length or the micro-batch, raise context, "
            "or set recompute: full"
        )
    chosen = config.model_copy(update={"swapped_tokens": plan.share})
    return train.model_copy(update={"layout": chosen}), plan.sentence()


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
    layout = best.layout.config(best.split_points, best.placement.rank_order)
    layout = layout.model_copy(update={"offload": plan.request.offload})
    fields = layout.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump({"train": {"layout": fields}}, sort_keys=False)
