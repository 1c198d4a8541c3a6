"""The input of a search: a model, a machine, a batch, and the choices that are fixed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from gristmill.foundation.errors import RecipeError
from gristmill.training.costs.model_shape import ModelShape
from gristmill.training.divisors import divisors
from gristmill.training.layout_config import Recompute, Schedule
from gristmill.training.offload_config import ON_DEVICE, OffloadConfig
from gristmill.training.planner.framework import GRISTMILL, Framework
from gristmill.training.planner.hardware import GIB, Hardware
from gristmill.training.planner.legality import tensor_illegal_reason
from gristmill.training.planner.rates import FITTED, Sustained


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

    memory_margin: share of each GPU's memory that is kept free."""

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
        reason = tensor_illegal_reason(shape, fixed.tensor, bool(fixed.sequence_parallel))
        if reason is not None:
            legal = [size for size in divisors(shape.tensor_heads) if tensor_illegal_reason(shape, size, False) is None]
            yield f"--{reason}; legal for this model: {', '.join(map(str, legal))}"
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
