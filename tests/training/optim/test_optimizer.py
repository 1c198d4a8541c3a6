"""The dynamic loss scale of fp16: halved after an overflow, doubled after 2000 good steps."""

import math

import pytest

from gristmill.training.config.train import RampConfig, ScheduleConfig
from gristmill.training.optim.optimizer import STEPS_BEFORE_DOUBLING, LossScale, batch_tokens_at, learning_rate_factor


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


# Learning rates and batch sizes at chosen steps, by hand.


def factor(tokens: int, **settings: object) -> float:
    return learning_rate_factor(ScheduleConfig(warmup_share=0.1, **settings), tokens, 1000)


def test_warm_up_is_a_line_from_zero() -> None:
    assert [factor(tokens) for tokens in (10, 50, 100)] == [0.1, 0.5, 1.0]


def test_cosine_and_linear() -> None:
    assert factor(550) == pytest.approx(0.1 + 0.9 / 2)  # half-way between warm-up and end
    assert factor(1000) == pytest.approx(0.1)
    assert factor(775, shape="linear", final_ratio=0.0) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("shape", "half"),
    [("linear", 0.5), ("cosine", 0.5), ("one_minus_sqrt", 1 - math.sqrt(0.5)), ("exponential", 0.01**0.5)],
)
def test_wsd_holds_and_falls(shape: str, half: float) -> None:
    settings = {"shape": "wsd", "decay_share": 0.2, "decay_shape": shape, "final_ratio": 0.01}
    assert factor(500, **settings) == factor(800, **settings) == 1.0
    expected = half if shape == "exponential" else 0.01 + 0.99 * half
    assert factor(900, **settings) == pytest.approx(expected)
    assert factor(1000, **settings) == pytest.approx(0.01)


def test_inverse_sqrt_and_constant() -> None:
    assert factor(400, shape="inverse_sqrt") == pytest.approx(0.5)  # sqrt(100 / 400)
    assert factor(999, shape="constant") == 1.0
    shorter = ScheduleConfig(warmup_share=1e-4, shape="inverse_sqrt")  # a tenth of a token counts as one
    assert learning_rate_factor(shorter, 400, 1000) == pytest.approx(1 / 20)


def test_a_run_of_one_token_falls_to_the_end_at_once() -> None:
    assert learning_rate_factor(ScheduleConfig(warmup_share=0.0, final_ratio=0.1), 1, 1) == pytest.approx(0.1)


def test_the_batch_grows_in_equal_steps() -> None:
    ramp = RampConfig(start_tokens=4, increment_tokens=4, over_tokens=90)
    assert [batch_tokens_at(ramp, 16, tokens) for tokens in (0, 29, 30, 60, 89, 90)] == [4, 4, 8, 12, 12, 16]
    assert batch_tokens_at(None, 16, 0) == 16


def test_a_rate_laid_out_for_more_tokens_than_are_trained() -> None:
    """MT-NLG (arXiv 2201.11990, section 3.2): 340 billion planned, 270 trained."""
    longer = ScheduleConfig(over_tokens=340, warmup_share=0.0, final_ratio=0.1)
    assert learning_rate_factor(longer, 270, 270) == learning_rate_factor(ScheduleConfig(warmup_share=0.0), 270, 340)
    assert learning_rate_factor(longer, 270, 270) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 270 / 340)) / 2)
