"""Kernels shared by the compiled line rules: copying kept lines and searching for phrases."""

from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.bits import BLOCK, NEWLINE, ZERO, below, decode, load64, skip_space, strip_end
from gristmill.data_pipeline.signals.characters import SPACE
from gristmill.data_pipeline.signals.intrinsics import bytes_within, store64
from gristmill.foundation.cached_njit import cached_njit


def phrase(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


class EditedTexts(NamedTuple):
    """Output of the line kernels for N texts. out: uint8, the edited texts as in a TextBuffer, with the offsets ends
    int64[N + 1]; counts: int64[N, counts]; left: bool[N], texts for the plain Python rules, which out does not have;
    same_words: bool[N], texts that lost white space alone, or nothing."""

    out: np.ndarray
    ends: np.ndarray
    counts: np.ndarray
    left: np.ndarray
    same_words: np.ndarray


@cached_njit(nogil=True, forceinline=True)
def copy_bytes(text, first, last, out, at_out):
    """Copy text[first:last] to out at at_out and return its end there. Up to seven more bytes are overwritten."""
    for at in range(0, last - first, 8):
        store64(out, at_out + at, load64(text, first + at))
    return at_out + last - first


@cached_njit(nogil=True)
def close_text(out, start, end, flags):
    """Strip the text at out[start:end], append a newline and return the start of the next text."""
    first = skip_space(out, start, end, flags, SPACE)
    last = strip_end(out, first, end, flags, SPACE)
    if first > start:
        for at in range(last - first):
            out[start + at] = out[first + at]
    out[start + last - first] = NEWLINE
    return start + last - first + 1


@cached_njit(nogil=True)
def has_words(text, first, last, flags, wanted):
    """Whether text[first:last] has at least `wanted` words separated by white space."""
    words, inside, at = 0, False, first
    while at < last:
        byte = text[at]
        if 0x20 < byte < 0x80:
            space, size = False, 1
        else:
            code, size = decode(text, at)
            space = flags[code] & SPACE != 0
        if not space and not inside:
            words += 1
            if words >= wanted:
                return True
        inside = not space
        at += size
    return words >= wanted


@cached_njit(nogil=True, forceinline=True)
def holds_bytes(text, first, last, low, count):
    """Whether text[first:last] contains a byte from `low` to low + count - 1."""
    found = ZERO
    for base in range(first, last, BLOCK):
        found |= bytes_within(text, base, low, count) & below(last - base)
    return found != ZERO


@cached_njit(nogil=True, forceinline=True)
def phrase_at(text, start, end, first, wanted):
    """Whether the phrase (given in lower case) is at `first` in text[start:end], ignoring ASCII case."""
    if first < start or first + len(wanted) > end:
        return False
    for i in range(len(wanted)):
        byte = text[first + i]
        if byte != wanted[i] and (byte | 0x20 != wanted[i] or not 0x41 <= byte <= 0x5A):
            return False
    return True
