"""SipHash-2-4 with 128 bits of output, of many values of 16 bytes at a time (Aumasson and Bernstein 2012).

A keyed pseudorandom function: without the key nothing can be looked up in a table of digests."""

import numpy as np

VALUE_BYTES = 16
LENGTH_WORD = np.uint64(VALUE_BYTES << 56)  # the last word of a message of 16 bytes
INITIAL = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)


def keyed_digests(values: np.ndarray, key: bytes) -> np.ndarray:
    """uint8[N, 16]: the digest of each row of uint8[N, 16] with a key of 16 bytes."""
    words = np.ascontiguousarray(values, np.uint8).view("<u8").astype(np.uint64)
    low, high = (np.uint64(int.from_bytes(key[start : start + 8], "little")) for start in (0, 8))
    keys = (low, high ^ np.uint64(0xEE), low, high)
    state = [np.full(len(words), np.uint64(initial) ^ part) for initial, part in zip(INITIAL, keys, strict=True)]
    for word in (words[:, 0], words[:, 1], np.full(len(words), LENGTH_WORD)):
        state[3] ^= word
        _rounds(state, 2)
        state[0] ^= word
    digests = np.empty((len(words), 2), "<u8")
    for place, constant in enumerate((0xEE, 0xDD)):
        state[2 - place] ^= np.uint64(constant)
        _rounds(state, 4)
        digests[:, place] = state[0] ^ state[1] ^ state[2] ^ state[3]
    return digests.view(np.uint8).reshape(-1, VALUE_BYTES)


def _rounds(state: list[np.ndarray], count: int) -> None:
    v0, v1, v2, v3 = state
    for _ in range(count):
        v0 = v0 + v1
        v1 = _rotated(v1, 13) ^ v0
        v0 = _rotated(v0, 32)
        v2 = v2 + v3
        v3 = _rotated(v3, 16) ^ v2
        v0 = v0 + v3
        v3 = _rotated(v3, 21) ^ v0
        v2 = v2 + v1
        v1 = _rotated(v1, 17) ^ v2
        v2 = _rotated(v2, 32)
    state[:] = v0, v1, v2, v3


def _rotated(values: np.ndarray, bits: int) -> np.ndarray:
    return values << np.uint64(bits) | values >> np.uint64(64 - bits)
