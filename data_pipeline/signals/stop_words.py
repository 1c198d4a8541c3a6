"""Stop words of the detected language: Gopher requires two of eight English ones; other languages have their own.
Word order: whether they are in the order of written text.

The lists and their sources are in stop_words.txt. Texts in a language without a list get null."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.signals.bits import (
    BLOCK,
    GROUP_MIX,
    NEWLINE,
    ONE,
    ZERO,
    Span,
    TextArrays,
    TextBuffer,
    below,
    decode,
    first_bit,
    hash_bytes,
    joined,
    lowered,
    without_first,
)
from gristmill.data_pipeline.signals.characters import (
    IDEOGRAPH,
    JOINER,
    LINE_END,
    SPACE,
    TERMINAL,
    WORD,
    character_table,
)
from gristmill.data_pipeline.signals.intrinsics import bytes_within, folded_product, letters_within, ones, pointer
from gristmill.data_pipeline.signals.ngrams import LAST_STAMP, first_place, table_bits
from gristmill.data_pipeline.signals.reference import split_words
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

STOP_WORDS_PATH = Path(__file__).with_name("stop_words.txt")
STOP_WORD_FIELDS = [
    pa.field("num_language_stop_words", pa.int64()),  # how many different ones
    pa.field("language_stop_word_ratio", pa.float64()),  # share of the words (those with a letter, digit or ideograph)
]
MAX_WORDS = 64
SLOT_BITS = 10  # of a language's table, in which each of its words has a slot of its own
SLOT_SHIFT = np.uint64(64 - SLOT_BITS)
FIRST_FACTOR, NEXT_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1342543DE82EF95)


class StopWordTable(NamedTuple):
    """Hash table of the stop words of L languages, in the order of `languages`.

    factors: uint64[L], a word's slot is hash * factor >> SLOT_SHIFT.
    hashes: uint64[L, slots], 0 for a free one; bits: uint8[L, slots], the word's place in its list. by_blocks: bool[L],
    whether each word begins with a character that words begin with. lowered: whether texts of the language are lowered
    first."""

    languages: dict[str, int]
    factors: np.ndarray
    hashes: np.ndarray
    bits: np.ndarray
    by_blocks: np.ndarray
    lowered: tuple[bool, ...]


def stop_word_columns(
    texts: TextBuffer, languages: Sequence[str], table: StopWordTable | None = None
) -> list[pa.Array]:
    """The columns STOP_WORD_FIELDS; null where there is no list for the text's language. table: ours if none is given.
    Words are those of signals/reference.split_words: -the is not the.

    "The mill and the river" in English -> 2 different ones (the, and), 3 of 5 words."""
    table = table or stop_word_table()
    lists_N = np.array([table.languages.get(language, -1) for language in languages], dtype=np.int64)
    lowered_N = (lists_N >= 0) & np.array([*table.lowered, False])[lists_N]
    counts_N3 = np.zeros((len(texts), 3), dtype=np.int64)
    _count(_arrays(texts), np.where(lowered_N, -1, lists_N), table[1:5], counts_N3)
    _count(_arrays(lowered(texts, lowered_N)), np.where(lowered_N, lists_N, -1), table[1:5], counts_N3)
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
    shape = (len(lists), 1 << SLOT_BITS)
    factors, hashes, bits = np.zeros(len(lists), np.uint64), np.zeros(shape, np.uint64), np.zeros(shape, np.uint8)
    by_blocks, flags = np.zeros(len(lists), np.bool_), character_table()
    for row, words in enumerate(lists.values()):
        buffer, offsets = joined([word.encode() for word in dict.fromkeys(words[:MAX_WORDS])])
        factors[row] = _fill(buffer, offsets, hashes[row], bits[row])
        by_blocks[row] = all(flags[ord(word[0])] & (WORD | IDEOGRAPH) for word in words)
    places = {language: row for row, language in enumerate(lists)}
    return StopWordTable(places, factors, hashes, bits, by_blocks, tuple(language in lowered for language in lists))


def matched_words(words: Sequence[str]) -> tuple[str, ...]:
    """Those that are one word by our rule. [de, l', 的, 私は] -> [de, 的]: another tokenizer cuts the others so."""
    return tuple(dict.fromkeys(word for word in words if split_words(word, "unicode") == [word]))


@cached_njit(nogil=True)
def _fill(text, offsets, hashes, bits):
    """Fills the table of these words, which differ; returns its factor, the first that gives each a slot of its own."""
    factor, placed = FIRST_FACTOR, 0
    while placed < len(offsets) - 1:
        key = hash_bytes(text, offsets[placed], offsets[placed + 1] - 1)
        slot = np.int64((key * factor) >> SLOT_SHIFT)
        if hashes[slot] == ZERO:
            hashes[slot], bits[slot] = key, placed
            placed += 1
        else:
            hashes[:], placed = ZERO, 0
            factor = factor * NEXT_FACTOR | ONE
    return factor


@cached_njit(nogil=True)
def _count(texts, lists, tables, counts):
    """Adds to counts int64[N, 3]: different stop words, stop words, words. lists: -1 for a text that is left out."""
    factors, hashes, bits, by_blocks = tables
    text, flags = pointer(texts.text, 0), pointer(texts.flags, 0)
    for k in range(len(lists)):
        place = lists[k]
        if place >= 0:
            span = Span(text, texts.offsets[k], texts.offsets[k + 1] - 1, flags)
            first = place << SLOT_BITS
            table = (factors[place], pointer(hashes, first), pointer(bits, first))
            _count_text(span, table, by_blocks[place], pointer(counts, 3 * k))


@cached_njit(nogil=True)
def _count_text(span, table, by_blocks, counts):
    text, begin, end, flags = span
    at, seen = begin, ZERO
    while at < end:
        behind_sign = at > begin and _is_sign(text[at - 1])  # of a block: signs are taken with their word below
        if by_blocks and bytes_within(text, at, 0x80, 0x80) == ZERO:
            stop, seen = _count_block(text, at, end, behind_sign, table, seen, counts)
            if stop > at:
                at = stop
                continue
        code, size = decode(text, at)
        flag = flags[code]
        first = at
        at += size
        if flag & SPACE:
            continue
        if _is_sign(code):
            while at < end and _is_sign(text[at]):
                at += 1
            if at < end:
                flag = flags[decode(text, at)[0]] & WORD
        if flag & WORD:
            at = _word_end(text, at, end, flags)
        counts[2] += flag & (WORD | IDEOGRAPH) != 0
        if not (behind_sign and flag & WORD):
            seen = _look_up(text, first, at, table, seen, counts)
    counts[0] += np.int64(ones(seen))


@cached_njit(nogil=True, forceinline=True)
def _is_sign(code):
    """True for - and @, which begin the word behind them: -the is not the."""
    return code == 0x2D or code == 0x40


@cached_njit(nogil=True, forceinline=True)
def _count_block(text, at, end, behind_sign, table, seen, counts):
    """Counts the words of an ASCII block, which begins where a word may begin, behind_sign or not. Returns (the start
    of the word that may go on behind it, `at` if that is the first; the stop words seen). Words are runs as in
    words.scan_words; none behind a sign is a stop word, since all of these begin with a character of words."""
    inside = below(end - at)
    word = letters_within(text, at, 0x61, 26) | bytes_within(text, at, 0x30, 10) | bytes_within(text, at, 0x5F, 1)
    word &= inside
    at_sign = bytes_within(text, at, 0x40, 1)
    joiner = (
        bytes_within(text, at, 0x2E, 2) | bytes_within(text, at, 0x27, 1) | bytes_within(text, at, 0x3A, 1) | at_sign
    )
    run = word | joiner & (word << ONE) & (word >> ONE)
    signs = bytes_within(text, at, 0x2D, 1) | at_sign
    bare = ~(signs << ONE | np.uint64(behind_sign))
    starts, stops = run & ~(run << ONE), ~run & (run << ONE)
    whole = end - at < BLOCK
    limit = at + BLOCK - 2  # a run that ends there or later may go on behind a joiner
    while starts != ZERO:
        first = at + first_bit(starts)
        stop = at + first_bit(stops)  # behind the block if the run does not end in it
        if not whole and stop >= limit:
            return first, seen
        counts[2] += 1
        if starts & -starts & bare:
            seen = _look_up(text, first, stop, table, seen, counts)
        starts, stops = without_first(starts), without_first(stops)
    return (end if whole else limit), seen


@cached_njit(nogil=True, forceinline=True)
def _look_up(text, first, stop, table, seen, counts):
    """Counts text[first:stop] if it is a stop word; returns the bits of those seen. There is no branch."""
    factor, hashes, bits = table
    key = hash_bytes(text, first, stop)
    slot = np.int64((key * factor) >> SLOT_SHIFT)
    is_stop_word = hashes[slot] == key
    counts[1] += is_stop_word
    return seen | np.uint64(is_stop_word) << np.uint64(bits[slot])


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


# Word order: a score that distinguishes written text from the same words shuffled.
#
# Two things hold in every language and need no word list: a frequent word hardly ever follows itself, and pairs of
# words come back far more often than the frequencies of the two would give. Both are compared with what a random order
# of the same words gives, in standard deviations; a random order has a value near 0, a page of text 5 and more.


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
