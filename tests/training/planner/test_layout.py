"""Bubbles and live micro-batches of the schedules equal a simulation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from gristmill.training.planner.costs.stage_splitting import rank_of_stage
from gristmill.training.planner.layout import bubble_share, live_chunks

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "OVERLAP_F_B": 3.0}


class Operation(NamedTuple):
    kind: str
    stage: int
    micro_batch: int


def torch_order(schedule: str, pipeline: int, virtual: int, microbatches: int) -> list[list[Operation]]:
    """What torch's schedule has each rank do, in order; no processes are needed for that."""
    if schedule == "1f1b":
        return [_one_forward_one_backward(rank, pipeline, microbatches) for rank in range(pipeline)]
    cls = {
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
        "zbv": torch_schedules.ScheduleZBVZeroBubble,
    }[schedule]
    bare: Any = object.__new__(cls)
    bare.pp_group_size, bare.n_local_stages, bare._n_microbatches = pipeline, virtual, microbatches
    bare.number_of_rounds = max(1, microbatches // pipeline)
    bare.microbatches_per_round = microbatches // bare.number_of_rounds
    bare.num_stages = bare._num_stages = pipeline * virtual
    orders = {rank: bare._calculate_single_rank_operations(rank) for rank in range(pipeline)}
    return [[_operation(action) for action in orders[rank] if action is not None] for rank in range(pipeline)]


def _operation(action: Any) -> Operation:
    names = {"FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FORWARD": "F"}
    return Operation(names[action.computation_type.name], action.stage_index, action.microbatch_index)


def _one_forward_one_backward(rank: int, pipeline: int, microbatches: int) -> list[Operation]:
    warm = min(microbatches, pipeline - rank)
    order = [Operation("F", rank, i) for i in range(warm)]
    for i in range(microbatches):
        order.append(Operation("B", rank, i))
        if warm + i < microbatches:
            order.append(Operation("F", rank, warm + i))
    return order


def simulate(orders: Sequence[Sequence[Operation]], stages: int) -> tuple[float, list[int]]:
    """(seconds to the end, most stage-sized activations standing on each rank). Chunks take 1 forward, 2 backward."""
    done: dict[Operation, float] = {}
    clock, place = [0.0] * len(orders), [0] * len(orders)
    live, peak = [0] * len(orders), [0] * len(orders)
    while any(place[r] < len(order) for r, order in enumerate(orders)):
        before = sum(place)
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                operation = order[place[rank]]
                needs = _needs(operation, stages)
                if any(all(one not in done for one in either) for either in needs):
                    break
                ready = max((min(done[one] for one in either if one in done) for either in needs), default=0.0)
                clock[rank] = max(clock[rank], ready) + SECONDS[operation.kind]
                done[operation] = clock[rank]
                live[rank] += (operation.kind == "F") - (operation.kind in ("B", "W"))
                peak[rank] = max(peak[rank], live[rank])
                place[rank] += 1
        assert sum(place) > before, "deadlock"
    return max(clock), peak


def _needs(operation: Operation, stages: int) -> list[tuple[Operation, ...]]:
    """Of each entry, one must be done."""
    kind, stage, micro_batch = operation
    if kind == "F":
        return [(Operation("F", stage - 1, micro_batch),)] if stage else []
    if kind == "W":
        return [(Operation("I", stage, micro_batch),)]
    after = [(Operation("F", stage, micro_batch),)]
    if stage < stages - 1:
        after.append((Operation("B", stage + 1, micro_batch), Operation("I", stage + 1, micro_batch)))
    return after


@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 4), (4, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_bubble_and_live_activations_equal_torchs_schedule(schedule, virtual, pipeline, microbatches):
    orders = torch_order(schedule, pipeline, virtual, microbatches)
    assert all(rank_of_stage(o.stage, pipeline, schedule) == rank for rank, order in enumerate(orders) for o in order)
    seconds, peak = simulate(orders, pipeline * virtual)
    ideal = 3.0 * microbatches * virtual
    assert seconds / ideal - 1 == pytest.approx(bubble_share(schedule, pipeline, virtual, microbatches))
    assert peak == [live_chunks(schedule, pipeline, virtual, microbatches, rank) for rank in range(pipeline)]


@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 4), (4, 4), (4, 8), (4, 16), (8, 16)])
def test_zero_bubble_equals_torchs_schedule_and_holds_no_more_than_1f1b(pipeline, microbatches):
    orders = torch_order("zbv", pipeline, 2, microbatches)
    assert all(rank_of_stage(o.stage, pipeline, "zbv") == rank for rank, order in enumerate(orders) for o in order)
    seconds, peak = simulate(orders, 2 * pipeline)
    ideal = 3.0 * microbatches * 2
    assert seconds / ideal - 1 == pytest.approx(bubble_share("zbv", pipeline, 2, microbatches))
    assert max(peak) <= live_chunks("zbv", pipeline, 2, microbatches, 0)


def test_bubbles_by_hand():
    assert bubble_share("1f1b", 4, 1, 8) == 3 / 8
    assert bubble_share("interleaved", 4, 2, 8) == 3 / 16
    assert bubble_share("1f1b", 1, 1, 8) == 0.0
    assert live_chunks("gpipe", 4, 1, 8, 0) == 8


def test_interleaved_memory_is_the_papers_factor():
    """arXiv 2205.05198, section 4.2.3: 1 + (p-1)/(p v) of the model's layers: 35 ranks, 3 stages each."""
    chunks = live_chunks("interleaved", 35, 3, 280, 0)
    assert chunks / (35 * 3) == 1 + 34 / (35 * 3)
