"""Keyed permutations computed in place: position i of a shuffled order, without the order.

A generalized Feistel network with cycle walking (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
methods 2 and 3): numbers below `size` are written in two digits of base ceil(sqrt(size)); each round swaps the digits
and adds a keyed hash of one to the other, which is a bijection of the square; a result outside [0, size) goes through
the network again until it falls inside."""

import hashlib
import math

import numpy as np

from gristmill.foundation.fingerprint import INCREMENT, MULTIPLIER_1, MULTIPLIER_2, mix
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Luby and Rackoff need 4 rounds for large domains; small ones (a few documents) mix well from 6 on.
ROUNDS = 6

_MASK = (1 << 64) - 1


def key_of(*purpose: int | str) -> int:
    """64 bits that depend on every word of the purpose: key_of(1234, "samples", "books", 0)."""
    words = "\x1f".join(f"{type(word).__name__}:{word}" for word in purpose)
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little")


class Permutation:
    """A bijection of range(size), a pure function of (size, key); constant memory, a few microseconds a value.

    Permutation(5, key_of("doc"))(i) for i in 0..4 gives each of 0..4 once."""

    def __init__(self, size: int, key: int):
        if size < 1:
            raise ValueError(f"a permutation of {size} things; the size is 1 or more")
        self.size = size
        self._side = math.isqrt(size - 1) + 1  # ceil(sqrt(size)), exact for any integer
        self._keys = [mix((key + (round_index + 1) * INCREMENT) & _MASK) for round_index in range(ROUNDS)]

    def __call__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"position {index} of a permutation of {self.size}")
        side = self._side
        value = index
        while True:
            left, right = divmod(value, side)
            for key in self._keys:
                left, right = right, (left + mix(right ^ key)) % side
            value = left * side + right
            if value < self.size:
                return value

    def inverse(self, value: int) -> int:
        """The position of this value: the rounds backwards, with the same cycle walking."""
        if not 0 <= value < self.size:
            raise IndexError(f"value {value} of a permutation of {self.size}")
        side = self._side
        index = value
        while True:
            left, right = divmod(index, side)
            for key in reversed(self._keys):
                left, right = (right - mix(left ^ key)) % side, left
            index = left * side + right
            if index < self.size:
                return index

    def whole(self) -> np.ndarray:
        """int64[size]: every value in order."""
        return self.many(np.arange(self.size, dtype=np.int64))

    def many(self, indices: np.ndarray) -> np.ndarray:
        """int64 of the same shape: the values at these positions, by the same arithmetic on arrays."""
        values = np.empty(indices.shape, np.int64)
        _permute(indices, np.uint64(self.size), np.uint64(self._side), np.array(self._keys, np.uint64), values)
        return values


@cached_njit(forceinline=True)
def _mix(word):
    """splitmix64.mix of a uint64."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return word ^ (word >> np.uint64(31))


@cached_njit()
def _permute(indices, size, side, keys, values):
    for place in range(len(indices)):
        value = np.uint64(indices[place])
        while True:
            left, right = value // side, value % side
            for key in keys:
                left, right = right, (left + _mix(right ^ key) % side) % side
            value = left * side + right
            if value < size:
                break
        values[place] = value
