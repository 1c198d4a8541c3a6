"""Learning rates and batch sizes at chosen steps, by hand."""

import math

import pytest

from gristmill.training.optim.schedule import batch_tokens_at, learning_rate_factor
from gristmill.training.optimizer_config import RampConfig, ScheduleConfig


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


def test_the_batch_grows_in_equal_steps() -> None:
    ramp = RampConfig(start_tokens=4, increment_tokens=4, over_tokens=90)
    assert [batch_tokens_at(ramp, 16, tokens) for tokens in (0, 29, 30, 60, 89, 90)] == [4, 4, 8, 12, 12, 16]
    assert batch_tokens_at(None, 16, 0) == 16


def test_a_rate_laid_out_for_more_tokens_than_are_trained() -> None:
    """MT-NLG (arXiv 2201.11990, section 3.2): 340 billion planned, 270 trained."""
    longer = ScheduleConfig(over_tokens=340, warmup_share=0.0, final_ratio=0.1)
    assert learning_rate_factor(longer, 270, 270) == learning_rate_factor(ScheduleConfig(warmup_share=0.0), 270, 340)
    assert learning_rate_factor(longer, 270, 270) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 270 / 340)) / 2)
