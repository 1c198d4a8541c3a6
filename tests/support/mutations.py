"""Seeded mutations of bytes for the fuzz tests: each is a pure function of (content, rng)."""

from collections.abc import Callable, Iterator

import numpy as np

Mutation = Callable[[bytes, np.random.Generator], bytes]

# Bounds of the signed and unsigned types that lengths, counts and offsets are stored in, and their neighbours.
INTEGERS = sorted(
    {value + step for bits in (7, 8, 15, 16, 31, 32, 63) for value in (2**bits, -(2**bits)) for step in (-1, 0, 1)}
    | {-2, -1, 0, 1, 2, 2**64 - 1}
)
WIDTHS = (1, 2, 4, 8)
LONGEST_RANGE = 64  # bytes that one mutation deletes, repeats or inserts, at most


def flip_bit(content: bytes, rng: np.random.Generator) -> bytes:
    """One bit is the other one. Empty content stays empty, here and in set_byte, delete, truncate and repeat."""
    changed = bytearray(content)
    if changed:
        changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def set_byte(content: bytes, rng: np.random.Generator) -> bytes:
    """One byte has a random value, which may be its own."""
    changed = bytearray(content)
    if changed:
        changed[rng.integers(len(changed))] = int(rng.integers(256))
    return bytes(changed)


def set_integer(content: bytes, rng: np.random.Generator) -> bytes:
    """1, 2, 4 or 8 neighbouring bytes hold a number at the edge of a type, in either byte order."""
    width = WIDTHS[rng.integers(len(WIDTHS))]
    value = INTEGERS[rng.integers(len(INTEGERS))] % (1 << 8 * width)
    order = ("little", "big")[rng.integers(2)]
    if len(content) < width:
        return content
    start = int(rng.integers(len(content) - width + 1))
    return content[:start] + value.to_bytes(width, order) + content[start + width :]


def truncate(content: bytes, rng: np.random.Generator) -> bytes:
    """The content ends before its last byte, maybe at once."""
    return content[: rng.integers(len(content))] if content else content


def delete_range(content: bytes, rng: np.random.Generator) -> bytes:
    """1 to LONGEST_RANGE bytes are gone."""
    start, end = _range(content, rng)
    return content[:start] + content[end:]


def duplicate_range(content: bytes, rng: np.random.Generator) -> bytes:
    """1 to LONGEST_RANGE bytes stand there twice."""
    start, end = _range(content, rng)
    return content[:end] + content[start:end] + content[end:]


def insert(content: bytes, rng: np.random.Generator) -> bytes:
    """1 to LONGEST_RANGE random bytes stand somewhere between the others, or at an end."""
    start = int(rng.integers(len(content) + 1))
    return content[:start] + rng.bytes(int(rng.integers(1, LONGEST_RANGE + 1))) + content[start:]


MUTATIONS: tuple[Mutation, ...] = (
    flip_bit,
    set_byte,
    set_integer,
    truncate,
    delete_range,
    duplicate_range,
    insert,
)


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    """One mutation in half of the cases, else two to four in turn, so that a second fault may hide behind a first."""
    count = 1 if rng.random() < 0.5 else int(rng.integers(2, 5))
    for _ in range(count):
        content = MUTATIONS[rng.integers(len(MUTATIONS))](content, rng)
    return content


def mutations(content: bytes, count: int, seed: int) -> Iterator[tuple[int, bytes]]:
    """(number, mutant) for 0 to count - 1; mutant n depends on (content, seed, n) alone, so a failure runs alone."""
    for number in range(count):
        yield number, mutate(content, np.random.default_rng([seed, number]))


def _range(content: bytes, rng: np.random.Generator) -> tuple[int, int]:
    if not content:
        return 0, 0
    start = int(rng.integers(len(content)))
    return start, min(len(content), start + int(rng.integers(1, LONGEST_RANGE + 1)))
