"""What is to be planned: a model, a machine, a batch, and the choices that are made already."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from gristmill.foundation.errors import RecipeError
from gristmill.training.config import Recompute, Schedule, divisors
from gristmill.training.costs.model_shape import ModelShape
from gristmill.training.planner.framework import GRISTMILL, Framework
from gristmill.training.planner.hardware import GIB, Hardware
from gristmill.training.planner.legality import tensor_objection
from gristmill.training.planner.rates import FITTED, Sustained


@dataclass(frozen=True)
class FixedChoices:
    """Choices that are made already; None leaves one open. wide: try the settings that seldom win, too.

    context: while the engine has no context axis, sizes above 1 are forecast only where they are named here."""

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
    wide: bool = False


# Share of a GPU's memory that no layout may fill: what the forecast does not know (workspaces of other kernels, NCCL's
# buffers for more groups, gaps in the allocator) came to less than the 5 % it may be off by, and a little more is kept.
MEMORY_MARGIN = 0.06


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned. samples: of one step; tokens: of the whole training, for days and cost.

    memory_margin: share of each GPU's memory that is kept free."""

    shape: ModelShape
    hardware: Hardware
    gpus: int
    samples: int
    tokens: int | None = None
    software: Framework = GRISTMILL
    sustained: Sustained = FITTED
    float8: bool = False
    offload: bool = False
    pins: FixedChoices = field(default_factory=FixedChoices)
    memory_margin: float = MEMORY_MARGIN

    @property
    def usable_bytes(self) -> float:
        """Of a GPU's memory, less the margin."""
        return self.hardware.device.memory_gib * GIB * (1 - self.memory_margin)


def check(job: PlanRequest) -> None:
    """Raises RecipeError where a job cannot be planned at all, or a choice that is made already leaves no layout."""
    if job.gpus < 1:
        raise RecipeError(f"--gpus {job.gpus}: at least one GPU is needed")
    if job.samples < 1:
        raise RecipeError(
            f"a batch of {job.samples} samples; --batch-tokens must be at least the sequence length, "
            f"{job.shape.sequence_length}"
        )
    if not 0 <= job.memory_margin < 1:
        raise RecipeError(f"--memory-margin {job.memory_margin}: a share of the memory from 0 to below 1, such as 0.06")
    limit = job.hardware.gpus
    if limit is not None and job.gpus > limit:
        raise RecipeError(f"--gpus {job.gpus}, but the clusters of {job.hardware.name} have {limit} in all")
    for reason in pinned_objections(job):
        raise RecipeError(reason)


def pinned_objections(job: PlanRequest) -> Iterator[str]:
    """Why the choices that are made already leave no layout, each with what would do. Axes first: they must divide the
    GPUs; then what must divide the batch or the layers."""
    pins, shape = job.pins, job.shape
    if pins.tensor is not None:
        reason = tensor_objection(shape, pins.tensor, bool(pins.sequence_parallel))
        if reason is not None:
            legal = [size for size in divisors(shape.model.heads) if tensor_objection(shape, size, False) is None]
            yield f"--{reason}; legal for this model: {', '.join(map(str, legal))}"
    axes = {"tensor": pins.tensor, "context-axis": pins.context, "pipeline": pins.pipeline}
    axes |= {"replicate": pins.replicate, "shard": pins.shard}
    wanted = {name: size for name, size in axes.items() if size is not None}
    product = prod(wanted.values())
    if job.gpus % product:
        said = " x ".join(f"--{name} {size}" for name, size in wanted.items())
        count = -(-job.gpus // product) * product
        few = f"more than the {job.gpus} there are" if product > job.gpus else f"which {job.gpus} is no multiple of"
        yield f"{said} = {product} GPUs, {few}; use --gpus {count}, or leave an axis open"
    layers, stages = len(shape.blocks), (pins.pipeline or 1) * (pins.virtual or 1)
    if pins.pipeline is not None and stages > layers:
        yield f"--pipeline {pins.pipeline} with {pins.virtual or 1} stages each: {stages} stages, but {layers} layers"
    if pins.micro_batch is not None and job.samples % pins.micro_batch:
        sizes = ", ".join(map(str, divisors(job.samples)[:12]))
        yield f"--micro-batch {pins.micro_batch} does not divide {job.samples} samples a step; try one of {sizes}"
