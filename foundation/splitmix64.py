"""SplitMix64's increment and finalizer (Steele, Lea and Flood 2014): mixes 64-bit words for hashes and permutations."""

import numpy as np

INCREMENT = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB


def mix(word: int) -> int:
    """The finalizer: every bit of the result depends on every bit of the word. 0 <= word < 2**64."""
    word = ((word ^ (word >> 30)) * MULTIPLIER_1) & _MASK
    word = ((word ^ (word >> 27)) * MULTIPLIER_2) & _MASK
    return word ^ (word >> 31)


def mix_array(words: np.ndarray) -> np.ndarray:
    """`mix` of every element of a uint64 array; the shape stays the same."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return words ^ (words >> np.uint64(31))
