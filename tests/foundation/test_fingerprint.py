import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.foundation.fingerprint import INCREMENT, canonical_json, differing_fields, fingerprint, mix, mix_array

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("aé☃"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=10,
)


def test_worked_example():
    assert canonical_json({"b": 1, "a": [True, "é"]}) == '{"a":[true,"é"],"b":1}'.encode()


@given(st.dictionaries(st.text("abc"), JSON))
def test_order_of_keys_leaves_no_trace(value):
    assert fingerprint(dict(reversed(value.items()))) == fingerprint(value)


@pytest.mark.parametrize("value", [{1: "x"}, {"a": {1, 2}}, {"a": object()}])
def test_what_has_no_one_form_is_refused(value):
    with pytest.raises(TypeError, match="value"):
        fingerprint(value)


def test_nan_is_refused():
    with pytest.raises(ValueError, match="nan"):
        canonical_json({"a": math.nan})


def test_differing_fields_are_named():
    old = {"near_dedup": {"rows": 8, "bands": 16}, "filters": ["a", "b"]}
    new = {"near_dedup": {"rows": 4, "bands": 16}, "filters": ["a", "c"]}
    assert differing_fields(old, new) == ['filters.1: "b" -> "c"', "near_dedup.rows: 8 -> 4"]


# The published generator's first numbers, and the same arithmetic on arrays.

# The first five outputs of splitmix64.c (Vigna, prng.di.unimi.it) from the seed 1234567, as Rosetta Code lists them.
SEED = 1234567
EXPECTED = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)


def test_the_first_outputs_of_the_reference_implementation():
    states = [(SEED + (i + 1) * INCREMENT) % 2**64 for i in range(5)]
    assert tuple(mix(state) for state in states) == EXPECTED
    assert tuple(mix_array(np.array(states, np.uint64)).tolist()) == EXPECTED
