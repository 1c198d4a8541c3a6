"""Which layouts the engine can run: the rules of training/parallel/layout.py, quick enough for a search."""

from math import ceil

from pydantic import ValidationError

from gristmill.training.config import LayoutConfig, ModelConfig
from gristmill.training.costs.model_shape import ModelShape
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.schedule import least_microbatches, microbatches_fit

NOT_BUILT = "the engine does not run the context axis yet"
# Schedules that take the backward pass apart, which torch's recomputation by operator forbids.
SPLIT_BACKWARD = ("zbv", "dualpipev")


def context_objection(shape: ModelShape, context: int) -> str | None:
    """Why a search leaves so many context ranks out unless they are asked for; None if it takes them."""
    if shape.sequence_length % context:
        return f"context {context} does not divide {shape.sequence_length} tokens"
    try:
        LayoutConfig(context=context)
    except ValidationError:
        return f"{NOT_BUILT}; --context-axis N forecasts it all the same"
    return None


def tensor_objection(shape: ModelShape, tensor: int, sequence_parallel: bool) -> str | None:
    """Why the model cannot be cut over so many tensor ranks; None if it can."""
    model: ModelConfig = shape.model
    if tensor == 1:
        return None
    if model.heads % tensor:
        return f"tensor {tensor}: {model.heads} heads do not split evenly"
    kv_heads = model.num_kv_heads
    if kv_heads % tensor and tensor % kv_heads:
        return f"tensor {tensor}: {kv_heads} key/value heads neither split nor repeat evenly"
    for block in shape.distinct:
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


def objection(layout: Layout, shape: ModelShape, samples: int) -> str | None:
    """The first reason why the engine refuses a layout for a step of `samples` samples; None if it runs."""
    tensor = tensor_objection(shape, layout.tensor, layout.sequence_parallel)
    if tensor is not None:
        return tensor
    if layout.pipeline > 1 and layout.stages > len(shape.blocks):
        return f"more pipeline stages than the {len(shape.blocks)} layers"
    if shape.sequence_length % layout.context:
        return f"context {layout.context} does not divide {shape.sequence_length} tokens"
    if samples % layout.data:
        return f"{samples} samples do not split over the data ranks"
    if samples // layout.data % layout.micro_batch:
        return "the samples of a data rank do not split into the micro-batches"
    return _pipeline_objection(layout, layout.microbatches(samples))


def _pipeline_objection(layout: Layout, microbatches: int) -> str | None:
    if layout.pipeline == 1:
        return None
    least = least_microbatches(layout.schedule, layout.pipeline, layout.virtual)
    if microbatches < least:
        return f"fewer micro-batches than {layout.schedule} needs to fill its pipeline (one for each rank)"
    if not microbatches_fit(layout.schedule, layout.pipeline, microbatches):
        return "interleaved runs in rounds of as many micro-batches as ranks, and these are no whole number of rounds"
    if layout.schedule in SPLIT_BACKWARD and layout.recompute == "operators":
        return f"{layout.schedule} cannot recompute by operator"
    return None
