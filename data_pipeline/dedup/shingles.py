"""Shingles of a folded text and their hashes: n words (or characters) in a row, as 64 bits each.

The hash of a shingle, stated so that anyone can compute it (`ShingleHash` does, in Python):
- unit (a word, or a character), as its UTF-8 bytes in little-endian groups of eight, the last padded with zeros:
  h = START; for each group g: h = (h ^ g) * MULTIPLY_GROUP; h ^= h >> 32; at last h *= MULTIPLY_UNIT; h ^= h >> 29;
- shingle of units h1..hn: H = ((h1 * BASE + h2) * BASE + ...) + hn; H ^= H >> 32; H *= MULTIPLY_SHINGLE; H ^= H >> 29,
all modulo 2**64. Constants are odd 64-bit values of high entropy (fractional digits of pi, e and sqrt 2, 3, 5).
Sets of shingles are compared by these 64 bits: for two documents of 10,000 shingles each, the probability that any
two different shingles agree is 1e-11."""

from typing import Any, Literal

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

Unit = Literal["word", "character"]

START = np.uint64(0x243F6A8885A308D3)  # pi
MULTIPLY_GROUP = np.uint64(0xB7E151628AED2A6B)  # e
MULTIPLY_UNIT = np.uint64(0x6A09E667F3BCC909)  # sqrt 2
BASE = np.uint64(0xBB67AE8584CAA73B)  # sqrt 3
MULTIPLY_SHINGLE = np.uint64(0x3C6EF372FE94F82B)  # sqrt 5
MASK = (1 << 64) - 1

LOW_BITS = np.uint64(0x0101010101010101)
HIGH_BITS = np.uint64(0x8080808080808080)
SPACES = np.uint64(0x2020202020202020)
U1, U7, U8, U29, U32, U63 = (np.uint64(n) for n in (1, 7, 8, 29, 32, 63))
ALL_BITS = np.uint64(MASK)
ZERO = np.uint64(0)


class ShingleHash:
    """The hash of one shingle in plain Python: the `hashfunc` that makes datasketch give our signatures.

    Called with the shingle's UTF-8 bytes: words with one space between them, or characters. `bits` of the result:
    the upper 32 (datasketch's default scheme) or all 64 (what exact similarity compares)."""

    def __init__(self, unit: Unit = "word", bits: int = 32):
        self.unit, self.bits = unit, bits

    def __call__(self, shingle: bytes) -> int:
        units = shingle.split(b" ") if self.unit == "word" else [c.encode() for c in shingle.decode()]
        value = 0
        for unit in units:
            value = (value * int(BASE) + _unit_hash_in_python(unit)) & MASK
        value ^= value >> 32
        value = value * int(MULTIPLY_SHINGLE) & MASK
        value ^= value >> 29
        return value >> (64 - self.bits)


def _unit_hash_in_python(unit: bytes) -> int:
    value = int(START)
    for start in range(0, len(unit), 8):
        value = (value ^ int.from_bytes(unit[start : start + 8], "little")) * int(MULTIPLY_GROUP) & MASK
        value ^= value >> 32
    value = value * int(MULTIPLY_UNIT) & MASK
    return value ^ (value >> 29)


def shingles_of(folded: str, ngram: int, unit: Unit = "word") -> list[bytes]:
    """The shingles of a folded text as bytes, in order. A text of fewer units is one shingle; an empty text has none.

    "a b c", 2 -> [b"a b", b"b c"]; "a", 2 -> [b"a"]; "" -> []."""
    units = folded.split() if unit == "word" else list(folded)
    joint = " " if unit == "word" else ""
    count = max(len(units) - ngram + 1, 1 if units else 0)
    return [joint.join(units[i : i + ngram]).encode() for i in range(count)]


def _load64(typing_context, array, index):
    """Eight bytes of a uint8 array from `index` on as one little-endian uint64, aligned or not, unchecked."""

    def generate(context, builder, signature, arguments):
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        loaded = builder.load(address)
        loaded.align = 1
        return loaded

    return types.uint64(array, types.int64), generate


load64: Any = intrinsic(_load64)


def _trailing_zeros(typing_context, value):
    """The number of zero bits below the lowest set bit of a uint64; 64 for 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


trailing_zeros: Any = intrinsic(_trailing_zeros)


@numba.njit(cache=True, nogil=True)
def word_hashes(folded, start, stop, out):
    """The hashes of the words in folded[start:stop], each of which ends with a space, into out; returns how many.

    Reads up to eight bytes past `stop`. Needs room for (stop - start) / 2 words."""
    count = 0
    value = START
    i = start
    while i < stop:
        group = load64(folded, i)
        differs = group ^ SPACES
        # The lowest set bit marks the first space: exact below and at it (borrows only run upwards).
        spaces = (differs - LOW_BITS) & ~differs & HIGH_BITS
        if spaces == ZERO:
            value = (value ^ group) * MULTIPLY_GROUP
            value ^= value >> U32
            i += 8
            continue
        length = trailing_zeros(spaces) >> np.uint64(3)
        if length > ZERO:
            value = (value ^ (group & (ALL_BITS >> (np.uint64(64) - (length << np.uint64(3)))))) * MULTIPLY_GROUP
            value ^= value >> U32
        value *= MULTIPLY_UNIT
        out[count] = value ^ (value >> U29)
        count += 1
        value = START
        i += np.int64(length) + 1
    return count


@numba.njit(cache=True, nogil=True)
def character_hashes(folded, start, stop, out):
    """The hashes of the characters in folded[start:stop] but for the last space, into out; returns how many."""
    count = 0
    i = start
    while i < stop - 1:
        byte = folded[i]
        length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        group = load64(folded, i) & (ALL_BITS >> np.uint64(64 - 8 * length))
        value = (START ^ group) * MULTIPLY_GROUP
        value = (value ^ (value >> U32)) * MULTIPLY_UNIT
        out[count] = value ^ (value >> U29)
        count += 1
        i += length
    return count


@numba.njit(cache=True, nogil=True)
def shingle_hashes(units, count, ngram, out):
    """The 64-bit hashes of the shingles of units[:count], in order, into out; returns how many."""
    if count == 0:
        return 0
    width = min(count, ngram)
    drop = np.uint64(1)
    value = ZERO
    for i in range(width):
        value = value * BASE + units[i]
        drop *= BASE
    out[0] = mixed(value)
    for i in range(width, count):
        value = value * BASE + units[i] - units[i - width] * drop
        out[i - width + 1] = mixed(value)
    return count - width + 1


@numba.njit(cache=True, nogil=True, inline="always")
def mixed(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> U32)) * MULTIPLY_SHINGLE
    return value ^ (value >> U29)
