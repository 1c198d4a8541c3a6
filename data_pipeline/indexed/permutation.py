"""Keyed permutations computed in place: position i of a shuffled order, without the order.

A generalised Feistel network with cycle walking (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
methods 2 and 3): numbers below `size` are written in two digits of base ceil(sqrt(size)); each round swaps the digits
and adds a keyed hash of one to the other, which is a bijection of the square; a result outside [0, size) goes through
the network again until it falls inside."""

import hashlib
import math

import numpy as np

from gristmill.foundation.splitmix64 import INCREMENT, mix, mix_array

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

    def whole(self) -> np.ndarray:
        """int64[size]: every value in order."""
        return self.many(np.arange(self.size, dtype=np.int64))

    def many(self, indices: np.ndarray) -> np.ndarray:
        """int64 of the same shape: the values at these positions, by the same arithmetic on arrays."""
        values = indices.astype(np.uint64)
        outside = np.arange(len(values))
        while len(outside):
            values[outside] = self._once(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _once(self, values: np.ndarray) -> np.ndarray:
        side = np.uint64(self._side)
        left: np.ndarray = values // side
        right: np.ndarray = values % side
        for key in self._keys:
            left, right = right, (left + mix_array(right ^ np.uint64(key)) % side) % side
        return left * side + right
