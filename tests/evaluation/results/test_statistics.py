"""Standard errors and unigram bits per byte, by hand."""

import math

import numpy as np
import pytest

from gristmill.evaluation.results.statistics import mean_error, ratio_error, unigram_bits_per_byte


def test_mean_error_of_three_answers():
    assert mean_error([0, 1, 1]) == pytest.approx(1 / 3)
    assert math.isnan(mean_error([1]))


def test_ratio_error_with_equal_sizes_is_the_error_of_a_mean():
    assert ratio_error([1, 2, 3], [1, 1, 1]) == pytest.approx(1 / math.sqrt(3))
    assert ratio_error([1, 2, 3], [1, 1, 1]) == pytest.approx(mean_error([1, 2, 3]))


def test_ratio_error_agrees_with_the_bootstrap():
    rng = np.random.default_rng(0)
    sizes = rng.integers(100, 5000, 300).astype(float)
    tops = sizes * rng.normal(1.3, 0.2, 300)
    draws = rng.integers(0, 300, (2000, 300))
    bootstrap = (tops[draws].sum(1) / sizes[draws].sum(1)).std(ddof=1)
    assert ratio_error(tops, sizes) == pytest.approx(bootstrap, rel=0.1)


def test_unigram_by_hand():
    """Three and one of four tokens, each counted once more: probabilities 4/6 and 2/6."""
    bits = unigram_bits_per_byte(np.array([3, 1]), [0, 1], num_bytes=2)
    assert bits == pytest.approx((math.log2(6 / 4) + math.log2(6 / 2)) / 2)
