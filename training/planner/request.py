"""The input of a search: a model, a machine, a batch, and the choices that are fixed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, prod

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.layers import divisors
from gristmill.training.config.layout import ON_DEVICE, OffloadConfig, Recompute, Schedule
from gristmill.training.planner.costs.model_shape import ModelShape
from gristmill.training.planner.framework import GRISTMILL, Framework
from gristmill.training.planner.hardware import FITTED, GIB, Hardware, Sustained
from gristmill.training.planner.layout import Layout, microbatches_fit, min_microbatches


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


# Which layouts the engine can run: the rules of training/planner/layout_checks.py, fast enough for a search.

# Schedules that split the backward pass, which torch's selective checkpointing by operator does not support.
SPLIT_BACKWARD = ("zbv", "dualpipev")


def context_illegal_reason(shape: ModelShape, layout: Layout) -> str | None:
    """Why a sample's tokens cannot be divided over the layout's context ranks; None if they can."""
    context, method = layout.context, layout.context_method
    if context == 1:
        return None
    if shape.sequence_length % (context * (2 if method == "ring" else 1)):
        return f"context {context} ({method}) does not split {shape.sequence_length} tokens"
    if layout.sequence_parallel and shape.sequence_length // context % layout.tensor:
        return f"context {context}: its share of {shape.sequence_length} tokens does not split over the tensor ranks"
    heads = shape.model.heads // layout.tensor
    if method == "all_to_all" and heads % context:
        return f"context {context} (all_to_all): {heads} heads of a tensor rank do not split evenly"
    return None


def tensor_illegal_reason(shape: ModelShape, tensor: int, sequence_parallel: bool) -> str | None:
    """Why the model cannot be sharded over so many tensor ranks; None if it can."""
    if tensor == 1:
        return None
    for block in shape.distinct:
        problem = None if block.mixer is None else block.mixer.tensor_problem(block.width, tensor)
        if problem is not None:
            return f"tensor {tensor}: {problem}"
        if block.hidden % tensor:
            return f"tensor {tensor}: the hidden width {block.hidden} does not split evenly"
    if (tensor - 1) * ceil(shape.vocab / tensor) >= shape.vocab:
        return f"tensor {tensor}: a vocabulary of {shape.vocab} leaves the last rank without a row"
    if sequence_parallel and shape.sequence_length % tensor:
        return (
            f"tensor {tensor}: a sequence length of {shape.sequence_length} does not split evenly for sequence "
            "parallelism"
        )
    return None


def expert_illegal_reason(shape: ModelShape, layout: Layout) -> str | None:
    """Why the model's experts cannot be laid over the ranks so; None if they can."""
    if not shape.has_experts:
        return f"expert {layout.expert_ranks}: the model has no experts" if layout.expert_ranks > 1 else None
    if layout.data * layout.context * layout.tensor % layout.expert_ranks:
        return f"expert {layout.expert_ranks} does not divide the ranks of data x context x tensor"
    for block in shape.distinct:
        if block.experts % layout.expert:
            return f"expert {layout.expert}: {block.experts} experts do not split evenly"
        if block.expert_hidden % layout.expert_tensor:
            return f"expert_tensor {layout.expert_tensor}: a width of {block.expert_hidden} does not split evenly"
    return None


def token_swap_illegal_reason(shape: ModelShape, layout: Layout) -> str | None:
    """Why recompute: tokens cannot compute some tokens of the layers again; None if it can."""
    if layout.recompute != "tokens":
        return None
    if any(block.mixer is not None and not block.mixer.marks_mixing for block in shape.distinct):
        return "recompute: tokens needs mixers that say what they compute of all tokens together"
    if layout.pipeline > 1 and layout.schedule in SPLIT_BACKWARD:
        return f"{layout.schedule} cannot recompute by token"
    return None


def illegal_reason(layout: Layout, shape: ModelShape, samples: int) -> str | None:
    """The first reason why the engine rejects a layout for a step of `samples` samples; None if it runs."""
    tensor = tensor_illegal_reason(shape, layout.tensor, layout.sequence_parallel)
    if tensor is not None:
        return tensor
    experts = expert_illegal_reason(shape, layout)
    if experts is not None:
        return experts
    if shape.has_experts and layout.recompute == "operators" and layout.gpus > 1:
        return "experts that FSDP shards cannot recompute by operator"
    tokens = token_swap_illegal_reason(shape, layout)
    if tokens is not None:
        return tokens
    if layout.pipeline > 1 and layout.stages > len(shape.blocks):
        return f"more pipeline stages than the {len(shape.blocks)} layers"
    context = context_illegal_reason(shape, layout)
    if context is not None:
        return context
    if samples % layout.data:
        return f"{samples} samples do not split over the data ranks"
    if samples // layout.data % layout.micro_batch:
        return "the samples of a data rank do not split into the micro-batches"
    return _pipeline_illegal_reason(layout, layout.microbatches(samples))


def _pipeline_illegal_reason(layout: Layout, microbatches: int) -> str | None:
    if layout.pipeline == 1:
        return None
    minimum = min_microbatches(layout.schedule, layout.pipeline, layout.virtual)
    if microbatches < minimum:
        return f"fewer micro-batches than {layout.schedule} needs to fill its pipeline (one for each rank)"
    if not microbatches_fit(layout.schedule, layout.pipeline, microbatches):
        return "the interleaved schedule needs a number of micro-batches that is a multiple of the pipeline ranks"
    if layout.schedule in SPLIT_BACKWARD and layout.recompute == "operators":
        return f"{layout.schedule} cannot recompute by operator"
    return None
