"""All signals of many texts in one compiled pass; signals/reference.py defines each in plain Python."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.signals.bits import BLOCK, NEWLINE, ZERO, Span, TextArrays, TextBuffer, below
from gristmill.data_pipeline.signals.characters import character_table
from gristmill.data_pipeline.signals.intrinsics import bytes_within, ones, pointer
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
    count_addresses,
    scan_lines,
)
from gristmill.data_pipeline.signals.ngrams import LAST_STAMP, NgramWork, ngram_chars, table_bits
from gristmill.data_pipeline.signals.reference import WordRule
from gristmill.data_pipeline.signals.signal_names import COUNTS, RATIOS, SIGNAL_FIELDS
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
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

NUM_COUNTS, NUM_RATIOS = len(COUNTS), len(RATIOS)
NUM_WORD_SIGNALS = NUM_WORD_COUNTS + 9  # words.CHARS ..., then the characters of 2- to 10-grams
STAMPS = 16  # a text uses fewer


class WorkArrays(NamedTuple):
    """Work space of the kernels for texts of at most R words or lines.

    line_counts: see lines.LINES ...; positions: words.FOUND_SPACE ....
    keys, line_keys: uint64[R]; lengths, names, repeats,
    survivors, marks: int32[R], filters: uint64[R / 2 + 8], see ngrams.NgramWork; entries: tables.first_place. state:
    int64[2], the last stamp, and the most words or lines since it was last 1."""

    line_counts: np.ndarray
    positions: np.ndarray
    keys: np.ndarray
    line_keys: np.ndarray
    lengths: np.ndarray
    names: np.ndarray
    repeats: np.ndarray
    survivors: np.ndarray
    marks: np.ndarray
    entries: np.ndarray
    filters: np.ndarray
    state: np.ndarray


class SignalBuffers(threading.local):
    """The work space of a thread, kept between calls because allocating it costs more than the computation."""

    def __init__(self) -> None:
        self._capacity = 0

    def arrays(self, capacity: int) -> WorkArrays:
        """Work space for texts of so many words or lines."""
        if capacity > self._capacity:
            self._capacity = capacity
            keys = [np.empty(capacity, np.uint64) for _ in range(2)]
            places = [np.empty(capacity, np.int32) for _ in range(4)]
            self._arrays = WorkArrays(
                np.empty(NUM_LINE_COUNTS, np.int64),
                np.empty(NUM_FOUND, np.uint64),
                *keys,
                *places,
                marks=np.zeros(capacity, np.int32),
                entries=np.zeros(1 << table_bits(capacity), np.uint64),
                filters=np.empty(capacity // 2 + 8, np.uint64),
                state=np.zeros(2, np.int64),
            )
        return self._arrays


_WORKSPACE = SignalBuffers()


def measure_texts(
    texts: TextArrays, unicode_words: bool, word_signals: np.ndarray, are_known: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (counts int64[N, len(COUNTS)], ratios float64[N, len(RATIOS)]) of N texts.

    word_signals: int64[N, NUM_WORD_SIGNALS], filled, but for the texts where are_known (bool[N]) says that they hold
    those of a text with the same words in the same lines: only white space was added or removed."""
    count = len(texts.offsets) - 1
    counts, ratios = np.empty((count, NUM_COUNTS), np.int64), np.empty((count, NUM_RATIOS), np.float64)
    # a text has at most as many words and lines as bytes
    work = _WORKSPACE.arrays(int(np.diff(texts.offsets).max(initial=0)) + 2)
    _measure_all(texts, unicode_words, work, (word_signals, are_known), (counts, ratios))
    return counts, ratios


