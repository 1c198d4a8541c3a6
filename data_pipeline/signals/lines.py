"""Counts of lines and paragraphs in UTF-8 bytes: bullets, ellipses, punctuation, duplicates."""

from typing import Any, NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.bits import (
    BLOCK,
    NEWLINE,
    ONE,
    ZERO,
    Span,
    below,
    character_start,
    count_chars,
    decode,
    first_bit,
    hash_bytes,
    skip_space,
    strip_end,
    without_first,
)
from gristmill.data_pipeline.signals.characters import LINE_END, SPACE, TERMINAL
from gristmill.data_pipeline.signals.intrinsics import bytes_within
from gristmill.data_pipeline.signals.reference import SHORT_LINE_CHARS
from gristmill.data_pipeline.signals.tables import first_place, table_bits
from gristmill.foundation.cached_njit import cached_njit

# Places in the counts that scan_lines fills.
LINES, BULLETS, ELLIPSES = 0, 1, 2  # of str.splitlines
PIECES, DUP_PIECES, DUP_PIECE_CHARS = 3, 4, 5  # between runs of newlines
FULL_LINES, TERMINAL_LINES, SHORT_LINES, DUP_LINE_CHARS = 6, 7, 8, 9  # between newlines, blank ones left out
PARAGRAPHS, DUP_PARAGRAPHS, DUP_PARAGRAPH_CHARS = 10, 11, 12
NUM_LINE_COUNTS = 13


class LineTable(NamedTuple):
    """A hash table of lines or paragraphs, as pointers. keys: uint64[lines + 1], their hashes; entries, bits, stamp:
    see tables.first_place."""

    keys: Any
    entries: Any
    bits: Any
    stamp: Any


@cached_njit(nogil=True)
def scan_lines(span, ascii_only, odd_ends, num_newlines, work, counts):
    """Counts the lines and paragraphs of the span (counts: LINES ...). odd_ends: it has line ends other than newlines.

    work: (keys, entries, stamp) of two tables, which use stamp + 1 and stamp + 2."""
    text, start, end, flags = span
    keys, entries, stamp = work
    for i in range(NUM_LINE_COUNTS):
        counts[i] = 0
    bits = table_bits(num_newlines + 2)
    at = start
    for base in range(start, end + 1, BLOCK):
        stops = bytes_within(text, base, NEWLINE, 1) & below(end - base)
        if end - base < BLOCK:  # the text's end ends a line too
            stops |= ONE << np.uint64(end - base)
        while stops != ZERO:
            stop = base + first_bit(stops)
            stops = without_first(stops)
            if stop > at:
                _line(Span(text, at, stop, flags), ascii_only, LineTable(keys, entries, bits, stamp + 1), counts)
            at = stop + 1
    if not odd_ends:
        counts[LINES] = num_newlines + (end > start and text[end - 1] != NEWLINE)
    if end > start:  # the pieces before the first newline and after the last, if they are empty
        head, tail = text[start] == NEWLINE, text[end - 1] == NEWLINE
        counts[PIECES] += np.int64(head) + np.int64(tail)
        counts[DUP_PIECES] += np.int64(head and tail)
    if odd_ends:
        _odd_lines(text, start, end, flags, counts)
    _scan_paragraphs(span, LineTable(keys, entries, bits, stamp + 2), counts)


@cached_njit(nogil=True, forceinline=True)
def _line(span, ascii_only, table, counts):
    """Count one line that is not empty, between newlines."""
    text, start, end, flags = span
    num_chars = end - start if ascii_only else count_chars(text, start, end)
    line = counts[PIECES]
    table.keys[line] = hash_bytes(text, start, end)
    repeated = first_place(table.entries, table.bits, table.stamp, table.keys, line) != line
    counts[PIECES] = line + 1
    counts[DUP_PIECES] += repeated
    counts[DUP_PIECE_CHARS] += num_chars * repeated
    first = skip_space(text, start, end, flags, SPACE)
    if first == end:
        return
    counts[FULL_LINES] += 1
    counts[SHORT_LINES] += num_chars <= SHORT_LINE_CHARS
    counts[DUP_LINE_CHARS] += num_chars * repeated
    last = np.int64(text[end - 1])
    if last >= 0x80:
        last, _ = decode(text, character_start(text, end - 1))
    counts[TERMINAL_LINES] += flags[last] & TERMINAL != 0
    counts[BULLETS] += starts_with_bullet(text, first)
    counts[ELLIPSES] += ends_with_ellipsis(text, first, end, flags)


@cached_njit(nogil=True)
def _odd_lines(text, start, end, flags, counts):
    """Lines, bullets and ellipses by str.splitlines."""
    counts[LINES] = counts[BULLETS] = counts[ELLIPSES] = 0
    at = start
    while at < end:
        stop, size, code = at, 0, 0
        while stop < end:
            code, size = decode(text, stop)
            if flags[code] & LINE_END:
                break
            stop += size
        counts[LINES] += 1
        first = skip_space(text, at, stop, flags, SPACE)
        if first < stop:
            counts[BULLETS] += starts_with_bullet(text, first)
            counts[ELLIPSES] += ends_with_ellipsis(text, first, stop, flags)
        if code == 0x0D and stop + 1 < end and text[stop + 1] == NEWLINE:
            size = 2
        at = stop + size if stop < end else end


@cached_njit(nogil=True)
def _scan_paragraphs(span, table, counts):
    """Count paragraphs: between runs of two and more newlines, in the text without white space at its ends."""
    text, flags = span.text, span.flags
    start = skip_space(text, span.start, span.end, flags, SPACE)
    end = strip_end(text, start, span.end, flags, SPACE)
    if start == end:
        return
    first = start
    for base in range(start, end, BLOCK):
        stops = bytes_within(text, base, NEWLINE, 1) & bytes_within(text, base + 1, NEWLINE, 1) & below(end - base)
        while stops != ZERO:
            stop = base + first_bit(stops)
            stops = without_first(stops)
            if stop < first:  # in the run of newlines before this paragraph
                continue
            _paragraph(text, first, stop, table, counts)
            first = stop + 2
            while text[first] == NEWLINE:
                first += 1
    if counts[PARAGRAPHS]:
        _paragraph(text, first, end, table, counts)
    else:
        counts[PARAGRAPHS] = 1


@cached_njit(nogil=True, forceinline=True)
def _paragraph(text, start, end, table, counts):
    paragraph = counts[PARAGRAPHS]
    table.keys[paragraph] = hash_bytes(text, start, end)
    counts[PARAGRAPHS] = paragraph + 1
    if first_place(table.entries, table.bits, table.stamp, table.keys, paragraph) != paragraph:
        counts[DUP_PARAGRAPHS] += 1
        counts[DUP_PARAGRAPH_CHARS] += count_chars(text, start, end)


@cached_njit(nogil=True, forceinline=True)
def starts_with_bullet(text, at):
    """- or U+2022."""
    return text[at] == 0x2D or (text[at] == 0xE2 and text[at + 1] == 0x80 and text[at + 2] == 0xA2)


@cached_njit(nogil=True, forceinline=True)
def ends_with_ellipsis(text, start, end, flags):
    """... or U+2026, ignoring white space behind it."""
    end = strip_end(text, start, end, flags, SPACE)
    if end - start < 3:
        return False
    if text[end - 1] == 0x2E:
        return text[end - 2] == 0x2E and text[end - 3] == 0x2E
    return text[end - 1] == 0xA6 and text[end - 2] == 0x80 and text[end - 3] == 0xE2
