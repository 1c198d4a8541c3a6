"""The plot of scores over a training run."""

import math

import numpy as np
import pytest

from gristmill.evaluation.results.compare import curve_svg, noise_markdown, score_noise


def test_the_same_points_give_the_same_picture():
    points = [
        {"step": step, "tokens": step * 1000, "task": task, "metric": "acc", "score": 0.3, "error": 0.1, "chance": 0.25}
        for step in (1, 2)
        for task in ("a", "b")
    ]
    first = curve_svg(points)
    assert first == curve_svg(points)
    assert first.count('id="axes_') == 2 and "<script" not in first
    assert curve_svg([{**point, "tokens": None, "chance": None, "error": None} for point in points]) != first


# Noise over the last checkpoints, and the smallest difference that it lets one see.


def points(scores, task="quiz"):
    return [{"task": task, "metric": "acc", "score": score, "error": 0.02} for score in scores]


def test_by_hand():
    """Of 0, .1, .2, .3, .4, .5, .52, .54, .56, .58 the last five count: their mean is .54, their standard deviation
    sqrt((.04**2 + .02**2 + 0 + .02**2 + .04**2) / 4) = .0316."""
    (found,) = score_noise(points([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.52, 0.54, 0.56, 0.58]))
    assert found.noise == pytest.approx(math.sqrt(0.004 / 4)) and found.checkpoints == 5
    assert found.detectable == pytest.approx(2.8016 * math.sqrt(2) * found.noise, rel=1e-4)
    assert noise_markdown([found]).splitlines()[2] == "| quiz | acc | 0.5800 | 0.0200 | 0.0316 | 5 | 0.1253 |"


def test_two_checkpoints_have_no_noise():
    first, second = score_noise([*points([0.5, 0.6]), *points([0.1] * 6, "other")])
    assert first.noise is None and first.detectable is None
    assert second.noise == 0.0


def test_a_score_that_rises_over_few_checkpoints_is_no_noise():
    """The first half of a curve is never part of it: of five checkpoints two remain, which is too few."""
    (rising,) = score_noise(points([0.1, 0.3, 0.5, 0.7, 0.9]))
    assert rising.checkpoints == 2 and rising.noise is None
    (settled,) = score_noise(points([0.1, 0.3, 0.5, 0.9, 0.9, 0.9]))
    assert settled.noise == 0.0


def test_a_difference_of_that_size_is_found_in_four_of_five_pairs():
    rng = np.random.default_rng(0)
    noise = 0.03
    (known,) = score_noise(points(rng.normal(0.5, noise, 40_000)), last=20_000)
    differences = rng.normal(known.detectable, noise * math.sqrt(2), 20_000)
    found = np.mean(np.abs(differences) > 1.96 * noise * math.sqrt(2))
    assert found == pytest.approx(0.8, abs=0.02)
