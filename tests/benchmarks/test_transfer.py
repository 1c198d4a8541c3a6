"""Best rates of losses made by hand, and how far they move over sizes; pairs that a model could copy."""

import math

import numpy as np
import pytest
from copying import repeated
from transfer import Shape, best_rate, figure, grid_of_rates, measure, shape, slope_per_doubling


def test_the_best_rate_is_the_least_of_the_parabola() -> None:
    assert best_rate({0.5: 1.25, 1.0: 1.0, 2.0: 1.75}) == pytest.approx(-0.25)
    assert best_rate({1.0: 3.0, 2.0: 2.0, 4.0: 3.0}) == pytest.approx(1)
    assert best_rate({0.5: 1.0, 1.0: 2.0, 2.0: 2.5}) == -1  # opens downwards


def test_the_grid_grows_until_its_ends_are_not_best() -> None:
    grid = grid_of_rates(lambda rate: (math.log2(rate) - 3) ** 2, 1.0)
    assert list(grid) == [0.5, 1, 2, 4, 8, 16]
    assert list(grid_of_rates(lambda rate: math.log2(rate) ** 2, 1.0)) == [0.5, 1, 2]


def test_a_best_rate_that_falls_by_half_a_step_a_doubling_moves_so_far() -> None:
    def loss(size: Shape, rate: float, seed: int) -> float:
        return 2 + 0.1 * (math.log2(rate) + 0.5 * math.log2(size.width / 24)) ** 2

    measured = measure(loss, [shape(24 * 2**doublings, 2) for doublings in range(4)], (1, 2))
    assert [part.best_rates for part in measured] == [pytest.approx([-0.5 * doublings] * 2) for doublings in range(4)]
    moved = figure(measured, "made", "width")
    assert moved.ours == pytest.approx(1.5) and moved.ratio == pytest.approx(1 / 1.5)
    assert "-0.50 +- 0.00 a doubling" in moved.unit


def test_the_slope_has_students_interval() -> None:
    """Points (0, 0.1), (0, -0.1), (1, 0.1), (1, -0.1): slope 0, standard error sqrt(0.04 / 2 / 1)."""
    slope, half = slope_per_doubling([1, 2], [[0.1, -0.1], [0.1, -0.1]])
    assert slope == pytest.approx(0) and half == pytest.approx(4.303 * 0.02**0.5, rel=1e-3)


def test_a_pair_is_repeated_where_it_stood_earlier_in_its_own_sample() -> None:
    assert repeated(np.array([[1, 2, 3, 1, 2, 2], [1, 2, 2, 2, 1, 2]])).tolist() == [
        [False, False, False, True, False],
        [False, False, True, False, True],
    ]
