"""Exact shares in every block, no drift, and the same from any place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.indexed.draws import Blend, Schedule, largest_remainder, round_counts

WEIGHTS = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=12)


def test_largest_remainder_worked_by_hand():
    assert largest_remainder([0.5, 0.3, 0.2], 4) == [2, 1, 1]
    assert largest_remainder([1, 1, 1], 4) == [2, 1, 1]
    assert largest_remainder([7, 3], 10) == [7, 3]


def test_a_round_worked_by_hand():
    assert round_counts([0.7, 0.3], 1, 4).tolist() == [[1, 0], [1, 0], [1, 0], [0, 1]]
    assert round_counts([0.625, 0.375], 4, 2).tolist() == [[3, 1], [2, 2]]


@given(weights=WEIGHTS, block=st.integers(1, 200))
def test_a_block_is_off_its_share_by_less_than_one_and_a_round_too(weights, block):
    counts = round_counts(weights, block, 64)
    shares = np.array(weights) / sum(weights)
    assert (counts.sum(axis=1) == block).all()
    # The weights of the round are rounded first: half a sample more at most, spread over 64 blocks.
    assert np.abs(counts - block * shares).max() < 1 + 1 / 64
    assert np.abs(counts.sum(axis=0) - 64 * block * shares).max() < 1


@given(weights=WEIGHTS, block=st.integers(1, 40), slots=st.integers(0, 500))
def test_every_source_is_counted_up_without_gaps(weights, block, slots):
    blend = Blend(weights, block, key=5)
    seen = [[] for _ in weights]
    for slot in range(slots):
        source, ordinal = blend.locate(slot)
        seen[source].append(ordinal)
    assert blend.drawn(slots).tolist() == [len(ordinals) for ordinals in seen]
    assert all(ordinals == list(range(len(ordinals))) for ordinals in seen)


def test_any_slot_can_be_asked_for_first():
    forward = Blend([0.6, 0.4], 16, key=3)
    there = [forward.locate(slot) for slot in range(500)]
    assert [Blend([0.6, 0.4], 16, key=3).locate(slot) for slot in (499, 0, 77)] == [there[499], there[0], there[77]]
    assert [Blend([0.6, 0.4], 16, key=4).locate(slot) for slot in range(500)] != there


def test_phases_go_on_where_the_last_one_stopped():
    schedule = Schedule(["a", "b"], [(0, {"a": 3, "b": 1}), (10, {"b": 1}), (30, {"a": 1, "b": 1})], 4, key=1)
    located = [schedule.locate(k) for k in range(60)]
    for source in (0, 1):
        ordinals = sorted(ordinal for owner, ordinal in located if owner == source)
        assert ordinals == list(range(len(ordinals)))
    assert {source for source, _ in located[10:30]} == {1}
    assert schedule.drawn(60).tolist() == [sum(owner == s for owner, _ in located) for s in (0, 1)]


@pytest.mark.parametrize("num_samples", [0, 1, 9, 10, 11, 31, 60])
def test_what_is_drawn_is_counted_without_drawing(num_samples):
    schedule = Schedule(["a", "b"], [(0, {"a": 3, "b": 1}), (10, {"a": 1, "b": 3})], 4, key=1)
    owners = [schedule.locate(k)[0] for k in range(num_samples)]
    assert schedule.drawn(num_samples).tolist() == [owners.count(0), owners.count(1)]
