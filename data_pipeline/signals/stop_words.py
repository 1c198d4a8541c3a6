"""Stop words of the detected language: Gopher requires two of eight English ones; other languages have their own.

The lists and their sources are in stop_words.txt. Texts in a language without a list get null."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.signals.bits import Span, decode, hash_bytes
from gristmill.data_pipeline.signals.buffer import TextArrays, joined
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, JOINER, SPACE, WORD, character_table
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
    else the word's place in its list. lowered: whether texts of the language are lowered first."""

    languages: dict[str, int]
    hashes: np.ndarray
    bits: np.ndarray
    lowered: tuple[bool, ...]


def stop_word_columns(
    texts: Sequence[str], languages: Sequence[str], table: StopWordTable | None = None
) -> list[pa.Array]:
    """The columns STOP_WORD_FIELDS; null where there is no list for the text's language. table: ours if none is given.

    "The mill and the river" in English -> 2 different ones (the, and), 3 of 5 words."""
    table = table or stop_word_table()
    lists_N = np.array([table.languages.get(language, -1) for language in languages], dtype=np.int64)
    lowered = [_lowered(text, place, table) for text, place in zip(texts, lists_N.tolist(), strict=True)]
    arrays = TextArrays(*joined([text.encode() for text in lowered]), character_table())
    counts_N3 = np.zeros((len(texts), 3), dtype=np.int64)
    _count(arrays, lists_N, table.hashes, table.bits, counts_N3)
    words = counts_N3[:, 2]
    ratios = np.divide(counts_N3[:, 1], words, out=np.full(len(texts), np.nan), where=words > 0)
    return [
        pa.array(counts_N3[:, 0], pa.int64(), mask=lists_N < 0),
        pa.array(ratios, pa.float64(), mask=(lists_N < 0) | (words == 0)),
    ]


def _lowered(text: str, place: int, table: StopWordTable) -> str:
    if place < 0:
        return ""
    return text.lower() if table.lowered[place] else text


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
    for row, words in enumerate(lists.values()):
        buffer, offsets = joined([word.encode() for word in words[:MAX_WORDS]])
        _fill(buffer, offsets, hashes[row], bits[row])
    places = {language: row for row, language in enumerate(lists)}
    return StopWordTable(places, hashes, bits, tuple(language in lowered for language in lists))


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
def _count(texts, lists, hashes, bits, counts):
    """Fills counts int64[N, 3]: different stop words, stop words, words."""
    for k in range(len(lists)):
        if lists[k] >= 0:
            span = Span(texts.text, texts.offsets[k], texts.offsets[k + 1] - 1, texts.flags)
            _count_text(span, hashes[lists[k]], bits[lists[k]], counts[k])


@cached_njit(nogil=True)
def _count_text(span, hashes, bits, counts):
    text, at, end, flags = span
    seen = np.uint64(0)
    while at < end:
        code, size = decode(text, at)
        flag = flags[code]
        first = at
        at += size
        if flag & SPACE:
            continue
        if flag & WORD:
            at = _word_end(text, at, end, flags)
        counts[2] += flag & (WORD | IDEOGRAPH) != 0
        key = hash_bytes(text, first, at)
        slot = np.int64(key & np.uint64(SLOTS - 1))
        while bits[slot] >= 0:
            if hashes[slot] == key:
                counts[1] += 1
                mark = np.uint64(1) << np.uint64(bits[slot])
                counts[0] += seen & mark == np.uint64(0)
                seen |= mark
                break
            slot = (slot + 1) & (SLOTS - 1)


@cached_njit(nogil=True, inline="always")
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
