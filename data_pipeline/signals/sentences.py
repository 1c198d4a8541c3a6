"""Ends of sentences in blocks of 64 bytes; signals/reference.py defines what ends one."""

import numpy as np

from gristmill.data_pipeline.signals.bits import (
    ALL,
    ONE,
    ZERO,
    bytes_below,
    character_start,
    decode,
    first_bit,
    without_first,
)
from gristmill.data_pipeline.signals.characters import TERMINAL
from gristmill.data_pipeline.signals.intrinsics import load64
from gristmill.data_pipeline.signals.reference import TITLES
from gristmill.foundation.cached_njit import cached_njit

TITLE_GROUPS = np.array([int.from_bytes(title.encode(), "little") for title in TITLES], np.uint64)
TITLE_CHARS = max(map(len, TITLES))


@cached_njit(nogil=True, forceinline=True)
def end_sentences(span, base, events, line_end, worded, has_word):
    """Return (whether there is a word after the last sentence end, number of sentence ends in the block). A sentence
    ends with a line, at a stop (。), or at white space behind a terminal.

    line_end: ends of lines, and stops. events: those, and white space behind anything but a word character. worded:
    letters, digits, ideographs. has_word: the result of the previous block."""
    rest, ended = ALL, 0
    while events != ZERO:
        place = np.uint64(first_bit(events))
        events = without_first(events)
        before = (ONE << place) - ONE
        if not (has_word or (worded & rest & before) != ZERO):
            continue
        if line_end >> place & ONE or _ends_sentence(span.text, span.start, base + np.int64(place), span.flags):
            ended += 1
            has_word, rest = False, ~before
    return has_word or (worded & rest) != ZERO, ended


@cached_njit(nogil=True)
def _ends_sentence(text, start, end, flags):
    """Whether text[start:end] ends in a terminal, closing quotes and brackets put aside."""
    at = end
    while at > start:
        at = character_start(text, at - 1)
        code, _ = decode(text, at)
        if flags[code] & TERMINAL:
            return not (code == 0x2E and _abbreviates(text, start, at))
        if not _closes(code):
            return False
    return False


@cached_njit(nogil=True)
def _abbreviates(text, start, dot):
    """Whether the dot behind text[start:dot] is one of an initial (J.), of e.g. and its like, or of a title."""
    first = dot
    while first > start and dot - first <= TITLE_CHARS and _is_word_byte(text[first - 1]):
        if _ends_line_separator(text, start, first):
            break
        first -= 1
    size = dot - first
    if size == 0 or size > TITLE_CHARS:
        return False
    if size == 1:
        letter = text[first]
        return 0x41 <= letter <= 0x5A or (0x61 <= letter <= 0x7A and first > start and text[first - 1] == 0x2E)
    group = load64(text, first) & bytes_below(size)
    for i in range(len(TITLE_GROUPS)):  # noqa: SIM110 - numba has no any()
        if TITLE_GROUPS[i] == group:
            return True
    return False


@cached_njit(nogil=True, forceinline=True)
def _is_word_byte(byte):
    """ASCII's letters, digits and _, and all bytes of what lies beyond."""
    return 0x30 <= byte <= 0x39 or 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A or byte == 0x5F or byte >= 0x80


@cached_njit(nogil=True, forceinline=True)
def _ends_line_separator(text, start, end):
    """Whether text[start:end] ends with U+2028, U+2029 or U+0085, which end a line as "\\n" does."""
    last = text[end - 1]
    if last == 0x85:
        return end - start >= 2 and text[end - 2] == 0xC2
    return (last == 0xA8 or last == 0xA9) and end - start >= 3 and text[end - 2] == 0x80 and text[end - 3] == 0xE2


@cached_njit(nogil=True, forceinline=True)
def _closes(code):
    """ " ' ) ] } ’ ” »"""
    return (
        code == 0x22
        or code == 0x27
        or code == 0x29
        or code == 0x5D
        or code == 0x7D
        or code == 0x2019
        or code == 0x201D
        or code == 0xBB
    )
