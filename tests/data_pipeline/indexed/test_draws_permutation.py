"""A keyed permutation is a bijection of every size, and keys change it."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.indexed.draws import Permutation, key_of


@pytest.mark.parametrize("size", [*range(1, 130), 1000, 4095, 4096, 4097, 65537])
def test_each_value_comes_once(size):
    values = Permutation(size, key_of("test", size)).whole()
    assert np.array_equal(np.sort(values), np.arange(size))


@given(size=st.integers(1, 10**15), key=st.integers(0, 2**64 - 1), place=st.floats(0, 1, exclude_max=True))
def test_one_value_and_many_are_computed_alike(size, key, place):
    permutation = Permutation(size, key)
    index = int(place * size)
    assert permutation(index) == permutation.many(np.array([index]))[0]
    assert 0 <= permutation(index) < size


def test_every_order_of_four_is_about_equally_likely():
    orders = Counter(tuple(Permutation(4, key_of(seed)).whole()) for seed in range(4800))
    assert len(orders) == 24
    assert all(120 < count < 300 for count in orders.values())  # 200 expected, 14 the standard deviation


def test_neighbours_are_torn_apart():
    values = Permutation(10**6, key_of("far")).many(np.arange(1000))
    assert np.abs(np.diff(values)).mean() == pytest.approx(10**6 / 3, rel=0.1)


def test_the_key_depends_on_every_word():
    keys = {key_of(*words) for words in [(1, "a"), ("1", "a"), (1, "b"), (2, "a"), (1, "a", 0), ("a", 1)]}
    assert len(keys) == 6


def test_no_position_outside():
    with pytest.raises(IndexError):
        Permutation(3, 0)(3)
    with pytest.raises(ValueError, match="a permutation of 0 things"):
        Permutation(0, 0)
