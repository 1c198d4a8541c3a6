"""Every combination of the open choices of a job, most of them illegal or too large: what a search looks at."""

from collections.abc import Callable, Iterator, Sequence

from gristmill.training.config import STAGES_PER_RANK, Schedule, divisors
from gristmill.training.planner.framework import Framework
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.legality import context_objection, tensor_objection
from gristmill.training.planner.plan_request import FixedChoices, PlanRequest

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MOST_STAGES_A_RANK = 8
CONTEXT_SIZES = (1, 2, 4, 8, 16)


def open_layouts(job: PlanRequest, fail: Callable[[str, str], None]) -> Iterator[Layout]:
    """Every combination of the open choices, recomputation left to what fits."""
    shape, pins = job.shape, job.pins
    for tensor in _choices(pins.tensor, _tensor_sizes(job)):
        sequence_parallel = _sequence_parallel(job, tensor)
        reason = tensor_objection(shape, tensor, sequence_parallel)
        if reason is not None:
            fail(reason, f"tensor {tensor}")
            continue
        for context in _contexts(job, tensor, fail):
            yield from _behind_tensor(
                job, Layout(tensor=tensor, context=context, sequence_parallel=sequence_parallel), fail
            )


def _contexts(job: PlanRequest, tensor: int, fail: Callable[[str, str], None]) -> Iterator[int]:
    """Sizes of the context axis that the GPUs divide into and the engine runs, or the one that is asked for."""
    for context in _choices(job.pins.context, CONTEXT_SIZES):
        if job.gpus % (tensor * context):
            if context == 1 or job.pins.context:
                example = f"tensor {tensor} x context {context}"
                fail(f"tensor x context does not divide {job.gpus} GPUs", example)
            continue
        reason = None if job.pins.context else context_objection(job.shape, context)
        if reason is None:
            yield context
        else:
            fail(reason, f"tensor {tensor} x context {context}")


def _behind_tensor(job: PlanRequest, base: Layout, fail: Callable[[str, str], None]) -> Iterator[Layout]:
    """base: with its tensor and context axes; the rest of the GPUs are dealt to pipeline and data."""
    shape, pins, software = job.shape, job.pins, job.software
    inner = base.tensor * base.context
    rest = job.gpus // inner
    for pipeline in _choices(pins.pipeline, [p for p in divisors(rest) if p <= len(shape.blocks)]):
        if rest % pipeline:
            continue
        data = rest // pipeline
        if job.samples % data:
            example = f"tensor {base.tensor} x pipeline {pipeline} x data {data}"
            fail(f"{job.samples} samples do not split over the data ranks", example)
            continue
        schedules = _schedules(pipeline, len(shape.blocks), pins, software)
        micro_batches = _choices(pins.micro_batch, _micro_batches(job.samples // data, pins))
        for shard in _shards(data, inner, job.hardware.node_gpus, pins, software):
            for schedule, virtual in schedules:
                for micro_batch in micro_batches:
                    for reshard in (False, True) if pipeline == 1 and shard > 1 else (False,):
                        yield Layout(
                            tensor=base.tensor,
                            pipeline=pipeline,
                            replicate=data // shard,
                            shard=shard,
                            context=base.context,
                            virtual=virtual,
                            micro_batch=micro_batch,
                            schedule=schedule,
                            recompute=pins.recompute or "none",
                            sequence_parallel=base.sequence_parallel,
                            reshard=reshard,
                        )


def _choices(pinned: int | None, open_choices: Sequence[int]) -> Sequence[int]:
    return open_choices if pinned is None else (pinned,)


def _tensor_sizes(job: PlanRequest) -> list[int]:
    """Divisors of the heads within a node, and twice a node's GPUs for one that fits in no other way."""
    most = job.hardware.node_gpus * 2
    return [size for size in divisors(job.shape.model.heads) if size <= most and job.gpus % size == 0]


def _sequence_parallel(job: PlanRequest, tensor: int) -> bool:
    if tensor == 1:
        return False
    if job.pins.sequence_parallel is not None:
        return job.pins.sequence_parallel
    return job.software.name != "megatron-2021" and job.shape.sequence_length % tensor == 0


def _shards(data: int, inner: int, node: int, pins: FixedChoices, software: Framework) -> list[int]:
    """Sizes of the group that shares one copy of the state: all, one node's ranks, none; every divisor when wide."""
    if software.data_parallel != "fsdp":
        return [1]
    if pins.shard is not None:
        return [pins.shard] if data % pins.shard == 0 else []
    if pins.replicate is not None:
        return [data // pins.replicate] if data % pins.replicate == 0 else []
    if pins.wide:
        return divisors(data)
    local = max(1, node // inner)
    sizes = {1, data, local, 8 * local, data // 2}
    return sorted(size for size in sizes if size and data % size == 0)


def _schedules(pipeline: int, layers: int, pins: FixedChoices, software: Framework) -> list[tuple[Schedule, int]]:
    """gpipe never beats 1f1b, so it is tried only when asked for."""
    if pipeline == 1:
        return [("1f1b", 1)]
    names: Sequence[Schedule] = (pins.schedule,) if pins.schedule else software.schedules
    if not pins.schedule and pins.virtual:
        names = ("1f1b",) if pins.virtual == 1 else ("interleaved",)
    found: list[tuple[Schedule, int]] = []
    for name in names:
        usual = STAGES_PER_RANK.get(name)
        most = min(MOST_STAGES_A_RANK, layers // pipeline)
        open_virtual = [v for v in range(2, most + 1) if layers % (pipeline * v) == 0] or ([2] if most >= 2 else [])
        virtuals = [usual] if usual else _choices(pins.virtual, open_virtual)
        found += [(name, virtual) for virtual in virtuals if virtual * pipeline <= layers]
    return found


def _micro_batches(share: int, pins: FixedChoices) -> list[int]:
    sizes = divisors(share) if pins.wide else MICRO_BATCHES
    return [size for size in sizes if share % size == 0 and size <= 64] or [1]
