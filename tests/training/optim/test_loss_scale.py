"""The dynamic loss scale of fp16: halved after an overflow, doubled after 2000 good steps."""

import math

from gristmill.training.optim.loss_scale import STEPS_BEFORE_DOUBLING, LossScale


def test_starts_at_2_to_the_16_and_halves_after_each_overflow() -> None:
    scale = LossScale(dynamic=True)
    assert scale.value == 65536
    reasons = [scale.skip_reason(norm) for norm in (math.inf, math.nan, 1.0)]
    assert [reason is None for reason in reasons] == [False, False, True]
    assert "32768" in reasons[0] and "16384" in reasons[1] and scale.value == 16384


def test_doubles_after_2000_good_steps_and_an_overflow_starts_the_count_anew() -> None:
    scale = LossScale(dynamic=True)
    for _ in range(STEPS_BEFORE_DOUBLING - 1):
        scale.skip_reason(1.0)
    scale.skip_reason(math.inf)
    for _ in range(STEPS_BEFORE_DOUBLING - 1):
        scale.skip_reason(1.0)
    assert scale.value == 32768
    scale.skip_reason(1.0)
    assert scale.value == 65536


def test_never_falls_below_1() -> None:
    scale = LossScale(dynamic=True)
    for _ in range(16):
        assert scale.skip_reason(math.inf) is not None
    assert scale.value == 1 and scale.skip_reason(math.inf) is None  # left to the guard


def test_other_precisions_have_a_scale_of_1() -> None:
    scale = LossScale(dynamic=False)
    assert scale.skip_reason(math.inf) is None and scale.value == 1


def test_a_restored_scale_doubles_at_the_same_step() -> None:
    scale, again = LossScale(dynamic=True), LossScale(dynamic=True)
    for _ in range(STEPS_BEFORE_DOUBLING - 1):
        scale.skip_reason(1.0)
    again.restore(scale.state())
    again.skip_reason(1.0)
    assert again.value == 131072
