"""All signals of many texts in one compiled pass; signals/reference.py says in plain Python what each means."""

import threading

import numpy as np

from gristmill.data_pipeline.signals.addresses import count_addresses
from gristmill.data_pipeline.signals.bits import ZERO
from gristmill.data_pipeline.signals.intrinsics import pointer
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
from gristmill.data_pipeline.signals.tables import LAST_STAMP, table_bits
from gristmill.data_pipeline.signals.words import (
    ALPHA_WORDS,
    CHARS,
    DIGITS,
    ELLIPSIS,
    HASHES,
    NEWLINES,
    NUM_FOUND,
    ODD_ENDS,
    PLAIN,
    PLAIN_CHARS,
    SENTENCES,
    STOPS,
    UPPERS,
    WORDS,
    scan_words,
)
from gristmill.data_pipeline.signals.words import NUM_COUNTS as NUM_WORD_COUNTS
from gristmill.foundation.cached_njit import cached_njit

NUM_COUNTS, NUM_RATIOS = len(COUNTS), len(RATIOS)
STAMPS = 16  # a text uses fewer


class Workspace(threading.local):
    """What the kernel works in, kept between calls because fresh memory costs more than the work; one a thread."""

    def __init__(self) -> None:
        self.room = 0

    def grow(self, room: int) -> None:
        """Room for texts of so many words or lines."""
        if room <= self.room:
            return
        self.room = room
        self.words, self.lines = np.empty(NUM_WORD_COUNTS, np.int64), np.empty(NUM_LINE_COUNTS, np.int64)
        self.found, self.chars = np.empty(NUM_FOUND, np.uint64), np.empty(9, np.int64)
        self.keys, self.line_keys = np.empty(room, np.uint64), np.empty(room, np.uint64)
        self.lengths, self.names, self.survivors, self.repeats = (np.empty(room, np.int32) for _ in range(4))
        self.marks, self.entries = np.zeros(room, np.int32), np.zeros(1 << table_bits(room), np.uint64)
        self.state = np.zeros(2, np.int64)  # the stamp, and the most words or lines of a text since stamps began anew


_WORKSPACE = Workspace()


def measure_texts(
    text: np.ndarray, offsets: np.ndarray, flags: np.ndarray, unicode_words: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(counts int64[N, len(COUNTS)], ratios float64[N, len(RATIOS)]) of N texts.

    text: uint8, each text followed by a newline, then buffer.PADDING bytes. offsets: int64[N + 1]; text k stands at
    offsets[k] : offsets[k + 1] - 1. flags: the character table."""
    counts = np.empty((len(offsets) - 1, NUM_COUNTS), np.int64)
    ratios = np.empty((len(offsets) - 1, NUM_RATIOS), np.float64)
    space = _WORKSPACE
    space.grow(int(np.diff(offsets).max(initial=0)) + 2)  # words and lines are at most as many as bytes
    _measure_all(
        text,
        offsets,
        flags,
        unicode_words,
        space.words,
        space.lines,
        space.found,
        space.chars,
        space.keys,
        space.line_keys,
        space.lengths,
        space.names,
        space.survivors,
        space.repeats,
        space.marks,
        space.entries,
        space.state,
        counts,
        ratios,
    )
    return counts, ratios


@cached_njit(nogil=True)
def _measure_all(
    text_array,
    offsets,
    flag_array,
    unicode_words,
    word_counts,
    line_counts,
    found,
    chars,
    keys,
    line_keys,
    lengths,
    names,
    survivors,
    repeats,
    marks,
    entries,
    state,
    counts,
    ratios,
):
    text, flags = pointer(text_array, 0), pointer(flag_array, 0)
    words, lines, gram_chars = pointer(word_counts, 0), pointer(line_counts, 0), pointer(chars, 0)
    table, line_table = pointer(entries, 0), pointer(line_keys, 0)
    stamp, most = state[0], state[1]
    for k in range(len(offsets) - 1):
        start, end = offsets[k], offsets[k + 1] - 1
        if stamp + STAMPS > LAST_STAMP or stamp == 0:
            marks[:most], entries[: 1 << table_bits(most)] = 0, ZERO  # what lies behind was not written to
            stamp, most = 1, 0
        scan_words(
            text, start, end, flags, unicode_words, pointer(keys, 0), pointer(lengths, 0), pointer(found, 0), words
        )
        most = max(most, words[WORDS], words[NEWLINES] + 2)
        ascii_only, odd_ends = words[CHARS] == end - start, words[ODD_ENDS] > 0
        scan_lines(text, start, end, flags, ascii_only, odd_ends, words[NEWLINES], line_table, table, stamp, lines)
        ngram_chars(
            pointer(keys, 0),
            pointer(lengths, 0),
            words[WORDS],
            pointer(names, 0),
            pointer(repeats, 0),
            pointer(survivors, 0),
            pointer(marks, 0),
            table,
            stamp + 2,
            gram_chars,
        )
        stamp += STAMPS
        row = pointer(counts, k * NUM_COUNTS)
        _put_counts(end - start, words, lines, row)
        row[8], row[9], row[10] = count_addresses(text, start, end)
        _put_ratios(words, lines, gram_chars, pointer(ratios, k * NUM_RATIOS))
    state[0], state[1] = stamp, most


@cached_njit(nogil=True)
def _put_counts(num_bytes, words, lines, row):
    """The columns of names.COUNTS in their order, but for the last three."""
    row[0] = num_bytes
    row[1] = words[CHARS]
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


@cached_njit(nogil=True)
def _put_ratios(words, lines, chars, row):
    """The columns of names.RATIOS in their order."""
    num_chars, num_words = words[CHARS], words[WORDS]
    row[0] = _ratio(words[PLAIN_CHARS], words[PLAIN])
    row[1] = _ratio(words[HASHES], num_words)
    row[2] = _ratio(words[ELLIPSIS], num_words)
    row[3] = _ratio(lines[BULLETS], lines[LINES])
    row[4] = _ratio(lines[ELLIPSES], lines[LINES])
    row[5] = _ratio(words[ALPHA_WORDS], num_words)
    row[6] = _ratio(words[UPPERS], num_chars)
    row[7] = _ratio(words[DIGITS], num_chars)
    row[8] = _ratio(lines[DUP_PIECES], lines[PIECES])
    row[9] = _ratio(lines[DUP_PIECE_CHARS], num_chars)
    # a text of white space alone has one paragraph, the empty one
    row[10] = _ratio(lines[DUP_PARAGRAPHS], max(lines[PARAGRAPHS], np.int64(num_chars > 0)))
    row[11] = _ratio(lines[DUP_PARAGRAPH_CHARS], num_chars)
    for n in range(9):
        row[12 + n] = _ratio(chars[n], num_chars)
    row[21] = _ratio(lines[TERMINAL_LINES], lines[FULL_LINES])
    row[22] = _ratio(lines[SHORT_LINES], lines[FULL_LINES])
    row[23] = _ratio(lines[DUP_LINE_CHARS], num_chars - words[NEWLINES] if lines[FULL_LINES] else 0)
    row[24] = _ratio(words[NEWLINES], num_words)


@cached_njit(nogil=True, inline="always")
def _ratio(part, whole):
    return part / whole if whole else np.nan
