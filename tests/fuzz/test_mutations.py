"""The mutations of the fuzz tests."""

import numpy as np
import pytest

from tests.support.mutations import (
    MUTATIONS,
    delete_range,
    duplicate_range,
    flip_bit,
    insert,
    mutations,
    set_integer,
    truncate,
)

CONTENT = bytes(range(200))


def test_each_does_what_it_is_named_for():
    rng = np.random.default_rng(0)
    flipped = flip_bit(CONTENT, rng)
    assert sum((left ^ right).bit_count() for left, right in zip(CONTENT, flipped, strict=True)) == 1
    assert CONTENT.startswith(truncate(CONTENT, rng))
    assert len(delete_range(CONTENT, rng)) < len(CONTENT) < len(duplicate_range(CONTENT, rng))
    assert len(insert(CONTENT, rng)) > len(CONTENT) == len(set_integer(CONTENT, rng))


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("content", [b"", b"\x00", CONTENT], ids=len)
def test_equal_seeds_give_equal_bytes_for_any_content(mutation, content):
    once = [mutation(content, np.random.default_rng(seed)) for seed in range(20)]
    assert once == [mutation(content, np.random.default_rng(seed)) for seed in range(20)]


def test_a_mutant_depends_on_its_number_alone():
    many = dict(mutations(CONTENT, 50, seed=3))
    assert dict(mutations(CONTENT, 10, seed=3)) == {number: many[number] for number in range(10)}
    assert sum(mutant != CONTENT for mutant in many.values()) > 45
