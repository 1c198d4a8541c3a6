"""All signals of many texts in one compiled pass; signals/reference.py says in plain Python what each means.

numba keys a cached kernel by the file of its outermost function: after a change to a file that is called from here,
touch this one, or the old code runs on."""

import numba
import numpy as np

from gristmill.data_pipeline.intrinsics import load64
from gristmill.data_pipeline.signals.addresses import count_addresses
from gristmill.data_pipeline.signals.bits import HIGH, ZERO, between, bytes_below, decode, digits, equal, every, ones
from gristmill.data_pipeline.signals.characters import DIGIT, LINE_END, UPPER
from gristmill.data_pipeline.signals.lines import (
    BULLETS,
    DUP_LINE_CHARS,
    DUP_PARAGRAPH_CHARS,
    DUP_PARAGRAPHS,
    DUP_PIECE_CHARS,
    DUP_PIECES,
    ELLIPSES,
    FULL_LINES,
    LINES,
    NUM_LINE_COUNTS,
    PARAGRAPHS,
    PIECES,
    SHORT_LINES,
    TERMINAL_LINES,
    scan_lines,
)
from gristmill.data_pipeline.signals.names import COUNTS, RATIOS
from gristmill.data_pipeline.signals.ngrams import ngram_chars
from gristmill.data_pipeline.signals.tables import table_bits
from gristmill.data_pipeline.signals.words import (
    ALPHA_WORDS,
    NUM_WORD_COUNTS,
    PLAIN,
    PLAIN_CHARS,
    SENTENCES,
    STOPS,
    WORDS,
    scan_words,
)

NUM_COUNTS, NUM_RATIOS = len(COUNTS), len(RATIOS)
STAMPS = 16  # a text uses fewer

CHARS, NEWLINES, HASHES, ELLIPSIS, UPPERS, DIGITS, ODD_ENDS = range(7)
NUM_CHARACTER_COUNTS = 7


