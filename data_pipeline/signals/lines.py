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
from gristmill.data_pipeline.signals.ngrams import first_place, table_bits
from gristmill.data_pipeline.signals.reference import SHORT_LINE_CHARS
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

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


# Counts of URLs, e-mail and IPv4 addresses in UTF-8 bytes; signals/reference.py defines them.


@cached_njit(nogil=True)
def count_addresses(text, start, end):
    """Return the numbers of (URLs, e-mail addresses, IPv4 addresses) in text[start:end]. Reads a block behind it."""
    urls, emails, addresses = 0, 0, 0
    url_end, email_end, address_end = start, start, start
    for base in range(start, end, BLOCK):
        colon = bytes_within(text, base, 0x3A, 1) & bytes_within(text, base + 1, 0x2F, 1)
        dot = bytes_within(text, base, 0x2E, 1) & bytes_within(text, base + 1, 0x30, 10)
        marks = (colon | dot | bytes_within(text, base, 0x40, 1)) & below(end - base)
        while marks != ZERO:
            place = base + first_bit(marks)
            marks = without_first(marks)
            byte = text[place]
            if byte == 0x3A:
                if _is_url(text, url_end, place, end):
                    urls += 1
                    url_end = place + 4
            elif byte == 0x40:
                if _is_email(text, email_end, place, end):
                    emails += 1
                    email_end = place + 2
            elif place > address_end:
                stop = _ip_end(text, start, place, end)
                if stop:
                    addresses += 1
                    address_end = stop
    return urls, emails, addresses


@cached_njit(nogil=True)
def _is_email(text, free, at_sign, end):
    """Whether a character of an e-mail name is before the @, at `free` or later, and a letter or digit behind it."""
    if at_sign - 1 < free or at_sign + 1 >= end:
        return False
    return _is_mail(text[at_sign - 1]) and _is_alnum(text[at_sign + 1])


@cached_njit(nogil=True)
def _is_url(text, free, colon, end):
    """Whether http or https is before the colon, at `free` or later, and // and a character behind it."""
    if colon + 3 >= end or text[colon + 1] != 0x2F or text[colon + 2] != 0x2F:
        return False
    if text[colon + 3] == 0x20 or 0x09 <= text[colon + 3] <= 0x0D:
        return False
    letter = colon - 1
    if letter >= free and text[letter] == 0x73:
        letter -= 1
    if letter - 3 < free:
        return False
    return text[letter] == 0x70 and text[letter - 1] == 0x74 and text[letter - 2] == 0x74 and text[letter - 3] == 0x68


@cached_njit(nogil=True)
def _ip_end(text, start, dot, end):
    """End of the IPv4 address whose first dot is at `dot`; 0 if there is none."""
    first = dot
    while first > start and _is_digit(text[first - 1]):
        first -= 1
    if first == dot or dot - first > 3 or (first > start and text[first - 1] == 0x2E):
        return 0
    at = dot
    for _ in range(3):
        if at >= end or text[at] != 0x2E:
            return 0
        at += 1
        size = 0
        while at < end and _is_digit(text[at]):
            at += 1
            size += 1
        if size == 0 or size > 3:
            return 0
    return 0 if at < end and text[at] == 0x2E else at


@cached_njit(nogil=True, forceinline=True)
def _is_digit(byte):
    return 0x30 <= byte <= 0x39


@cached_njit(nogil=True, forceinline=True)
def _is_alnum(byte):
    return _is_digit(byte) or 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A


@cached_njit(nogil=True, forceinline=True)
def _is_mail(byte):
    """Letters, digits and . _ % + -"""
    return _is_alnum(byte) or byte == 0x2E or byte == 0x5F or byte == 0x25 or byte == 0x2B or byte == 0x2D
