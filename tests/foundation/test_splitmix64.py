"""The published generator's first numbers, and the same arithmetic on arrays."""

import numpy as np

from gristmill.foundation.splitmix64 import INCREMENT, mix, mix_array

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
