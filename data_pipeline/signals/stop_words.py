"""Stop words of the detected language: Gopher requires two of eight English ones; other languages have their own.

The lists and their sources are in stop_words.txt. Texts in a language without a list get null."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.signals.bits import (
    BLOCK,
    ONE,
    ZERO,
    Span,
    below,
    decode,
    first_bit,
    hash_bytes,
    without_first,
)
from gristmill.data_pipeline.signals.buffer import TextArrays, TextBuffer, joined
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, JOINER, SPACE, WORD, character_table
from gristmill.data_pipeline.signals.intrinsics import bytes_within, letters_within, pointer
from gristmill.data_pipeline.signals.lower_case import lowered
from gristmill.data_pipeline.signals.reference import split_words
from gristmill.foundation.cached_njit import cached_njit

STOP_WORDS_PATH = Path(__file__).with_name("stop_words.txt")
STOP_WORD_FIELDS = [
    pa.field("num_language_stop_words", pa.int64()),  # how many different ones
    pa.field("language_stop_word_ratio", pa.float64()),  # share of the words (those with a letter, digit or ideograph)
]
MAX_WORDS = 64
SLOTS = 256  # of a language's table; no list has more than 64 words, one a bit


class StopWordTable(NamedTuple):
    """Of L languages, in the order of `languages`. hashes: uint64[L, SLOTS]; bits: int64[L, SLOTS], -1 for a free slot,
    else the word's place in its list. max_bytes: int64[L], of the longest word; 0 if one begins with another character
    than those of words. lowered: whether texts of the language are lowered first."""

    languages: dict[str, int]
    hashes: np.ndarray
    bits: np.ndarray
    max_bytes: np.ndarray
    lowered: tuple[bool, ...]


def stop_word_columns(
    texts: TextBuffer, languages: Sequence[str], table: StopWordTable | None = None
) -> list[pa.Array]:
    """The columns STOP_WORD_FIELDS; null where there is no list for the text's language. table: ours if none is given.

    "The mill and the river" in English -> 2 different ones (the, and), 3 of 5 words."""
    table = table or stop_word_table()
    lists_N = np.array([table.languages.get(language, -1) for language in languages], dtype=np.int64)
    lowered_N = (lists_N >= 0) & np.array([*table.lowered, False])[lists_N]
    counts_N3 = np.zeros((len(texts), 3), dtype=np.int64)
    _count(_arrays(texts), np.where(lowered_N, -1, lists_N), table[1:4], counts_N3)
    _count(_arrays(lowered(texts, lowered_N)), np.where(lowered_N, lists_N, -1), table[1:4], counts_N3)
    words = counts_N3[:, 2]
    ratios = np.divide(counts_N3[:, 1], words, out=np.full(len(texts), np.nan), where=words > 0)
    return [
        pa.array(counts_N3[:, 0], pa.int64(), mask=lists_N < 0),
        pa.array(ratios, pa.float64(), mask=(lists_N < 0) | (words == 0)),
    ]


def _arrays(texts: TextBuffer) -> TextArrays:
    return TextArrays(texts.text, texts.offsets, character_table())


@lru_cache(maxsize=1)
def stop_words() -> dict[str, tuple[str, ...]]:
    """Language -> its function words, as stop_words.txt lists them."""
    lines = STOP_WORDS_PATH.read_text("utf-8").splitlines()
    entries = [line.partition(":") for line in lines if line and not line.startswith("#")]
    return {language: tuple(words.split()) for language, _, words in entries}


@lru_cache(maxsize=1)
def stop_word_table() -> StopWordTable:
    return make_table(stop_words(), frozenset(stop_words()))


def make_table(lists: Mapping[str, Sequence[str]], lowered: Collection[str]) -> StopWordTable:
    """lists: name -> words, each one word by signals/reference.split_words; the first 64 count."""
    hashes, bits = np.zeros((len(lists), SLOTS), np.uint64), np.full((len(lists), SLOTS), -1, np.int64)
    max_bytes, flags = np.zeros(len(lists), np.int64), character_table()
    for row, words in enumerate(lists.values()):
        buffer, offsets = joined([word.encode() for word in words[:MAX_WORDS]])
        _fill(buffer, offsets, hashes[row], bits[row])
        if all(flags[ord(word[0])] & (WORD | IDEOGRAPH) for word in words):
            max_bytes[row] = np.diff(offsets).max(initial=2) - 1
    places = {language: row for row, language in enumerate(lists)}
    return StopWordTable(places, hashes, bits, max_bytes, tuple(language in lowered for language in lists))


def matched_words(words: Sequence[str]) -> tuple[str, ...]:
    """Those that are one word by our rule. [de, l', 的, 私は] -> [de, 的]: another tokenizer cuts the others so."""
    return tuple(dict.fromkeys(word for word in words if split_words(word, "unicode") == [word]))


@cached_njit(nogil=True)
def _fill(text, offsets, hashes, bits):
    for k in range(len(offsets) - 1):
        key = hash_bytes(text, offsets[k], offsets[k + 1] - 1)
        slot = np.int64(key & np.uint64(SLOTS - 1))
        while bits[slot] >= 0:
            slot = (slot + 1) & (SLOTS - 1)
        hashes[slot], bits[slot] = key, k


@cached_njit(nogil=True)
def _count(texts, lists, tables, counts):
    """Adds to counts int64[N, 3]: different stop words, stop words, words. lists: -1 for a text that is left out."""
    hashes, bits, max_bytes = tables
    text, flags = pointer(texts.text, 0), pointer(texts.flags, 0)
    for k in range(len(lists)):
        place = lists[k]
        if place >= 0:
            span = Span(text, texts.offsets[k], texts.offsets[k + 1] - 1, flags)
            table = (pointer(hashes, place * SLOTS), pointer(bits, place * SLOTS), max_bytes[place])
            _count_text(span, table, pointer(counts, 3 * k))


@cached_njit(nogil=True)
def _count_text(span, table, counts):
    text, at, end, flags = span
    seen = np.uint64(0)
    while at < end:
        if table[2] > 0 and bytes_within(text, at, 0x80, 0x80) == ZERO:
            stop, seen = _count_block(text, at, end, table, seen, counts)
            if stop > at:
                at = stop
                continue
        code, size = decode(text, at)
        flag = flags[code]
        first = at
        at += size
        if flag & SPACE:
            continue
        if flag & WORD:
            at = _word_end(text, at, end, flags)
        counts[2] += flag & (WORD | IDEOGRAPH) != 0
        seen = _look_up(text, first, at, table, seen, counts)


@cached_njit(nogil=True, forceinline=True)
def _count_block(text, at, end, table, seen, counts):
    """Counts the words of an ASCII block, which begins where a word may begin. Returns (the start of the word that may
    go on behind it, `at` if that is the first; the stop words seen). Words are runs as in words.scan_words."""
    inside = below(end - at)
    word = letters_within(text, at, 0x61, 26) | bytes_within(text, at, 0x30, 10) | bytes_within(text, at, 0x5F, 1)
    word &= inside
    joiner = bytes_within(text, at, 0x2E, 2) | bytes_within(text, at, 0x27, 1) | bytes_within(text, at, 0x3A, 1)
    joiner |= bytes_within(text, at, 0x40, 1)
    run = word | joiner & (word << ONE) & (word >> ONE)
    starts, stops = run & ~(run << ONE), ~run & (run << ONE)
    whole = end - at < BLOCK
    limit = at + BLOCK - 2  # a run that ends there or later may go on behind a joiner
    while starts != ZERO:
        first = at + first_bit(starts)
        stop = at + first_bit(stops)  # behind the block if the run does not end in it
        if not whole and stop >= limit:
            return first, seen
        counts[2] += 1
        if stop - first <= table[2]:
            seen = _look_up(text, first, stop, table, seen, counts)
        starts, stops = without_first(starts), without_first(stops)
    return (end if whole else limit), seen


@cached_njit(nogil=True, forceinline=True)
def _look_up(text, first, stop, table, seen, counts):
    """Counts text[first:stop] if it is a stop word; returns the bits of those seen."""
    hashes, bits, _ = table
    key = hash_bytes(text, first, stop)
    slot = np.int64(key & np.uint64(SLOTS - 1))
    while bits[slot] >= 0:
        if hashes[slot] == key:
            counts[1] += 1
            mark = ONE << np.uint64(bits[slot])
            counts[0] += seen & mark == ZERO
            return seen | mark
        slot = (slot + 1) & (SLOTS - 1)
    return seen


@cached_njit(nogil=True, forceinline=True)
def _word_end(text, at, end, flags):
    """Behind the last word character of a run; one joiner between two of them does not end it."""
    while at < end:
        code, size = decode(text, at)
        if not flags[code] & WORD:
            if not flags[code] & JOINER or at + size >= end:
                break
            after, _ = decode(text, at + size)
            if not flags[after] & WORD:
                break
        at += size
    return at
