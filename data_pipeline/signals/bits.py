"""Bit masks of blocks of 64 UTF-8 bytes (one bit per byte), and small functions that read bytes.

Blocks may reach behind a text, so buffer.PADDING bytes must follow the last one."""

from typing import Any, NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.intrinsics import (
    add_16,
    bytes_within,
    folded_product,
    load64,
    ones,
    trailing_zeros,
)
from gristmill.foundation.cached_njit import cached_njit

BLOCK = 64
ZERO, ONE = np.uint64(0), np.uint64(1)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
TOP = np.uint64(63)
NEWLINE = 0x0A
# Fractional digits of the golden ratio and of pi. The second begins with a byte that no UTF-8 text contains, so no
# group of text gives a factor of 0.
LENGTH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
GROUP_MIX = np.uint64(0x243F6A8885A308FF)


class Span(NamedTuple):
    """text[start:end] inside a kernel. text, flags: pointers to the buffer and to the character table."""

    text: Any
    start: Any
    end: Any
    flags: Any


@cached_njit(nogil=True, forceinline=True)
def below(count):
    """The mask of the first `count` bytes; none for 0 or less, all for 64 or more."""
    if count >= BLOCK:
        return ALL
    return (ONE << np.uint64(count)) - ONE if count > 0 else ZERO


@cached_njit(nogil=True, forceinline=True)
def first_bit(mask):
    """Index of the lowest set bit; 64 if there is none."""
    return np.int64(trailing_zeros(mask))


@cached_njit(nogil=True, forceinline=True)
def without_first(mask):
    return mask & (mask - ONE)


@cached_njit(nogil=True, forceinline=True)
def bytes_below(count):
    """Eight bytes of which the first `count` (0 to 8) have all bits set."""
    return ALL >> np.uint64(64 - 8 * count) if count else ZERO


@cached_njit(nogil=True, forceinline=True)
def find_newline(text, start, end):
    """Index of the first newline in text[start:end]; end if there is none."""
    at = start
    while at < end:
        marks = bytes_within(text, at, NEWLINE, 1)
        if marks != ZERO:
            return min(at + first_bit(marks), end)
        at += BLOCK
    return end


@cached_njit(nogil=True, forceinline=True)
def count_chars(text, start, end):
    """Number of characters in text[start:end]: of bytes that are no continuation bytes."""
    chars = ZERO
    for at in range(start, end, BLOCK):
        chars += ones(~bytes_within(text, at, 0x80, 0x40) & below(end - at))
    return np.int64(chars)


@cached_njit(nogil=True, forceinline=True)
def hash_bytes(text, start, end):
    """A 64-bit hash of text[start:end]. Reads up to sixteen bytes past `end`."""
    left = end - start
    value = np.uint64(left) * LENGTH_FACTOR
    while left > 16:
        value = folded_product(load64(text, start) ^ GROUP_MIX, load64(text, start + 8) ^ value)
        start += 16
        left -= 16
    # no branch on whether a word has more than eight bytes, which the processor would guess wrong for one in six
    first = load64(text, start) & bytes_below(min(left, 8))
    second = load64(text, start + 8) & bytes_below(max(left - 8, 0))
    return folded_product(first ^ GROUP_MIX, second ^ value) if left > 0 else value


@cached_njit(nogil=True, forceinline=True)
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


@cached_njit(nogil=True, forceinline=True)
def encode(code, out, put):
    """Write a code point as UTF-8; returns where the next may be written."""
    if code < 0x80:
        out[put] = code
        return put + 1
    if code < 0x800:
        out[put], out[put + 1] = 0xC0 | code >> 6, 0x80 | code & 0x3F
        return put + 2
    if code < 0x10000:
        out[put], out[put + 1], out[put + 2] = 0xE0 | code >> 12, 0x80 | code >> 6 & 0x3F, 0x80 | code & 0x3F
        return put + 3
    out[put], out[put + 1] = 0xF0 | code >> 18, 0x80 | code >> 12 & 0x3F
    out[put + 2], out[put + 3] = 0x80 | code >> 6 & 0x3F, 0x80 | code & 0x3F
    return put + 4


@cached_njit(nogil=True, forceinline=True)
def character_start(text, at):
    """Start of the character that contains the byte at `at`."""
    while text[at] & 0xC0 == 0x80:
        at -= 1
    return at


@cached_njit(nogil=True, forceinline=True)
def skip_space(text, start, end, flags, space):
    """Start of the first character without the flag `space`; end if there is none."""
    while start < end:
        byte = text[start]
        if 0x20 < byte < 0x80:
            return start
        code, size = decode(text, start)
        if not flags[code] & space:
            return start
        start += size
    return end


@cached_njit(nogil=True, forceinline=True)
def strip_end(text, start, end, flags, space):
    """End of the last character without the flag `space`; start if there is none."""
    while end > start:
        byte = text[end - 1]
        if 0x20 < byte < 0x80:
            return end
        at = character_start(text, end - 1)
        code, _ = decode(text, at)
        if not flags[code] & space:
            return end
        end = at
    return start


@cached_njit(nogil=True, forceinline=True)
def add_floats(total, index, values, start, count):
    """total[index : index + count] += values[start : start + count] of float32."""
    done = 0
    while done + 16 <= count:
        add_16(total, index + done, values, start + done)
        done += 16
    while done < count:
        total[index + done] += values[start + done]
        done += 1
