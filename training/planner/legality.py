"""Which layouts the engine can run: the rules of training/parallel/layout.py, fast enough for a search."""

from math import ceil

from gristmill.training.costs.model_shape import ModelShape
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.schedule import microbatches_fit, min_microbatches

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
