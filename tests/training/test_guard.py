"""Steps that the guard skips, for losses and norms with known mean and deviation."""

import math

import pytest

from gristmill.foundation.errors import InputError
from gristmill.training.config import GuardConfig
from gristmill.training.guard import MIN_HISTORY, Guard


def guard_with_history(**config: float) -> Guard:
    """Losses alternate between 1 and 3 (mean 2, deviation 1), norms between 10 and 30 (mean 20, deviation 10)."""
    guard = Guard(GuardConfig(**config))
    for step in range(1, MIN_HISTORY + 1):
        assert guard.skip_reason(step, 1.0 + 2 * (step % 2), 10.0 + 20 * (step % 2)) is None
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (4.9, 49.0, None),
        (5.1, 20.0, "loss 5.1 is 3.0 standard deviations above the mean of the last 16 steps"),
        (2.0, 51.0, "gradient norm 51 is 3.0 standard deviations above the mean of the last 16 steps"),
        (-99.0, 0.0, None),  # only values above the mean are outliers
        (math.nan, 20.0, "loss nan, gradient norm 20.0: not finite"),
    ],
)
def test_outliers_are_above_mean_plus_sigmas_deviations(loss: float, norm: float, reason: str | None) -> None:
    assert guard_with_history(sigmas=3).skip_reason(17, loss, norm) == reason


def test_without_sigmas_only_values_that_are_not_finite_are_skipped() -> None:
    guard = guard_with_history()
    assert guard.skip_reason(17, 1e9, 1e9) is None
    assert guard.skip_reason(18, 1.0, math.inf) is not None


def test_a_short_history_has_no_outliers() -> None:
    guard = Guard(GuardConfig(sigmas=3))
    for step in range(1, MIN_HISTORY):
        assert guard.skip_reason(step, 1.0, 1.0) is None
    assert guard.skip_reason(MIN_HISTORY, 100.0, 1.0) is None


def test_skipped_steps_do_not_enter_the_history_and_the_window_slides() -> None:
    guard = guard_with_history(sigmas=3, window=16)
    assert guard.skip_reason(17, 100.0, 20.0) is not None
    assert 100.0 not in guard.losses and len(guard.losses) == 16
    guard.skip_reason(18, 2.5, 20.0)
    assert guard.losses[-1] == 2.5 and len(guard.losses) == 16


def test_consecutive_skips_are_counted_anew_after_a_step_that_is_taken() -> None:
    guard = Guard(GuardConfig(max_consecutive_skips=2))
    for step, loss in ((1, math.inf), (2, math.inf), (3, 1.0), (4, math.inf), (5, math.inf)):
        guard.skip_reason(step, loss, 1.0)
    assert guard.skipped == [1, 2, 4, 5]
    with pytest.raises(InputError, match=r"step 6: .*3 steps in a row were skipped \(train.guard.max_consecutive"):
        guard.skip_reason(6, math.inf, 1.0)


def test_the_state_restores_the_decisions() -> None:
    guard, again = guard_with_history(sigmas=3), Guard(GuardConfig(sigmas=3))
    again.restore(guard.state())
    assert again.skip_reason(17, 5.1, 20.0) == guard.skip_reason(17, 5.1, 20.0) is not None
