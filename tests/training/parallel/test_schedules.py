"""Simulated schedules: legal, free of deadlock, with the bubble of the formula."""

import pytest

from tests.support.schedule_simulation import actions, simulate

# p ranks, m micro-batches, v stages a rank. A forward pass of a stage takes 1 / v, a backward pass 2 / v.
SHAPES = [(2, 4), (4, 8), (4, 16), (8, 16)]


@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"])
def test_every_micro_batch_goes_down_and_up_once(schedule: str, ranks: int, micro_batches: int) -> None:
    stages = ranks * (1 if schedule in ("gpipe", "1f1b") else 2)
    trace = simulate(actions(schedule, ranks, micro_batches), ranks, stages, micro_batches)
    assert trace.passes == stages * micro_batches


@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
def test_bubbles_are_the_formula(ranks: int, micro_batches: int) -> None:
    """Idle time over useful time is (p - 1) / m, and (p - 1) / (m v) interleaved (arXiv 2104.04473, section 2.2)."""
    for schedule, per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        trace = simulate(actions(schedule, ranks, micro_batches), ranks, ranks * per_rank, micro_batches)
        assert trace.bubble == pytest.approx((ranks - 1) / (micro_batches * per_rank))


@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
def test_zero_bubble_is_below_one_third_of_1f1b(ranks: int, micro_batches: int) -> None:
    zero_bubble = simulate(actions("zbv", ranks, micro_batches), ranks, 2 * ranks, micro_batches)
    plain = simulate(actions("1f1b", ranks, micro_batches), ranks, ranks, micro_batches)
    assert zero_bubble.bubble < plain.bubble / 3 + 1e-9


@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
def test_stages_in_memory_at_the_peak(ranks: int, micro_batches: int) -> None:
    """GPipe holds every micro-batch; 1F1B on rank r at most p - r, whatever their number (section 2.2.1)."""
    assert simulate(actions("gpipe", ranks, micro_batches), ranks, ranks, micro_batches).peak == [micro_batches] * ranks
    peak = simulate(actions("1f1b", ranks, micro_batches), ranks, ranks, micro_batches).peak
    assert peak == [ranks - rank for rank in range(ranks)]
