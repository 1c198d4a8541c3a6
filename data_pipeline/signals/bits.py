"""Bit masks of blocks of 64 UTF-8 bytes (one bit per byte), and small functions that read bytes.

Blocks may reach behind a text, so buffer.PADDING bytes must follow the last one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.signals.characters import NUM_CODE_POINTS
from gristmill.data_pipeline.signals.intrinsics import (
    LANES,
    add_16,
    bytes_within,
    copy_block,
    copy_lowered,
    folded_product,
    load64,
    ones,
    pointer,
    trailing_zeros,
)
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.foundation.runtime.kernels.kernel_files import cached_array

BLOCK = 64
ADDED_AT_ONCE = 16  # floats of a vector instruction
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
    """total[index : index + count] += values[start : start + count] of float32. total may be float64 where
    count is below ADDED_AT_ONCE."""
    done = 0
    while done + ADDED_AT_ONCE <= count:
        add_16(total, index + done, values, start + done)
        done += ADDED_AT_ONCE
    while done < count:
        total[index + done] += values[start + done]
        done += 1


# Texts as one buffer of bytes, which the kernels read.

PADDING = 96  # bytes behind the last text that kernels may read: a block, and a few behind its last byte


class TextArrays(NamedTuple):
    """A TextBuffer's arrays and the character table, as kernels take them."""

    text: np.ndarray
    offsets: np.ndarray
    flags: np.ndarray


@dataclass(frozen=True)
class TextBuffer:
    """N texts. text: uint8, each text followed by a newline, then PADDING bytes. offsets: int64[N + 1]; text k is
    text[offsets[k] : offsets[k + 1] - 1]. text is read-only, whatever it was made of."""

    text: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", read_only(self.text))

    @classmethod
    def of(cls, texts: Sequence[str]) -> Self:
        return cls(*joined([text.encode() for text in texts]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, k: int) -> bytes:
        return self.text[self.offsets[k] : self.offsets[k + 1] - 1].tobytes()

    def view(self, k: int) -> memoryview:
        return self.text[self.offsets[k] : self.offsets[k + 1] - 1].data

    def strings(self) -> pa.Array:
        """A pyarrow array of strings, from a copy without the newlines."""
        count = len(self)
        offsets = (self.offsets - np.arange(count + 1)).astype(np.int32)
        data = np.empty(int(offsets[-1]) + LANES, np.uint8)
        _copy_texts(self.text, self.offsets, data)
        return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(data))

    def texts(self) -> list[str]:
        raw, ends = self.text.tobytes(), self.offsets.tolist()
        return [raw[ends[k] : ends[k + 1] - 1].decode() for k in range(len(self))]


