"""JSON strings, numbers and nested values in UTF-8 bytes, for compiled readers.

The bytes of a line end with a line end or with zeros, at which every function stops."""

import numpy as np

from gristmill.data_pipeline.signals.bits import BLOCK, ZERO, below, encode, first_bit
from gristmill.data_pipeline.signals.intrinsics import bytes_within, copy_block
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

PLAIN, NULL, UNCERTAIN = range(3)  # kinds of values: orjson writes them as they stand; null; to be parsed by orjson


def _escapes() -> np.ndarray:
    """uint8[256]: the character of each escape of one letter; 0 for none."""
    table = np.zeros(256, np.uint8)
    for letter, character in zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True):
        table[ord(letter)] = ord(character)
    return table


ESCAPES = _escapes()


@cached_njit(nogil=True, forceinline=True)
def is_null(piece, at):
    return piece[at] == 0x6E and piece[at + 1] == 0x75 and piece[at + 2] == 0x6C and piece[at + 3] == 0x6C


@cached_njit(nogil=True)
def string_end(piece, at):
    """(behind the string that begins at `at`, -1 if there is none; whether it holds escapes)."""
    if piece[at] != 0x22:
        return np.int64(-1), False
    at, is_escaped = np.int64(at + 1), False
    while True:
        marks = bytes_within(piece, at, 0x22, 1) | bytes_within(piece, at, 0x5C, 1) | bytes_within(piece, at, 0, 0x20)
        if marks == ZERO:
            at += BLOCK
            continue
        at += first_bit(marks)
        if piece[at] == 0x22:
            return at + 1, is_escaped
        if piece[at] != 0x5C or piece[at + 1] < 0x20:
            return np.int64(-1), False
        is_escaped = True
        at += 2


@cached_njit(nogil=True)
def copy_string(piece, at, out, put):
    """Writes the string that begins at `at` without its escapes; returns (behind it, -1 if it is invalid or has a lone
    surrogate; where the next may be written). Writes up to a block behind that."""
    at += 1
    while True:
        copy_block(out, put, piece, at)
        marks = bytes_within(piece, at, 0x22, 1) | bytes_within(piece, at, 0x5C, 1) | bytes_within(piece, at, 0, 0x20)
        if marks == ZERO:
            at += BLOCK
            put += BLOCK
            continue
        size = first_bit(marks)
        at += size
        put += size
        if piece[at] == 0x22:
            return at + 1, put
        if piece[at] != 0x5C:
            return np.int64(-1), put
        letter = ESCAPES[piece[at + 1]]
        if letter != 0:
            out[put] = letter
            put += 1
            at += 2
        elif piece[at + 1] == 0x75:
            at, put = _copy_code(piece, at + 2, out, put)
            if at < 0:
                return np.int64(-1), put
        else:
            return np.int64(-1), put


@cached_njit(nogil=True)
def _copy_code(piece, at, out, put):
    r"""Writes the character of an escape \uXXXX, or of two that are a pair of surrogates."""
    code = _four_digits(piece, at)
    at += 4
    if 0xD800 <= code < 0xDC00 and piece[at] == 0x5C and piece[at + 1] == 0x75:
        low = _four_digits(piece, at + 2)
        if 0xDC00 <= low < 0xE000:
            code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00))
            at += 6
    if code < 0 or 0xD800 <= code < 0xE000:
        return np.int64(-1), put
    return at, encode(code, out, put)


@cached_njit(nogil=True)
def _four_digits(piece, at):
    """The value of four hex digits; -1 if they are none."""
    code = np.int64(0)
    for i in range(4):
        byte = np.int64(piece[at + i])
        small = byte | 0x20
        if 0x30 <= byte <= 0x39:
            code = code << 4 | byte - 0x30
        elif 0x61 <= small <= 0x66:
            code = code << 4 | small - 0x57
        else:
            return np.int64(-1)
    return code


@cached_njit(nogil=True)
def value_end(piece, at, end):
    """(behind the value that begins at `at`, -1 for a mistake; its kind). An UNCERTAIN one may still be a mistake."""
    byte = piece[at]
    if byte == 0x22:
        at, is_escaped = string_end(piece, at)
        return at, UNCERTAIN if is_escaped else PLAIN
    if byte == 0x7B or byte == 0x5B:
        return _nested_end(piece, at, end), UNCERTAIN
    first = at
    while at < end and piece[at] > 0x20 and piece[at] != 0x2C and piece[at] != 0x7D and piece[at] != 0x5D:
        at += 1
    if at - first == 4 and is_null(piece, first):
        return at, NULL
    return at if at > first else np.int64(-1), PLAIN if _is_whole_number(piece, first, at) else UNCERTAIN


@cached_njit(nogil=True)
def _is_whole_number(piece, first, stop):
    """Whether orjson writes the number as it stands here."""
    if piece[first] == 0x2D:
        first += 1
        if piece[first] == 0x30:
            return False
    if stop - first < 1 or stop - first > 18 or (piece[first] == 0x30 and stop - first > 1):
        return False
    for at in range(first, stop):  # noqa: SIM110 - numba has no all()
        if not 0x30 <= piece[at] <= 0x39:
            return False
    return True


@cached_njit(nogil=True)
def _nested_end(piece, at, end):
    depth = 0
    while at < end:
        byte = piece[at]
        if byte == 0x22:
            at, _ = string_end(piece, at)
            if at < 0:
                return at
            continue
        if byte == 0x7B or byte == 0x5B:
            depth += 1
        elif byte == 0x7D or byte == 0x5D:
            depth -= 1
        at += 1
        if depth == 0:
            return np.int64(at)
    return np.int64(-1)


@cached_njit(nogil=True)
def is_utf8(text, at, end):
    """Whether the bytes are valid UTF-8 (RFC 3629: no surrogates, none over U+10FFFF, the shortest form)."""
    while at < end:
        if text[at] < 0x80:
            beyond = bytes_within(text, at, 0x80, 0x80) & below(end - at)
            at += BLOCK if beyond == ZERO else first_bit(beyond)
            continue
        first, second = text[at], text[at + 1]
        if first < 0xC2 or second & 0xC0 != 0x80:
            return False
        if first < 0xE0:
            at += 2
        elif first < 0xF0:
            if (first == 0xE0 and second < 0xA0) or (first == 0xED and second > 0x9F) or text[at + 2] & 0xC0 != 0x80:
                return False
            at += 3
        else:
            if first > 0xF4 or (first == 0xF0 and second < 0x90) or (first == 0xF4 and second > 0x8F):
                return False
            if text[at + 2] & 0xC0 != 0x80 or text[at + 3] & 0xC0 != 0x80:
                return False
            at += 4
    return True
