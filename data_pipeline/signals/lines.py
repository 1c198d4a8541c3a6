"""Lines and paragraphs of a text in UTF-8 bytes: how they begin, end and repeat."""

import numba
import numpy as np

from gristmill.data_pipeline.signals.bits import character_start, decode, find_newline, hash_bytes
from gristmill.data_pipeline.signals.characters import LINE_END, SPACE, TERMINAL
from gristmill.data_pipeline.signals.reference import SHORT_LINE_CHARS
from gristmill.data_pipeline.signals.tables import first_place, table_bits

# Places in the counts that scan_lines fills.
LINES, BULLETS, ELLIPSES = 0, 1, 2  # of str.splitlines
PIECES, DUP_PIECES, DUP_PIECE_CHARS = 3, 4, 5  # between runs of newlines
FULL_LINES, TERMINAL_LINES, SHORT_LINES, DUP_LINE_CHARS = 6, 7, 8, 9  # between newlines, blank ones left out
PARAGRAPHS, DUP_PARAGRAPHS, DUP_PARAGRAPH_CHARS = 10, 11, 12
NUM_LINE_COUNTS = 13


@numba.njit(cache=True, nogil=True)
def scan_lines(text, start, end, flags, ascii_only, odd_ends, num_newlines, keys, places, stamp, counts):
    """Fills counts (see LINES ...). odd_ends: the text holds line ends other than newlines. Uses stamp + 1, + 2."""
    counts[:] = 0
    bits = table_bits(num_newlines + 2)
    at = start
    while at <= end:
        stop = find_newline(text, at, end)
        if stop > at:
            _line(text, at, stop, flags, ascii_only, keys, places, bits, stamp + 1, counts)
        if not odd_ends and (stop > at or stop < end):
            counts[LINES] += 1
        at = stop + 1
    if end > start:  # what stands before the first newline and after the last, if it is empty
        head, tail = text[start] == 0x0A, text[end - 1] == 0x0A
        counts[PIECES] += np.int64(head) + np.int64(tail)
        counts[DUP_PIECES] += np.int64(head and tail)
    if odd_ends:
        _odd_lines(text, start, end, flags, counts)
    _scan_paragraphs(text, start, end, flags, ascii_only, keys, places, bits, stamp + 2, counts)


@numba.njit(cache=True, nogil=True, inline="always")
def _line(text, start, end, flags, ascii_only, keys, places, bits, stamp, counts):
    """One line that is not empty, between newlines."""
    num_chars = end - start if ascii_only else count_chars(text, start, end)
    repeated = first_place(keys, places, bits, stamp, hash_bytes(text, start, end), start & 0xFFFFFFFF) != (
        start & 0xFFFFFFFF
    )
    counts[PIECES] += 1
    counts[DUP_PIECES] += repeated
    counts[DUP_PIECE_CHARS] += num_chars * repeated
    first = skip_space(text, start, end, flags)
    if first == end:
        return
    counts[FULL_LINES] += 1
    counts[SHORT_LINES] += num_chars <= SHORT_LINE_CHARS
    counts[DUP_LINE_CHARS] += num_chars * repeated
    code, _ = decode(text, character_start(text, end - 1))
    counts[TERMINAL_LINES] += flags[code] & TERMINAL != 0
    counts[BULLETS] += starts_with_bullet(text, first)
    counts[ELLIPSES] += ends_with_ellipsis(text, first, end, flags)


@numba.njit(cache=True, nogil=True)
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
        first = skip_space(text, at, stop, flags)
        if first < stop:
            counts[BULLETS] += starts_with_bullet(text, first)
            counts[ELLIPSES] += ends_with_ellipsis(text, first, stop, flags)
        if code == 0x0D and stop + 1 < end and text[stop + 1] == 0x0A:
            size = 2
        at = stop + size if stop < end else end


@numba.njit(cache=True, nogil=True)
def _scan_paragraphs(text, start, end, flags, ascii_only, keys, places, bits, stamp, counts):
    """Between runs of two and more newlines, in the text without white space at its ends."""
    start = skip_space(text, start, end, flags)
    end = strip_end(text, start, end, flags)
    if start == end:
        return
    first = at = start
    while first < end:
        stop = find_newline(text, at, end)
        behind = stop
        while behind < end and text[behind] == 0x0A:
            behind += 1
        if stop < end and behind - stop < 2:
            at = behind
            continue
        place = first & 0xFFFFFFFF
        repeated = first_place(keys, places, bits, stamp, hash_bytes(text, first, stop), place) != place
        counts[PARAGRAPHS] += 1
        if repeated:
            counts[DUP_PARAGRAPHS] += 1
            counts[DUP_PARAGRAPH_CHARS] += count_chars(text, first, stop)
        first = at = behind


@numba.njit(cache=True, nogil=True, inline="always")
def count_chars(text, start, end):
    chars = 0
    for i in range(start, end):
        chars += text[i] & 0xC0 != 0x80
    return chars


@numba.njit(cache=True, nogil=True, inline="always")
def skip_space(text, start, end, flags):
    """Where the first character that is no white space begins; end if there is none."""
    while start < end:
        code, size = decode(text, start)
        if not flags[code] & SPACE:
            return start
        start += size
    return end


@numba.njit(cache=True, nogil=True, inline="always")
def strip_end(text, start, end, flags):
    """Behind the last character that is no white space; start if there is none."""
    while end > start:
        at = character_start(text, end - 1)
        code, _ = decode(text, at)
        if not flags[code] & SPACE:
            return end
        end = at
    return start


@numba.njit(cache=True, nogil=True, inline="always")
def starts_with_bullet(text, at):
    """- or U+2022."""
    return text[at] == 0x2D or (text[at] == 0xE2 and text[at + 1] == 0x80 and text[at + 2] == 0xA2)


@numba.njit(cache=True, nogil=True, inline="always")
def ends_with_ellipsis(text, start, end, flags):
    """... or U+2026, white space behind it put aside."""
    end = strip_end(text, start, end, flags)
    if end - start < 3:
        return False
    if text[end - 1] == 0x2E:
        return text[end - 2] == 0x2E and text[end - 3] == 0x2E
    return text[end - 1] == 0xA6 and text[end - 2] == 0x80 and text[end - 3] == 0xE2
