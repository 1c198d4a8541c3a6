"""Entry points of `gristmill layout` and `train.layout: auto`: arguments to a plan, and a plan to a layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from typing import Any

import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.layout import ON_DEVICE, LayoutConfig, OffloadConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.costs.model_shape import ModelShape, shape_of
from gristmill.training.planner.engine_profile import FRAMEWORKS
from gristmill.training.planner.hardware import GIB, load_hardware
from gristmill.training.planner.layout import Layout, from_config
from gristmill.training.planner.layout_checks import micro_batch_size, validation_errors
from gristmill.training.planner.plan_report import compare, default_gpu_counts, plot_throughput, throughput_by_gpus
from gristmill.training.planner.plan_request import MEMORY_MARGIN, FixedChoices, PlanRequest
from gristmill.training.planner.search import Forecast, Planner, SearchResult, nothing_fits, search, search_with_offload


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan by their names on the command line. batch_tokens: of one step, rounded to a near whole number
    of samples. tokens: of the whole training; None: its days and cost are not forecast. framework: None is ours, with
    compiled layers where the engine compiles the model's."""

    hardware: str = "h100"
    batch_tokens: int = 4_000_000
    tokens: int | None = None
    framework: str | None = None
    offload: OffloadConfig = ON_DEVICE
    float8: bool = False
    memory_margin: float = MEMORY_MARGIN
    optimizer: str = "adamw"
    imbalance: float = 1.0


def make_request(
    shape: ModelShape,
    gpus: int,
    options: PlanOptions = PlanOptions(),
    fixed: FixedChoices = FixedChoices(),  # noqa: B008 (frozen)
) -> PlanRequest:
    """The request of these options. Raises RecipeError where a name, a count or the batch is wrong."""
    framework = options.framework or default_framework(shape)
    if framework not in FRAMEWORKS:
        raise RecipeError(f"--framework {framework}: no such framework; choose one of {', '.join(FRAMEWORKS)}")
    if gpus < 1:
        raise RecipeError(f"--gpus {gpus}: at least one GPU is needed")
    return PlanRequest(
        shape=shape,
        hardware=load_hardware(options.hardware),
        gpus=gpus,
        samples=about_samples(options.batch_tokens, shape.sequence_length, gpus),
        tokens=options.tokens,
        framework=FRAMEWORKS[framework].with_optimizer(options.optimizer),
        offload=options.offload,
        float8=options.float8,
        fixed=fixed,
        memory_margin=options.memory_margin,
        imbalance=options.imbalance,
    )


def default_framework(shape: ModelShape) -> str:
    """gristmill, or gristmill-eager where the engine does not compile the model's layers (a mixer that says so)."""
    train = TrainConfig(tokens=shape.sequence_length, batch_tokens=shape.sequence_length, compile=True)
    model = shape.model.model_copy(update={"sequence_length": shape.sequence_length})
    return "gristmill-eager" if any(validation_errors(model, train, shape.vocab, 1)) else "gristmill"


def plan_model(
    shape: ModelShape,
    gpus: int,
    options: PlanOptions = PlanOptions(),
    fixed: FixedChoices = FixedChoices(),  # noqa: B008 (frozen)
) -> SearchResult:
    """Rank the layouts of a model. Where no framework is named and nothing fits with compiled layers, which allow no
    recomputation of some tokens, the layouts of eager layers; where nothing fits either, with state in host memory."""
    plan = search(make_request(shape, gpus, options, fixed))
    if options.framework is None and plan.request.framework.compiles and not plan.ranked:
        eager = search(make_request(shape, gpus, replace(options, framework="gristmill-eager"), fixed))
        plan = eager if eager.ranked else plan
    return plan if plan.ranked else search_with_offload(plan.request)


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
    return search_with_offload(replace(make_request(shape, gpus, options, fixed), train=train))


def resolve_layout(model: ModelConfig, vocab: int, train: TrainConfig, gpus: int) -> TrainConfig:
    """Replace `train.layout: auto` by the fastest layout that fits on so many GPUs, with its split points and rank
    order. Raises RecipeError where there is none, with what to change."""
    if train.batch_tokens % model.sequence_length:
        nearest = max(1, round(train.batch_tokens / model.sequence_length)) * model.sequence_length
        raise RecipeError(
            f"train.batch_tokens: {train.batch_tokens} is not a multiple of the sequence length of "
            f"{model.sequence_length} tokens; try {nearest}"
        )
    plan = plan_recipe(shape_of(model, vocab), train, gpus, train.layout.hardware)
    if not plan.ranked:
        raise RecipeError(f"train.layout auto: {nothing_fits(plan)}")
    return TrainConfig.model_validate(train.model_dump() | {"layout": chosen_layout(plan).model_dump()})


def chosen_layout(plan: SearchResult) -> LayoutConfig:
    """The best layout as a recipe has it, with its split points, rank order and offload."""
    best = plan.best
    layout = best.layout.config(best.split_points, best.placement.rank_order)
    return layout.model_copy(update={"offload": plan.request.offload})


def recipe_forecast(plan: SearchResult, model: ModelConfig, train: TrainConfig) -> Forecast:
    """Forecast the recipe's own layout. Raises RecipeError where the engine rejects it."""
    layout: Layout = from_config(train.layout, micro_batch_size(model, train))
    reasons = list(validation_errors(model, train, plan.request.shape.vocab, plan.request.gpus))
    if reasons:
        raise RecipeError(f"the recipe's layout cannot run: {'; '.join(reasons)}")
    planner = Planner(plan.request)
    return planner.forecast(planner.with_share(layout))


def with_token_share(model: ModelConfig, vocab: int, train: TrainConfig) -> tuple[TrainConfig, str]:
    """(the training with the planned share of swapped tokens, a sentence that states it); unchanged and empty where the
    recipe leaves nothing open. Raises RecipeError where host memory does not hold even what is always swapped."""
    config = train.layout
    if config.recompute != "tokens" or config.offloaded_token_fraction is not None:
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
    chosen = config.model_copy(update={"offloaded_token_fraction": plan.share})
    return train.model_copy(update={"layout": chosen}), plan.sentence()


def compare_recipe(plan: SearchResult, model: ModelConfig, train: TrainConfig) -> str:
    """One sentence that compares the recipe's layout with the best one on as many GPUs."""
    return compare(plan, recipe_forecast(plan, model, train))


def write_plot(request: PlanRequest, path: Path, counts: Sequence[int] = ()) -> None:
    """Plot throughput against the number of GPUs, up to the request's."""
    curve = throughput_by_gpus(request, counts or default_gpu_counts(request.gpus, request.hardware.node_gpus))
    plot_throughput(request, curve, path)


def recipe_text(plan: SearchResult) -> str:
    """The best layout as recipe lines, with the settings it was forecast for. Raises RecipeError where none fits."""
    layout, request = chosen_layout(plan), plan.request
    train: dict[str, Any] = {"layout": layout.model_dump(mode="json", exclude_defaults=True)}
    if request.framework.is_ours and request.train is None:
        train = {"compile": request.framework.compiles, "float8": request.float8} | train
    return yaml.safe_dump({"train": train}, sort_keys=False)