@cached_njit(nogil=True)
def _measure_all(texts, unicode_words, work, of_words, results):
    text, flags, offsets = pointer(texts.text, 0), pointer(texts.flags, 0), texts.offsets
    word_signals, are_known = of_words
    counts, ratios = results
    lines, table, line_keys = pointer(work.line_counts, 0), pointer(work.entries, 0), pointer(work.line_keys, 0)
    keys, lengths, positions = pointer(work.keys, 0), pointer(work.lengths, 0), pointer(work.positions, 0)
    ngrams = NgramWork(
        keys,
        lengths,
        pointer(work.names, 0),
        pointer(work.repeats, 0),
        pointer(work.survivors, 0),
        pointer(work.marks, 0),
        table,
        pointer(work.filters, 0),
    )
    stamp, most = work.state[0], work.state[1]
    for k in range(len(offsets) - 1):
        span = Span(text, offsets[k], offsets[k + 1] - 1, flags)
        num_bytes = span.end - span.start
        if stamp + STAMPS > LAST_STAMP or stamp == 0:
            work.marks[:most], work.entries[: 1 << table_bits(most)] = 0, ZERO  # the rest was not written to
            stamp, most = 1, 0
        words = pointer(word_signals, k * NUM_WORD_SIGNALS)
        gram_chars = pointer(word_signals, k * NUM_WORD_SIGNALS + NUM_WORD_COUNTS)
        if are_known[k]:
            words[CHARS], words[NEWLINES] = _count_chars_and_newlines(span)
        else:
            scan_words(span, unicode_words, (keys, lengths), positions, words)
            ngram_chars(ngrams, words[WORDS], stamp + 2, gram_chars)
        most = max(most, words[WORDS], words[NEWLINES] + 2)
        ascii_only, odd_ends = words[CHARS] == num_bytes, words[ODD_ENDS] > 0
        scan_lines(span, ascii_only, odd_ends, words[NEWLINES], (line_keys, table, stamp), lines)
        stamp += STAMPS
        row = pointer(counts, k * NUM_COUNTS)
        _put_counts(num_bytes, words, lines, row)
        row[8], row[9], row[10] = count_addresses(text, span.start, span.end)
        _put_ratios(words, lines, gram_chars, pointer(ratios, k * NUM_RATIOS))
    work.state[0], work.state[1] = stamp, most


@cached_njit(nogil=True, forceinline=True)
def _count_chars_and_newlines(span):
    chars, newlines = ZERO, ZERO
    for at in range(span.start, span.end, BLOCK):
        inside = below(span.end - at)
        chars += ones(~bytes_within(span.text, at, 0x80, 0x40) & inside)
        newlines += ones(bytes_within(span.text, at, NEWLINE, 1) & inside)
    return np.int64(chars), np.int64(newlines)


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
    row[25] = _ratio(words[ALPHA_WORDS], words[PLAIN])


@cached_njit(nogil=True, forceinline=True)
def _ratio(count, total):
    return count / total if total else np.nan


# Signals of many texts at once, as columns.


def measure(texts: Sequence[str], word_rule: WordRule) -> pa.RecordBatch:
    """One row per text, one column per signal."""
    return measure_buffer(TextBuffer.of(texts), word_rule)


def measure_buffer(buffer: TextBuffer, word_rule: WordRule) -> pa.RecordBatch:
    """measure, of texts that are in a buffer already."""
    return measure_edited(buffer, word_rule, None).signals


class Measured(NamedTuple):
    """signals: one row per text, one column per signal. word_signals: int64[N, NUM_WORD_SIGNALS], what does not change
    with the white space between words; see kernel.measure_texts."""

    signals: pa.RecordBatch
    word_signals: np.ndarray


def measure_edited(buffer: TextBuffer, word_rule: WordRule, before: tuple[np.ndarray, np.ndarray] | None) -> Measured:
    """measure_buffer of edited texts. before: the word_signals before the edit, and bool[N]: texts of which the edit
    removed white space alone, so that their words are not counted again. None: nothing is known."""
    count = len(buffer)
    unknown = (np.empty((count, NUM_WORD_SIGNALS), np.int64), np.zeros(count, np.bool_))
    word_signals, are_known = unknown if before is None else (before[0].copy(), before[1])
    texts = TextArrays(buffer.text, buffer.offsets, character_table())
    counts, ratios = measure_texts(texts, word_rule == "unicode", word_signals, are_known)
    columns = [*np.ascontiguousarray(counts.T), *np.ascontiguousarray(ratios.T)]
    signals = pa.record_batch([pa.array(column) for column in columns], schema=pa.schema(SIGNAL_FIELDS))
    return Measured(signals, word_signals)
