"""Eight bytes at a time: what a group of UTF-8 bytes says about words and lines, in a few instructions.

A group is a little-endian uint64 of eight bytes; a mark is a group in which the high bit of a byte says yes."""

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from gristmill.data_pipeline.intrinsics import load64, trailing_zeros

HIGH = np.uint64(0x8080808080808080)
LOW = np.uint64(0x0101010101010101)
SEVEN = np.uint64(0x7F7F7F7F7F7F7F7F)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
CASE = np.uint64(0x2020202020202020)
NEWLINES = np.uint64(0x0A0A0A0A0A0A0A0A)
ZERO = np.uint64(0)
# Added to a byte below 0x80, each sets the high bit if the byte is at least ...
FROM_EXCLAMATION = np.uint64(0x5F5F5F5F5F5F5F5F)  # 0x21, the first that is neither space nor control
FROM_A = np.uint64(0x1F1F1F1F1F1F1F1F)
BEYOND_Z = np.uint64(0x0505050505050505)
# Odd constants of MurmurHash3's 64-bit finalizer (Appleby, public domain).
FACTOR = np.uint64(0xFF51AFD7ED558CCD)
LAST_FACTOR = np.uint64(0xC4CEB9FE1A85EC53)
HALF = np.uint64(32)


@intrinsic
def ones(typing_context, value):
    """How many bits of a uint64 are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@numba.njit(cache=True, nogil=True, inline="always")
def every(byte):
    """A group of eight times this byte."""
    return np.uint64(byte) * LOW


@numba.njit(cache=True, nogil=True, inline="always")
def equal(group, eights):
    """Marks of the bytes that are as in `eights`, a group of bytes below 0x80."""
    return ~(((group & SEVEN) ^ eights) + SEVEN) & ~group & HIGH


@numba.njit(cache=True, nogil=True, inline="always")
def between(group, low, beyond):
    """Marks of the bytes from `low` up to and without `beyond`, both below 0x80."""
    seven = group & SEVEN
    return (seven + every(0x80 - low)) & ~(seven + every(0x80 - beyond)) & ~group & HIGH


@numba.njit(cache=True, nogil=True, inline="always")
def letters(group):
    """Marks of A-Z and a-z."""
    folded = (group & SEVEN) | CASE
    return (folded + FROM_A) & ~(folded + BEYOND_Z) & ~group & HIGH


@numba.njit(cache=True, nogil=True, inline="always")
def digits(group):
    """Marks of 0-9."""
    return between(group, 0x30, 0x3A)


@numba.njit(cache=True, nogil=True, inline="always")
def underscores(group):
    """Marks of "_"."""
    return equal(group, every(0x5F))


@numba.njit(cache=True, nogil=True, inline="always")
def space_or_special(group):
    """Marks of bytes up to 0x20 and from 0x80 on: where a run of plain ASCII ends."""
    return (~((group & SEVEN) + FROM_EXCLAMATION) | group) & HIGH


@numba.njit(cache=True, nogil=True, inline="always")
def first_marked(marks):
    """The place, 0 to 7, of the first marked byte; 8 for none."""
    return np.int64(trailing_zeros(marks) >> np.uint64(3))


@numba.njit(cache=True, nogil=True, inline="always")
def bytes_below(count):
    """A group in which the first `count` bytes are ones: 0 to 8."""
    return ALL >> np.uint64(64 - 8 * count) if count else ZERO


@numba.njit(cache=True, nogil=True, inline="always")
def find_newline(text, start, end):
    """The place of the first newline in text[start:end]; end if there is none."""
    at = start
    while at < end:
        differs = load64(text, at) ^ NEWLINES
        marks = (differs - LOW) & ~differs & HIGH  # exact up to the first: borrows only run upwards
        if marks != ZERO:
            return min(at + first_marked(marks), end)
        at += 8
    return end


@numba.njit(cache=True, nogil=True, inline="always")
def hash_bytes(text, start, end):
    """A 64-bit hash of text[start:end], whichever way its ends were found. Reads up to eight bytes past `end`."""
    left = end - start
    value = np.uint64(left) * LAST_FACTOR
    while left >= 8:
        value = (value ^ load64(text, start)) * FACTOR
        value ^= value >> HALF
        start += 8
        left -= 8
    if left > 0:
        value = (value ^ (load64(text, start) & bytes_below(left))) * FACTOR
        value ^= value >> HALF
    value *= LAST_FACTOR
    return value ^ (value >> HALF)


@numba.njit(cache=True, nogil=True, inline="always")
def decode(text, at):
    """(code point, bytes) of the character at `at`; the text is valid UTF-8."""
    first = np.int64(text[at])
    if first < 0x80:
        return first, 1
    second = np.int64(text[at + 1]) & 0x3F
    if first < 0xE0:
        return (first & 0x1F) << 6 | second, 2
    third = np.int64(text[at + 2]) & 0x3F
    if first < 0xF0:
        return (first & 0x0F) << 12 | second << 6 | third, 3
    return (first & 0x07) << 18 | second << 12 | third << 6 | np.int64(text[at + 3]) & 0x3F, 4


@numba.njit(cache=True, nogil=True, inline="always")
def character_start(text, at):
    """Where the character begins that holds the byte at `at`."""
    while text[at] & 0xC0 == 0x80:
        at -= 1
    return at
