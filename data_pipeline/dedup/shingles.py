"""Shingles of a folded text and their hashes: n words (or characters) in a row, as 64 bits each.

The hash of a shingle, stated so that anyone can compute it (`ShingleHash` does, in Python):
- unit (a word, or a character), as its UTF-8 bytes in little-endian groups of eight, the last padded with zeros:
  h = START; for each group g: h = (h ^ g) * MULTIPLY_GROUP; h ^= h >> 32; at last h *= MULTIPLY_UNIT; h ^= h >> 29;
- shingle of units h1..hn: H = ((h1 * BASE + h2) * BASE + ...) + hn; H ^= H >> 32; H *= MULTIPLY_SHINGLE; H ^= H >> 29,
all modulo 2**64. Constants are odd 64-bit values of high entropy (fractional digits of pi, e and sqrt 2, 3, 5).
Sets of shingles are compared by these 64 bits: for two documents of 10,000 shingles each, the probability that any
two different shingles agree is 1e-11."""

from typing import Literal

from gristmill.data_pipeline.dedup.kernels import BASE, MULTIPLY_GROUP, MULTIPLY_SHINGLE, MULTIPLY_UNIT, START

Unit = Literal["word", "character"]

MASK = (1 << 64) - 1


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
