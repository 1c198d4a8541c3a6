"""The input of a search: a model, a machine, a batch, and the choices that are fixed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from pydantic import ValidationError

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.layers import divisors
from gristmill.training.config.layout import ON_DEVICE, OffloadConfig, Recompute, Schedule
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.costs.model_shape import ModelShape
from gristmill.training.planner.framework import GRISTMILL, Framework
from gristmill.training.planner.hardware import FITTED, GIB, Hardware, Sustained
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.layout_checks import CheckedModel, reasons_of


@dataclass(frozen=True)
class FixedChoices:
    """Choices that the user fixes; None leaves one to the search. wide: also try settings that are seldom fastest."""

    tensor: int | None = None
    pipeline: int | None = None
    replicate: int | None = None
    shard: int | None = None
    context: int | None = None
    virtual: int | None = None
    micro_batch: int | None = None
    schedule: Schedule | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None
    expert: int | None = None
    expert_tensor: int | None = None
    wide: bool = False


# Share of a GPU's memory that a layout must leave free: the 5 % by which the forecast may be off, and a little more for
# what it does not count (workspaces of other kernels, NCCL's buffers, gaps in the allocator).
MEMORY_MARGIN = 0.06


@dataclass(frozen=True)
class PlanRequest:
    """Input of a search. samples: of one step; tokens: of the whole training, for days and cost.

    memory_margin: share of each GPU's memory that is kept free. train: the recipe's training, whose fields beside the
    layout decide too which layouts run (its precision, its growing batch); None: one without a recipe. imbalance: rows
    that the busiest rank's experts get, over the mean."""

    shape: ModelShape
    hardware: Hardware
    gpus: int
    samples: int
    tokens: int | None = None
    framework: Framework = GRISTMILL
    sustained: Sustained = FITTED
    float8: bool = False
    offload: OffloadConfig = ON_DEVICE
    fixed: FixedChoices = field(default_factory=FixedChoices)
    memory_margin: float = MEMORY_MARGIN
    train: TrainConfig | None = None
    imbalance: float = 1.0

    def training(self, layout: Layout) -> TrainConfig:
        """The recipe's `train` with this layout. Raises ValidationError where they exclude each other."""
        config = layout.config().model_copy(update={"offload": self.offload})
        return TrainConfig.model_validate(self._train_fields | {"layout": config})

    def illegal_reason(self, layout: Layout) -> str | None:
        """The first reason why the engine refuses a layout, with a fix; None if it runs.

        Of other programs' layouts, what the engine refuses whether its layers are compiled or not."""
        try:
            train = self.training(layout)
        except ValidationError as error:
            return reasons_of(error)
        return next(self._checked.objections(train, layout.gpus), None)

    @cached_property
    def _checked(self) -> CheckedModel:
        shape = self.shape
        return CheckedModel(shape.model.model_copy(update={"sequence_length": shape.sequence_length}), shape.vocab)

    @cached_property
    def _train_fields(self) -> dict[str, Any]:
        tokens = self.samples * self.shape.sequence_length
        train = self.train or TrainConfig(
            tokens=tokens,
            batch_tokens=tokens,
            compile=self.framework.compiles,
            float8=self.float8 and self.framework.is_ours,
        )
        return {name: getattr(train, name) for name in TrainConfig.model_fields}

    @property
    def usable_bytes(self) -> float:
        """Memory of a GPU without the margin."""
        return self.hardware.device.memory_gib * GIB * (1 - self.memory_margin)

    @property
    def host_bytes(self) -> float:
        """A GPU's share of the host's memory."""
        return self.hardware.host_memory_gib_per_gpu * GIB


def check(request: PlanRequest) -> None:
    """Raises RecipeError where a request is invalid, or where a fixed choice leaves no legal layout."""
    if request.gpus < 1:
        raise RecipeError(f"--gpus {request.gpus}: at least one GPU is needed")
    if request.samples < 1:
        raise RecipeError(
            f"a batch of {request.samples} samples; --batch-tokens must be at least the sequence length, "
            f"{request.shape.sequence_length}"
        )
    if not 0 <= request.memory_margin < 1:
        raise RecipeError(
            f"--memory-margin {request.memory_margin}: a share of the memory from 0 to below 1, such as 0.06"
        )
    if request.imbalance < 1:
        raise RecipeError(f"--imbalance {request.imbalance}: the busiest rank's rows over the mean; give 1 or more")
    limit = request.hardware.gpus
    if limit is not None and request.gpus > limit:
        raise RecipeError(f"--gpus {request.gpus}, but the clusters of {request.hardware.name} have {limit} in all")
    for reason in fixed_choice_errors(request):
        raise RecipeError(reason)


def fixed_choice_errors(request: PlanRequest) -> Iterator[str]:
    """Why the fixed choices leave no legal layout, each with a fix. First the axes, which must divide the GPUs; then
    what must divide the batch or the layers."""
    fixed, shape = request.fixed, request.shape
    if fixed.tensor is not None:
        reason = request.illegal_reason(
            Layout(tensor=fixed.tensor, sequence_parallel=bool(fixed.sequence_parallel), recompute="full")
        )
        if reason is not None:
            yield f"--{reason}"
    if not shape.has_experts and (fixed.expert or 1) * (fixed.expert_tensor or 1) > 1:
        yield "--expert: the model has no experts; leave it out, or give the model some (model.moe)"
    axes = {"tensor": fixed.tensor, "context-axis": fixed.context, "pipeline": fixed.pipeline}
    axes |= {"replicate": fixed.replicate, "shard": fixed.shard}
    wanted = {name: size for name, size in axes.items() if size is not None}
    product = prod(wanted.values())
    if request.gpus % product:
        product_text = " x ".join(f"--{name} {size}" for name, size in wanted.items())
        count = -(-request.gpus // product) * product
        few = (
            f"more than --gpus {request.gpus}"
            if product > request.gpus
            else f"which {request.gpus} is not a multiple of"
        )
        yield f"{product_text} = {product} GPUs, {few}; use --gpus {count}, or leave an axis open"
    layers, stages = len(shape.blocks), (fixed.pipeline or 1) * (fixed.virtual or 1)
    if fixed.pipeline is not None and stages > layers:
        yield f"--pipeline {fixed.pipeline} with {fixed.virtual or 1} stages each: {stages} stages, but {layers} layers"
    if fixed.micro_batch is not None and request.samples % fixed.micro_batch:
        sizes = ", ".join(map(str, divisors(request.samples)[:12]))
        yield f"--micro-batch {fixed.micro_batch} does not divide {request.samples} samples a step; try one of {sizes}"
