"""Word order: a score that distinguishes written text from the same words shuffled.

Two things hold in every language and need no word list: a frequent word hardly ever follows itself, and pairs of words
come back far more often than the frequencies of the two would give. Both are compared with what a random order of the
same words gives, in standard deviations; a random order has a value near 0, a page of text 5 and more."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.signals.bits import GROUP_MIX, NEWLINE, ZERO, TextBuffer, decode, hash_bytes
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, LINE_END, SPACE, TERMINAL, WORD, character_table
from gristmill.data_pipeline.signals.intrinsics import folded_product, pointer
from gristmill.data_pipeline.signals.ngrams import LAST_STAMP, first_place, table_bits
from gristmill.data_pipeline.signals.stop_words import lowered
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

WORD_ORDER_FIELDS = [
    pa.field("word_order", pa.float64()),  # see order_score; null below MIN_TOKENS tokens
    pa.field("mean_sentence_words", pa.float64()),  # tokens between sentence marks or line ends; null without tokens
]
MIN_TOKENS = 200  # of fewer, too many texts have no pair of words twice
# The score of running text grows with its length, so a shorter text's is raised in proportion. Of English books, in
# pieces of 200, 300 and 600 words, 2, 1 and 0 % then stand below 3, and of the same words shuffled 93, 94 and 99 %.
FULL_TOKENS = 600
MIN_LINE_TOKENS = 5  # a shorter line is a heading, a verse or an entry: its words are left out
NEAR = 2  # places within which a word is not expected again ("the x the" is as rare as "the the")
# Pairs of words that come back count up to so many standard deviations: a text of one repeated sentence has no limit.
MAX_PAIR_SCORE = 20.0


class OrderWork(NamedTuple):
    """Work space for texts of fewer than R tokens. keys, pairs: uint64[R]; counts: int32[R]; entries: an empty table
    of tables.first_place for R keys."""

    keys: np.ndarray
    pairs: np.ndarray
    counts: np.ndarray
    entries: np.ndarray


def word_order_columns(texts: TextBuffer, wanted: Sequence[bool]) -> list[pa.Array]:
    """The columns WORD_ORDER_FIELDS; null where not requested."""
    chosen = lowered(texts, np.array(wanted, dtype=bool))
    most = int(np.diff(chosen.offsets).max(initial=0)) + 2
    work = OrderWork(
        keys=np.empty(most, np.uint64),
        pairs=np.empty(most, np.uint64),
        counts=np.empty(most, np.int32),
        entries=np.zeros(1 << table_bits(most), np.uint64),
    )
    values_N2 = np.full((len(texts), 2), np.nan)
    _score_texts(chosen.text, chosen.offsets, character_table(), work, values_N2)
    return [pa.array(column, pa.float64(), from_pandas=True) for column in np.ascontiguousarray(values_N2.T)]


def word_order(text: str) -> tuple[float, float]:
    """Return (word_order, mean_sentence_words), computed in plain Python; the kernel gives the same values."""
    lines = [order_tokens(line) for line in text.lower().split("\n")]
    count, breaks = sum(len(line) for line, _ in lines), sum(marks for _, marks in lines)
    if not count:
        return math.nan, math.nan
    tokens = [token for line, _ in lines if len(line) >= MIN_LINE_TOKENS for token in line]
    words, pairs = Counter(tokens), Counter(pairwise(tokens))
    near = sum(tokens[i] == tokens[i + gap] for gap in range(1, NEAR + 1) for i in range(len(tokens) - gap))
    same = sum(count * (count - 1) for count in words.values())
    twice = sum(count * (count - 1) for count in pairs.values())
    score = order_score(len(tokens), same, near, twice) if len(tokens) >= MIN_TOKENS else math.nan
    return score, count / max(breaks, 1)


def order_tokens(line: str) -> tuple[list[str], int]:
    """(tokens of a line, sentence marks and its end behind them). A token is what stands between white space, without
    the marks at its ends; an ideograph is one by itself.

    'He said: "no-one, 3.5"' -> [he, said, no-one, 3.5] of the lowered text."""
    flags = character_table()
    tokens: list[str] = []
    breaks, run, open_sentence = 0, "", False
    for character in line + "\n":
        flag = int(flags[ord(character)])
        if flag & (SPACE | IDEOGRAPH):
            token = _stripped(run, flags)
            if token:
                tokens.append(token)
            run = ""
        if flag & IDEOGRAPH:
            tokens.append(character)
        elif not flag & SPACE:
            run += character
        if flag & (IDEOGRAPH | WORD):
            open_sentence = True
        elif flag & (TERMINAL | LINE_END) and open_sentence:
            breaks, open_sentence = breaks + 1, False
    return tokens, breaks


def _stripped(token: str, flags: np.ndarray) -> str:
    inside = [at for at, character in enumerate(token) if flags[ord(character)] & WORD]
    return token[inside[0] : inside[-1] + 1] if inside else ""


@cached_njit(nogil=True)
def order_score(num_tokens, same, near, twice):
    """Standard deviations away from a random order. same: ordered pairs of places with the same word, near: those at
    most NEAR places apart (each counted once), twice: ordered pairs of places with the same pair of words.

    Of n places, two hold the same word with p = same / (n (n - 1)); in random order near is about NEAR n p and twice
    n n p p, both nearly Poisson (so a variance is the mean; 0.5 is added for means near 0)."""
    p = same / (num_tokens * (num_tokens - 1.0))
    near_mean = NEAR * num_tokens * p
    pair_mean = num_tokens * num_tokens * p * p / 2
    near_score = (near_mean - near) / math.sqrt(near_mean + 0.5)
    pair_score = (twice / 2 - pair_mean) / math.sqrt(pair_mean + 0.5)
    return (near_score + min(pair_score, MAX_PAIR_SCORE)) / min(1.0, num_tokens / FULL_TOKENS)


@cached_njit(nogil=True)
def _score_texts(text, offsets, flags, work, values):
    """Fills values float64[N, 2] of texts that are not empty."""
    keys, pairs, stamp, most = work.keys, work.pairs, 0, 0
    for k in range(len(offsets) - 1):
        if stamp + 2 > LAST_STAMP:
            work.entries[: 1 << table_bits(most)], stamp, most = ZERO, 0, 0
        num_tokens, count, breaks = _tokens(text, offsets[k], offsets[k + 1] - 1, flags, keys)
        if count == 0:
            continue
        values[k, 1] = count / max(breaks, 1)
        if num_tokens < MIN_TOKENS:
            continue
        near = 0
        for gap in range(1, NEAR + 1):
            for i in range(num_tokens - gap):
                near += keys[i] == keys[i + gap]
        for i in range(num_tokens - 1):
            pairs[i] = folded_product(keys[i] ^ GROUP_MIX, keys[i + 1])
        same = _equal_pairs(keys, num_tokens, work, stamp + 1)
        twice = _equal_pairs(pairs, num_tokens - 1, work, stamp + 2)
        stamp, most = stamp + 2, max(most, num_tokens)
        values[k, 0] = order_score(num_tokens, same, near, twice)


@cached_njit(nogil=True)
def _equal_pairs(keys, num_keys, work, stamp):
    """Ordered pairs of places with equal keys."""
    keys_at, entries, counts = pointer(keys, 0), pointer(work.entries, 0), pointer(work.counts, 0)
    bits, total = table_bits(num_keys), np.int64(0)
    for i in range(num_keys):
        counts[i] = 0
        first = first_place(entries, bits, stamp, keys_at, i)
        total += counts[first]  # pairs of this place and each one before it
        counts[first] += 1
    return 2 * total


@cached_njit(nogil=True)
def _tokens(text, start, end, flags, keys):
    """Return (number of tokens in long lines, number of tokens, number of breaks); fills keys with the hashes of the
    tokens in long lines."""
    length, count, line_start, breaks, open_sentence = 0, 0, 0, 0, False
    first, last = np.int64(-1), np.int64(-1)  # of the open token's word characters
    at = start
    while at < end:
        code, size = decode(text, at)
        flag = flags[code]
        if flag & (SPACE | IDEOGRAPH):
            if first >= 0:
                keys[length] = hash_bytes(text, first, last)
                length, count = length + 1, count + 1
            first = np.int64(-1)
            if flag & IDEOGRAPH:
                keys[length] = hash_bytes(text, at, at + size)
                length, count = length + 1, count + 1
        elif flag & WORD:
            first = at if first < 0 else first
            last = at + size
        if flag & (IDEOGRAPH | WORD):
            open_sentence = True
        elif flag & (TERMINAL | LINE_END) and open_sentence:
            breaks += 1
            open_sentence = False
        if code == NEWLINE:
            length = length if length - line_start >= MIN_LINE_TOKENS else line_start
            line_start = length
        at += size
    if first >= 0:
        keys[length] = hash_bytes(text, first, last)
        length, count = length + 1, count + 1
    length = length if length - line_start >= MIN_LINE_TOKENS else line_start
    return length, count, breaks + open_sentence