def measure_texts(
    text: np.ndarray, offsets: np.ndarray, flags: np.ndarray, unicode_words: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(counts int64[N, len(COUNTS)], ratios float64[N, len(RATIOS)]) of N texts.

    text: uint8, each text followed by a newline, then buffer.PADDING bytes. offsets: int64[N + 1]; text k stands at
    offsets[k] : offsets[k + 1] - 1. flags: the character table."""
    counts = np.empty((len(offsets) - 1, NUM_COUNTS), np.int64)
    ratios = np.empty((len(offsets) - 1, NUM_RATIOS), np.float64)
    _measure_all(text, offsets, flags, unicode_words, counts, ratios)
    return counts, ratios


@numba.njit(cache=True, nogil=True)
def _measure_all(text, offsets, flags, unicode_words, counts, ratios):
    longest = 0
    for k in range(len(offsets) - 1):
        longest = max(longest, offsets[k + 1] - 1 - offsets[k])
    hashes, lengths = np.empty(longest + 1, np.uint64), np.empty(longest + 1, np.int32)
    keys, places = np.empty(0, np.uint64), np.zeros(0, np.int64)
    names, ngram_counts, survivors = np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int32)
    marks, repeats = np.zeros(0, np.int32), np.empty(0, np.uint8)
    characters, words = np.empty(NUM_CHARACTER_COUNTS, np.int64), np.empty(NUM_WORD_COUNTS, np.int64)
    lines, chars = np.empty(NUM_LINE_COUNTS, np.int64), np.empty(9, np.int64)
    stamp = 1
    for k in range(len(offsets) - 1):
        start, end = offsets[k], offsets[k + 1] - 1
        _count_characters(text, start, end, flags, characters)
        scan_words(text, start, end, flags, unicode_words, hashes, lengths, words)
        most = max(words[WORDS], characters[NEWLINES] + 2)
        if most > len(names):
            room = 2 * most
            names, ngram_counts, survivors = (
                np.empty(room, np.int32),
                np.empty(room, np.int32),
                np.empty(room, np.int32),
            )
            marks, repeats = np.zeros(room, np.int32), np.empty(room, np.uint8)
            keys = np.empty(1 << table_bits(room), np.uint64)
            places = np.zeros(1 << table_bits(room), np.int64)
        ascii_only = characters[CHARS] == end - start
        odd_ends = characters[ODD_ENDS] > 0
        scan_lines(text, start, end, flags, ascii_only, odd_ends, characters[NEWLINES], keys, places, stamp, lines)
        ngram_chars(
            hashes,
            lengths,
            words[WORDS],
            names,
            ngram_counts,
            repeats,
            survivors,
            marks,
            keys,
            places,
            stamp + 2,
            chars,
        )
        stamp += STAMPS
        _put_counts(end - start, characters, words, lines, counts[k])
        urls, emails, addresses = count_addresses(text, start, end)
        counts[k, 8], counts[k, 9], counts[k, 10] = urls, emails, addresses
        _put_ratios(characters, words, lines, chars, ratios[k])


@numba.njit(cache=True, nogil=True)
def _count_characters(text, start, end, flags, counts):
    """Fills counts (see CHARS ...), eight bytes at a time; characters beyond ASCII one by one after that."""
    continued, newlines, hashes, uppers, digit, odd = ZERO, ZERO, ZERO, ZERO, ZERO, ZERO
    dots, special = ZERO, ZERO
    for at in range(start, end, 8):
        group = load64(text, at)
        inside = bytes_below(min(end - at, 8))
        newlines += ones(equal(group, every(0x0A)) & inside)
        hashes += ones(equal(group, every(0x23)) & inside)
        uppers += ones(between(group, 0x41, 0x5B) & inside)
        digit += ones(digits(group) & inside)
        controls = between(group, 0x0B, 0x20) & inside
        if controls != ZERO:
            odd += (between(group, 0x0B, 0x0E) | between(group, 0x1C, 0x1F)) & inside
        high = group & HIGH & inside
        special |= high
        continued += ones(high & ~(group << np.uint64(1)))
        dot = equal(group, every(0x2E))
        if dot != ZERO:
            dots |= dot & equal(load64(text, at + 1), every(0x2E)) & equal(load64(text, at + 2), every(0x2E)) & inside
    counts[CHARS] = end - start - np.int64(continued)
    counts[NEWLINES], counts[HASHES] = newlines, hashes
    counts[ELLIPSIS] = _count_ellipses(text, start, end) if dots != ZERO else 0
    counts[UPPERS], counts[DIGITS], counts[ODD_ENDS] = uppers, digit, odd != ZERO
    if special != ZERO:
        _count_special(text, start, end, flags, counts)


@numba.njit(cache=True, nogil=True)
def _count_ellipses(text, start, end):
    """Runs of dots, three a time."""
    found, run = 0, 0
    for i in range(start, end):
        if text[i] == 0x2E:
            run += 1
        else:
            found += run // 3
            run = 0
    return found + run // 3


@numba.njit(cache=True, nogil=True)
def _count_special(text, start, end, flags, counts):
    """Adds what characters beyond ASCII bring."""
    at = start
    while at < end:
        if text[at] < 0x80:
            at += 1
            continue
        code, size = decode(text, at)
        flag = flags[code]
        counts[UPPERS] += flag & UPPER != 0
        counts[DIGITS] += flag & DIGIT != 0
        counts[ODD_ENDS] += flag & LINE_END != 0
        counts[ELLIPSIS] += code == 0x2026
        at += size


@numba.njit(cache=True, nogil=True)
def _put_counts(num_bytes, characters, words, lines, row):
    """The columns of names.COUNTS in their order, but for the last three."""
    row[0] = num_bytes
    row[1] = characters[CHARS]
    row[2] = words[WORDS]
    row[3] = words[PLAIN]
    row[4] = lines[LINES]
    row[5] = lines[PARAGRAPHS]
    row[6] = words[SENTENCES]
    row[7] = 0
    stops = words[STOPS]
    while stops:
        row[7] += stops & 1
        stops >>= 1


@numba.njit(cache=True, nogil=True)
def _put_ratios(characters, words, lines, chars, row):
    """The columns of names.RATIOS in their order."""
    num_chars, num_words = characters[CHARS], words[WORDS]
    row[0] = _ratio(words[PLAIN_CHARS], words[PLAIN])
    row[1] = _ratio(characters[HASHES], num_words)
    row[2] = _ratio(characters[ELLIPSIS], num_words)
    row[3] = _ratio(lines[BULLETS], lines[LINES])
    row[4] = _ratio(lines[ELLIPSES], lines[LINES])
    row[5] = _ratio(words[ALPHA_WORDS], num_words)
    row[6] = _ratio(characters[UPPERS], num_chars)
    row[7] = _ratio(characters[DIGITS], num_chars)
    row[8] = _ratio(lines[DUP_PIECES], lines[PIECES])
    row[9] = _ratio(lines[DUP_PIECE_CHARS], num_chars)
    # a text of white space alone has one paragraph, the empty one
    row[10] = _ratio(lines[DUP_PARAGRAPHS], max(lines[PARAGRAPHS], np.int64(num_chars > 0)))
    row[11] = _ratio(lines[DUP_PARAGRAPH_CHARS], num_chars)
    for n in range(9):
        row[12 + n] = _ratio(chars[n], num_chars)
    row[21] = _ratio(lines[TERMINAL_LINES], lines[FULL_LINES])
    row[22] = _ratio(lines[SHORT_LINES], lines[FULL_LINES])
    row[23] = _ratio(lines[DUP_LINE_CHARS], num_chars - characters[NEWLINES] if lines[FULL_LINES] else 0)
    row[24] = _ratio(characters[NEWLINES], num_words)


@numba.njit(cache=True, nogil=True, inline="always")
def _ratio(part, whole):
    return part / whole if whole else np.nan