def read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written to. A kernel is compiled for such arrays and again for others."""
    view = array.view()
    view.flags.writeable = False
    return view


def joined(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(text, offsets) of a TextBuffer."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1, out=offsets[1:])
    return np.frombuffer(b"\n".join([*texts, b"\0" * PADDING]), np.uint8), offsets


def add_newlines(data: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    """Writes the strings data[offsets[k] : offsets[k + 1]] to out, each with a newline behind it."""
    _add_newlines(data, offsets, out)


@cached_njit(nogil=True)
def _copy_texts(text, offsets, out):
    """Writes up to LANES bytes behind the last text."""
    put, source, target = 0, pointer(text, 0), pointer(out, 0)
    for k in range(len(offsets) - 1):
        size = offsets[k + 1] - 1 - offsets[k]
        for done in range(0, size, LANES):  # by blocks, as below
            copy_block(target, put + done, source, offsets[k] + done)
        put += size


@cached_njit(nogil=True)
def _add_newlines(data, offsets, out):
    put, source, target = 0, pointer(data, 0), pointer(out, 0)
    for k in range(len(offsets) - 1):
        at, end = offsets[k], offsets[k + 1]
        while at + LANES <= end:  # by blocks: a slice of numba takes as long as a text of 2 kB
            copy_block(target, put, source, at)
            at += LANES
            put += LANES
        while at < end:  # nothing behind the last string may be read
            out[put] = data[at]
            at += 1
            put += 1
        out[put] = 0x0A
        put += 1


# Texts in lower case, as str.lower writes them.

# U+0130 becomes two characters, U+03A3 depends on those beside it: texts with one of them are lowered in Python.
IRREGULAR = 0x0130, 0x03A3
_LAST_CASED = 0x1FFFF
MAX_GROWTH = 2  # the lower case of a character takes at most 3 bytes for 2 (U+023A)


def lowered(texts: TextBuffer, wanted: np.ndarray) -> TextBuffer:
    """The wanted texts (bool[N]) in lower case; empty ones in the place of the others."""
    count, size = len(texts), int(np.diff(texts.offsets)[wanted].sum())
    out, offsets = np.empty(MAX_GROWTH * size + count + PADDING, np.uint8), np.zeros(count + 1, np.int64)
    is_irregular = np.zeros(count, np.bool_)
    _lower_texts(texts.text, texts.offsets, wanted, _lower_codes(), out, offsets, is_irregular)
    buffer = TextBuffer(out[: int(offsets[-1]) + PADDING], offsets)
    if not is_irregular.any():
        return buffer
    pieces = [texts.raw(k).decode().lower().encode() if is_irregular[k] else buffer.raw(k) for k in range(count)]
    return TextBuffer(*joined(pieces))


@cached_array
def _lower_codes() -> np.ndarray:
    """int32[0x110000]: the lower case of every code point; -1 for the irregular ones."""
    codes_C = np.arange(NUM_CODE_POINTS, dtype=np.int32)
    surrogates = range(0xD800, 0xE000)
    regular = [code for code in range(_LAST_CASED + 1) if code not in IRREGULAR and code not in surrogates]
    codes_C[regular] = np.frombuffer("".join(map(chr, regular)).lower().encode("utf-32-le"), np.int32)
    codes_C[list(IRREGULAR)] = -1
    return codes_C


@cached_njit(nogil=True)
def _lower_texts(text_array, offsets, wanted, codes, out_array, out_offsets, is_irregular):
    text, out = pointer(text_array, 0), pointer(out_array, 0)
    put = np.int64(0)
    for k in range(len(offsets) - 1):
        if wanted[k]:
            stop = _lower_text(text, offsets[k], offsets[k + 1] - 1, codes, out, put)
            is_irregular[k] = stop < 0
            put = put if stop < 0 else stop
        out[put] = 0x0A
        put += 1
        out_offsets[k + 1] = put


@cached_njit(nogil=True)
def _lower_text(text, at, end, codes, out, put):
    """Returns where the text ends in out, -1 if it is irregular. Writes up to a block behind its end."""
    while at < end:
        copy_lowered(out, put, text, at)
        beyond = bytes_within(text, at, 0x80, 0x80)
        size = min(BLOCK if beyond == ZERO else first_bit(beyond), end - at)
        at += size
        put += size
        while at < end and text[at] >= 0x80:
            code, size = decode(text, at)
            at += size
            lower = np.int64(codes[code])
            if lower < 0:
                return np.int64(-1)
            put = encode(lower, out, put)
    return put


@cached_njit(nogil=True)
def is_utf8(text, at, end):
    """Whether the bytes are whole characters of valid UTF-8 (RFC 3629: no surrogates, none over U+10FFFF, the shortest
    form). 64 at a time: the bytes that the leading ones ask for are those that continue a character."""
    asked = ZERO  # by the block before, of the first three bytes
    while at < end:
        inside = below(end - at)
        high = bytes_within(text, at, 0x80, 0x80) & inside
        if high | asked == ZERO:
            at += BLOCK
            continue
        three = bytes_within(text, at, 0xE0, 0x10) & inside
        four = bytes_within(text, at, 0xF0, 0x05) & inside
        leading = (bytes_within(text, at, 0xC2, 0x1E) & inside) | three | four
        longer = three | four
        asked |= (leading << ONE) | (longer << np.uint64(2)) | (four << np.uint64(3))
        if asked != high & ~leading or asked != bytes_within(text, at, 0x80, 0x40) & inside:
            return False
        if longer != ZERO and not _are_shortest(text, at, inside):
            return False
        asked = (leading >> TOP) | (longer >> np.uint64(62)) | (four >> np.uint64(61))
        at += BLOCK
    return asked == ZERO


@cached_njit(nogil=True, forceinline=True)
def _are_shortest(text, at, inside):
    """Whether no character of the block is too long a form, a surrogate or over U+10FFFF, by its first two bytes."""
    narrow = bytes_within(text, at, 0xE0, 1) | bytes_within(text, at, 0xED, 1)
    narrow = (narrow | bytes_within(text, at, 0xF0, 1) | bytes_within(text, at, 0xF4, 1)) & inside
    while narrow != ZERO:
        place = at + first_bit(narrow)
        first, second = text[place], text[place + 1]
        if (first == 0xE0 and second < 0xA0) or (first == 0xED and second > 0x9F):
            return False
        if (first == 0xF0 and second < 0x90) or (first == 0xF4 and second > 0x8F):
            return False
        narrow = without_first(narrow)
    return True
