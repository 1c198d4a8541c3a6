"""Simulate pipeline schedules, given as lists of actions: bubble, live micro-batches, and deadlocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import _Action

from gristmill.training.config.layout import LayoutConfig, Schedule
from gristmill.training.engine.passes import MULTIPLE
from gristmill.training.planner.costs.stage_splitting import stages_of_rank

# Duration of an action in units of a whole rank's forward pass, times its stages: backward is twice forward.
DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@dataclass(frozen=True)
class ScheduleTrace:
    """bubble: idle time over useful time, of the whole pipeline. peak: maximum number of stage activations in memory
    on each rank. passes: forward passes of a stage on a micro-batch. ends: when each work was done."""

    passes: int
    bubble: float
    peak: list[int]
    ends: dict["Work", float]


@dataclass(frozen=True)
class Work:
    """kind: F forward, B whole backward, I backward by inputs, W backward by weights."""

    kind: str
    stage: int
    micro_batch: int


def actions(schedule: Schedule, ranks: int, micro_batches: int, stages_per_rank: int = 2) -> dict[int, list[Work]]:
    """Actions of each rank, in order. For schedules of several stages a rank this is the list that torch runs; GPipe
    and 1F1B are loops in torch, written out here."""
    if schedule == "gpipe":
        return {rank: _in_flight(rank, micro_batches, micro_batches) for rank in range(ranks)}
    if schedule == "1f1b":
        return {rank: _in_flight(rank, micro_batches, ranks - rank) for rank in range(ranks)}
    virtual = stages_per_rank if schedule == "interleaved" else 0
    layout = LayoutConfig(pipeline=ranks, pipeline_schedule=schedule, virtual_stages=virtual)
    stages = [_stage(number, 0, layout) for number in stages_of_rank(layout, 0)]
    order = MULTIPLE[schedule](stages, micro_batches, loss_fn=_no_loss).pipeline_order
    return {rank: [work for action in order[rank] if action is not None for work in _works(action)] for rank in order}


def simulate(lists: Mapping[int, Sequence[Work]], ranks: int, stages: int, micro_batches: int) -> ScheduleTrace:
    """Simulates the schedule: each rank does its work in order, as soon as its inputs have arrived. Raises ValueError
    on a deadlock, or on work that is done twice."""
    done: dict[Work, float] = {}
    clock, next_index, held, peak = [0.0] * ranks, [0] * ranks, [0] * ranks, [0] * ranks
    left = sum(len(works) for works in lists.values())
    while left:
        moved = False
        for rank in range(ranks):
            while next_index[rank] < len(lists[rank]):
                work = lists[rank][next_index[rank]]
                needs = _needs(work, stages)
                if any(need not in done for need in needs):
                    break
                if work in done:
                    raise ValueError(f"rank {rank} does {work} a second time")
                start = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = done[work] = start + DURATIONS[work.kind] * ranks / stages
                if work.kind == "B":
                    done[Work("I", work.stage, work.micro_batch)] = clock[rank]
                held[rank] += {"F": 1, "B": -1, "W": -1}.get(work.kind, 0)
                peak[rank] = max(peak[rank], held[rank])
                next_index[rank] += 1
                left, moved = left - 1, True
        if not moved:
            stuck = {
                rank: lists[rank][next_index[rank]] for rank in range(ranks) if next_index[rank] < len(lists[rank])
            }
            raise ValueError(f"deadlock: {stuck}")
    useful = 3.0 * micro_batches
    passes = sum(work.kind == "F" for work in done)
    return ScheduleTrace(passes, (max(clock) - useful) / useful, peak, done)


def _in_flight(stage: int, micro_batches: int, most: int) -> list[Work]:
    """Forward passes until `most` are in flight, then a backward pass before each further one."""
    most = min(most, micro_batches)
    works = [Work("F", stage, index) for index in range(most)]
    for index in range(micro_batches):
        works.append(Work("B", stage, index))
        if index + most < micro_batches:
            works.append(Work("F", stage, index + most))
    return works


def _needs(work: Work, stages: int) -> list[Work]:
    if work.kind == "F":
        return [Work("F", work.stage - 1, work.micro_batch)] if work.stage else []
    if work.kind == "W":
        return [Work("I", work.stage, work.micro_batch)]
    above = work.stage + 1
    gradient = [] if above == stages else [Work("I", above, work.micro_batch)]
    return [Work("F", work.stage, work.micro_batch), *gradient]


def _works(action: _Action) -> list[Work]:
    """Compute actions only; an overlapped pair becomes two."""
    if action.sub_actions:
        return [work for inner in action.sub_actions for work in _works(inner)]
    kind = action.computation_type.value
    if kind not in DURATIONS or action.microbatch_index is None:
        return []
    return [Work(kind, action.stage_index, action.microbatch_index)]


def _stage(number: int, rank: int, layout: LayoutConfig) -> Any:
    """Stub of a pipeline stage with the attributes that torch's schedules read to build their order."""
    mapping = {stage: r for r in range(layout.pipeline) for stage in stages_of_rank(layout, r)}
    return SimpleNamespace(
        stage_index=number,
        num_stages=layout.num_stages,
        group_size=layout.pipeline,
        group_rank=rank,
        group=None,
        is_first=number == 0,
        is_last=number == layout.num_stages - 1,
        submod=nn.Identity(),
        stage_index_to_group_rank=mapping,
        has_backward=True,
    )


def _no_loss(*_: Any) -> None:
    return None
