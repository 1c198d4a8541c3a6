"""Candidate layouts of a search: every combination of the choices that are not fixed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import get_args

from gristmill.training.config.layers import divisors
from gristmill.training.config.layout import STAGES_PER_RANK, ContextMethod, Schedule
from gristmill.training.planner.framework import Framework
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.request import FixedChoices, PlanRequest

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MAX_STAGES_PER_RANK = 8
MAX_CONTEXT = 64
MIN_CONTEXT_TOKENS = 4096  # of a rank: with fewer a search does not divide a sample further, unless the axis is fixed


def open_layouts(request: PlanRequest, fail: Callable[[str, str], None]) -> Iterator[Layout]:
    """Every combination of the open choices; recomputation is chosen later, by what fits."""
    for tensor in _choices(request.fixed.tensor, _tensor_sizes(request)):
        sequence_parallel = _sequence_parallel(request, tensor)
        # The rest is decided below, and no layout is refused for full recomputation.
        layout = Layout(tensor=tensor, sequence_parallel=sequence_parallel, recompute="full")
        reason = request.illegal_reason(layout)
        if reason is not None:
            fail(reason, f"tensor {tensor}")
            continue
        for base in _contexts(request, layout, fail):
            yield from _pipeline_and_data(request, base, fail)


def _contexts(request: PlanRequest, base: Layout, fail: Callable[[str, str], None]) -> Iterator[Layout]:
    """The layout with each legal context axis that divides the GPUs, or with the fixed one, by each method."""
    for context in _choices(request.fixed.context, _context_sizes(request)):
        if request.gpus % (base.tensor * context):
            if context == 1 or request.fixed.context:
                example = f"tensor {base.tensor} x context {context}"
                fail(f"tensor x context does not divide {request.gpus} GPUs", example)
            continue
        for method in get_args(ContextMethod) if context > 1 else ("ring",):
            layout = replace(base, context=context, context_method=method)
            reason = request.illegal_reason(layout)
            if reason is None:
                yield layout
            else:
                fail(reason, layout.name())


def _context_sizes(request: PlanRequest) -> list[int]:
    """Powers of two that leave a rank MIN_CONTEXT_TOKENS; our engine's layouts only."""
    if request.framework.data_parallel != "fsdp":
        return [1]
    length = request.shape.sequence_length
    sizes = [2**power for power in range(MAX_CONTEXT.bit_length())]
    return [size for size in sizes if size == 1 or length // size >= MIN_CONTEXT_TOKENS]


def _pipeline_and_data(request: PlanRequest, base: Layout, fail: Callable[[str, str], None]) -> Iterator[Layout]:
    """base: a layout with its tensor and context axes; the remaining GPUs go to the pipeline and data axes."""
    shape, fixed, framework = request.shape, request.fixed, request.framework
    inner = base.tensor * base.context
    rest = request.gpus // inner
    for pipeline in _choices(fixed.pipeline, [p for p in divisors(rest) if p <= len(shape.blocks)]):
        if rest % pipeline:
            continue
        data = rest // pipeline
        if request.samples % data:
            example = f"tensor {base.tensor} x pipeline {pipeline} x data {data}"
            fail(f"{request.samples} samples do not split over the data ranks", example)
            continue
        schedules = _schedules(pipeline, len(shape.blocks), fixed, framework)
        micro_batches = _choices(fixed.micro_batch, _micro_batches(request.samples // data, fixed))
        for shard in _shards(data, inner, request.hardware.node_gpus, fixed, framework):
            for schedule, virtual in schedules:
                for micro_batch in micro_batches:
                    for reshard in (False, True) if pipeline == 1 and shard > 1 else (False,):
                        yield from _with_experts(
                            request,
                            Layout(
                                tensor=base.tensor,
                                pipeline=pipeline,
                                replicate=data // shard,
                                shard=shard,
                                context=base.context,
                                context_method=base.context_method,
                                virtual=virtual,
                                micro_batch=micro_batch,
                                pipeline_schedule=schedule,
                                recompute=fixed.recompute or "none",
                                sequence_parallel=base.sequence_parallel,
                                reshard=reshard,
                            ),
                        )


def _with_experts(request: PlanRequest, layout: Layout) -> Iterator[Layout]:
    """The layout, with every size of the expert axis that divides its ranks and the experts of all layers."""
    if not request.shape.has_experts:
        yield layout
        return
    shares, ranks = request.fixed.expert_tensor or 1, layout.data * layout.context * layout.tensor
    sizes = divisors(gcd(*(block.experts for block in request.shape.blocks)))
    for size in _choices(request.fixed.expert, sizes):
        if ranks % (size * shares) == 0:
            yield replace(layout, expert=size, expert_tensor=shares)


def _choices(fixed: int | None, open_choices: Sequence[int]) -> Sequence[int]:
    return open_choices if fixed is None else (fixed,)


def _tensor_sizes(request: PlanRequest) -> list[int]:
    """Divisors of the heads up to two nodes: larger than a node only helps models that fit in no other way."""
    max_size = request.hardware.node_gpus * 2
    return [size for size in divisors(request.shape.tensor_heads) if size <= max_size and request.gpus % size == 0]


def _sequence_parallel(request: PlanRequest, tensor: int) -> bool:
    if tensor == 1:
        return False
    if request.fixed.sequence_parallel is not None:
        return request.fixed.sequence_parallel
    return request.framework.name != "megatron-2021" and request.shape.sequence_length % tensor == 0


def _shards(data: int, inner: int, node: int, fixed: FixedChoices, framework: Framework) -> list[int]:
    """Sizes of the FSDP shard group: all ranks, those of a node, one; every divisor when wide."""
    if framework.data_parallel != "fsdp":
        return [1]
    if fixed.shard is not None:
        return [fixed.shard] if data % fixed.shard == 0 else []
    if fixed.replicate is not None:
        return [data // fixed.replicate] if data % fixed.replicate == 0 else []
    if fixed.wide:
        return divisors(data)
    local = max(1, node // inner)
    sizes = {1, data, local, 8 * local, data // 2}
    return sorted(size for size in sizes if size and data % size == 0)


def _schedules(pipeline: int, layers: int, fixed: FixedChoices, framework: Framework) -> list[tuple[Schedule, int]]:
    """(schedule, stages per rank). gpipe never beats 1f1b, so it is tried only when it is fixed."""
    if pipeline == 1:
        return [("1f1b", 1)]
    names: Sequence[Schedule] = (fixed.schedule,) if fixed.schedule else framework.schedules
    if not fixed.schedule and fixed.virtual:
        names = ("1f1b",) if fixed.virtual == 1 else ("interleaved",)
    schedules: list[tuple[Schedule, int]] = []
    for name in names:
        default = STAGES_PER_RANK.get(name)
        max_virtual = min(MAX_STAGES_PER_RANK, layers // pipeline)
        open_virtual = [v for v in range(2, max_virtual + 1) if layers % (pipeline * v) == 0] or (
            [2] if max_virtual >= 2 else []
        )
        virtuals = [default] if default else _choices(fixed.virtual, open_virtual)
        schedules += [(name, virtual) for virtual in virtuals if virtual * pipeline <= layers]
    return schedules


def _micro_batches(share: int, fixed: FixedChoices) -> list[int]:
    sizes = divisors(share) if fixed.wide else MICRO_BATCHES
    return [size for size in sizes if share % size == 0 and size <= 64] or [1]
