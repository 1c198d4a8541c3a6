"""Hashed word n-grams of texts, weighed by a linear or an n-gram model, in one compiled pass over UTF-8 bytes.

A token is a run of word characters (letters, digits, marks, `_`), one character of a script written without spaces, or
one punctuation mark; A to Z count as a to z. An n-gram's slot is the first bits of a hash of its tokens."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from gristmill.data_pipeline.signals.bits import (
    BLOCK,
    ONE,
    PADDING,
    TOP,
    ZERO,
    TextArrays,
    TextBuffer,
    below,
    decode,
    first_bit,
    hash_bytes,
    without_first,
)
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, SPACE, WORD, character_table
from gristmill.data_pipeline.signals.intrinsics import (
    bytes_within,
    copy_lowered,
    folded_product,
    letters_within,
    pointer,
)
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Fractional digits of e and of the square root of 2.
NGRAM_MIX, TOKEN_MIX = np.uint64(0xB7E151628AED2A6B), np.uint64(0x6A09E667F3BCC908)
MAX_NGRAM = 3


class TokenWork(NamedTuple):
    """Pointers for a text of C bytes. lowered: uint8[C + 2 * BLOCK]; hashes: uint64[C + 1], of its tokens."""

    lowered: Any
    hashes: Any


def linear_sums(texts: TextBuffer, weights: np.ndarray, ngram: int) -> tuple[np.ndarray, np.ndarray]:
    """(float64[N], the sum of the weights of each text's n-grams of up to `ngram` tokens; int64[N], their number).

    weights: float32[2**b], one for each slot."""
    sums, counts = np.zeros(len(texts)), np.zeros(len(texts), np.int64)
    arrays = TextArrays(texts.text, texts.offsets, character_table())
    _linear_sums(arrays, _work_arrays(texts), weights, (64 - _bits(weights), ngram), sums, counts)
    return sums, counts


def ngram_slots(texts: TextBuffer, bits: int, ngram: int) -> Iterator[np.ndarray]:
    """For each text int64[n-grams], their slots of 2**bits."""
    work = _work_arrays(texts)
    slots = np.empty(ngram * len(work[1]), np.int64)
    for start, stop in pairwise(texts.offsets.tolist()):
        arrays = TextArrays(texts.text, np.array([start, stop]), character_table())
        yield slots[: _ngram_slots(arrays, work, (64 - bits, ngram), slots)].copy()


def _bits(weights: np.ndarray) -> int:
    return len(weights).bit_length() - 1


def _work_arrays(texts: TextBuffer) -> tuple[np.ndarray, np.ndarray]:
    longest = int(np.diff(texts.offsets).max(initial=1))
    return np.empty(longest + 2 * BLOCK + PADDING, np.uint8), np.empty(longest + 1, np.uint64)


@cached_njit(nogil=True)
def _linear_sums(texts, work_arrays, weights, settings, sums, counts):
    work = TokenWork(pointer(work_arrays[0], 0), pointer(work_arrays[1], 0))
    text, flags, table = pointer(texts.text, 0), pointer(texts.flags, 0), pointer(weights, 0)
    shift, ngram = np.uint64(settings[0]), settings[1]
    hashes = work.hashes
    for k in range(len(sums)):
        num_tokens = _token_hashes(text, texts.offsets[k], texts.offsets[k + 1] - 1, flags, work)
        total = 0.0
        for i in range(num_tokens):
            value = hashes[i]
            total += table[np.int64(value >> shift)]
            for j in range(i + 1, min(i + ngram, num_tokens)):
                value = _extended(value, hashes[j])
                total += table[np.int64(value >> shift)]
        sums[k] = total
        for size in range(1, ngram + 1):
            counts[k] += max(0, num_tokens - size + 1)


@cached_njit(nogil=True)
def _ngram_slots(texts, work_arrays, settings, slots):
    """The slots of the only text, in the order in which `_linear_sums` adds them; returns how many."""
    work = TokenWork(pointer(work_arrays[0], 0), pointer(work_arrays[1], 0))
    shift, ngram = np.uint64(settings[0]), settings[1]
    text, flags, hashes = pointer(texts.text, 0), pointer(texts.flags, 0), work.hashes
    num_tokens = _token_hashes(text, texts.offsets[0], texts.offsets[1] - 1, flags, work)
    count = 0
    for i in range(num_tokens):
        value = hashes[i]
        slots[count] = np.int64(value >> shift)
        count += 1
        for j in range(i + 1, min(i + ngram, num_tokens)):
            value = _extended(value, hashes[j])
            slots[count] = np.int64(value >> shift)
            count += 1
    return count


@cached_njit(nogil=True, forceinline=True)
def _extended(value, token_hash):
    """Hash of an n-gram from that of its first n - 1 tokens and that of its last."""
    return folded_product(value ^ NGRAM_MIX, token_hash ^ TOKEN_MIX)


@cached_njit(nogil=True)
def _token_hashes(text, start, end, flags, work):
    """Writes the hash of each token of text[start:end] to work.hashes; returns how many."""
    lowered, hashes = work.lowered, work.hashes
    count, first = 0, np.int64(0)  # first: of the open token, in `lowered`
    spilled_word, spilled_single = ZERO, ZERO
    word_before, solid_before = ZERO, ZERO  # of the byte before the block, as 0 or 1
    for base in range(start, end + 1, BLOCK):
        inside = below(end - base)
        copy_lowered(lowered, base - start, text, base)
        space = bytes_within(text, base, 0x09, 5) | bytes_within(text, base, 0x1C, 5)
        word = letters_within(text, base, 0x61, 26) | bytes_within(text, base, 0x30, 10)
        word = (word | bytes_within(text, base, 0x5F, 1)) & inside | spilled_word
        ascii_bytes = bytes_within(text, base, 0, 0x80)
        first_of_single = ascii_bytes & ~space & ~word & inside
        single = first_of_single | spilled_single
        spilled_word = spilled_single = ZERO
        beyond = bytes_within(text, base, 0xC0, 0x40) & inside
        while beyond != ZERO:
            place = np.uint64(first_bit(beyond))
            beyond = without_first(beyond)
            code, size = decode(text, base + np.int64(place))
            flag = flags[code]
            whole = (ONE << np.uint64(size)) - ONE
            spilled = whole >> (np.uint64(BLOCK) - place) if place != ZERO else ZERO
            if flag & SPACE:
                continue
            if flag & WORD and not flag & IDEOGRAPH:
                word |= whole << place
                spilled_word = spilled
            else:
                single |= whole << place
                first_of_single |= ONE << place
                spilled_single = spilled
        solid = word | single
        starts = word & ~(word << ONE | word_before) | first_of_single
        stops = (starts | ~solid) & (solid << ONE | solid_before)
        word_before, solid_before = word >> TOP, solid >> TOP
        events = starts | stops
        while events != ZERO:
            place = np.uint64(first_bit(events))
            events = without_first(events)
            at = base - start + np.int64(place)
            if stops >> place & ONE:
                hashes[count] = hash_bytes(lowered, first, at)
                count += 1
            if starts >> place & ONE:
                first = at
    return count


# N-grams of a language model: their log2-probabilities, and the weights of those that are longer and unknown.


class Ngrams(NamedTuple):
    """All n-grams of one length, in the texts' order, by the hashes of: the whole, all but its first token, all but its
    last one."""

    whole: np.ndarray
    shorter: np.ndarray
    context: np.ndarray

    def __len__(self) -> int:
        return len(self.whole)

    def counted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(distinct n-grams in rising order, their shorter ones, their contexts, their counts)."""
        known, first, counts = np.unique(self.whole, return_index=True, return_counts=True)
        return known, self.shorter[first], self.context[first], counts

    def context_counts(self, context: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(distinct contexts, the place of each n-gram's context among them, how often each is continued)."""
        contexts, place = np.unique(context, return_inverse=True)
        return contexts, place, np.bincount(place, counts, len(contexts))


class LogTable(NamedTuple):
    """Open addressing by the key. keys: uint64[2**b], 0 for a free slot; log_p, backoff: float32[2**b], base 2."""

    keys: np.ndarray
    log_p: np.ndarray
    backoff: np.ndarray

    @classmethod
    def of(cls, keys: np.ndarray, log_p: np.ndarray, backoff: np.ndarray) -> Self:
        """Does not depend on the order of the keys, but for collisions. The table is at most half full."""
        size = 1 << max(4, (2 * len(keys)).bit_length())
        table = cls(np.zeros(size, np.uint64), np.zeros(size, np.float32), np.zeros(size, np.float32))
        order = np.argsort(keys)
        _fill_log_table(table, keys[order], log_p[order], backoff[order])
        return table


def ngram_keys(texts: TextBuffer, order: int) -> list[Ngrams]:
    """The n-grams of 1 to `order` tokens; of single tokens shorter and context are empty."""
    work = _work_arrays(texts)
    by_length: list[list[list[np.ndarray]]] = [[] for _ in range(order)]
    for start, stop in pairwise(texts.offsets.tolist()):
        arrays = TextArrays(texts.text, np.array([start, stop]), character_table())
        lengths = [work[1][: _only_token_hashes(arrays, work)].copy()]
        for size in range(1, order):
            lengths.append(_extended_all(lengths[-1][: max(len(lengths[0]) - size, 0)], lengths[0][size:]))
        by_length[0].append([lengths[0], *[lengths[0][:0]] * 2])
        for size in range(1, order):
            count = len(lengths[size])
            by_length[size].append([lengths[size], lengths[size - 1][1 : count + 1], lengths[size - 1][:count]])
    return [Ngrams(*(np.concatenate(part) for part in zip(*parts, strict=True))) for parts in by_length]


def mean_log_probabilities(texts: TextBuffer, table: LogTable, order: int, unknown: float) -> np.ndarray:
    """float64[N]: mean log2-probability of each text's tokens; NaN for a text without tokens."""
    means = np.full(len(texts), np.nan)
    arrays = TextArrays(texts.text, texts.offsets, character_table())
    _mean_log_probabilities(arrays, _work_arrays(texts), table, (order, unknown), means)
    return means


@cached_njit(nogil=True)
def _only_token_hashes(texts, work_arrays):
    work = TokenWork(pointer(work_arrays[0], 0), pointer(work_arrays[1], 0))
    return _token_hashes(pointer(texts.text, 0), texts.offsets[0], texts.offsets[1] - 1, pointer(texts.flags, 0), work)


@cached_njit(nogil=True)
def _extended_all(values, token_hashes):
    extended = np.empty(len(values), np.uint64)
    for i in range(len(values)):
        extended[i] = _extended(values[i], token_hashes[i])
    return extended


@cached_njit(nogil=True)
def _fill_log_table(table, keys, log_p, backoff):
    mask = np.uint64(len(table.keys) - 1)
    for k in range(len(keys)):
        slot = keys[k] & mask
        while table.keys[slot] != ZERO and table.keys[slot] != keys[k]:
            slot = (slot + ONE) & mask
        table.keys[slot], table.log_p[slot], table.backoff[slot] = keys[k], log_p[k], backoff[k]


@cached_njit(nogil=True, forceinline=True)
def _slot_of(keys, mask, key):
    """The key's slot, or -1."""
    slot = key & mask
    while keys[slot] != ZERO:
        if keys[slot] == key:
            return np.int64(slot)
        slot = (slot + ONE) & mask
    return np.int64(-1)


@cached_njit(nogil=True)
def _mean_log_probabilities(texts, work_arrays, table, settings, means):
    work = TokenWork(pointer(work_arrays[0], 0), pointer(work_arrays[1], 0))
    text, flags, hashes = pointer(texts.text, 0), pointer(texts.flags, 0), work.hashes
    keys, log_p, backoff = pointer(table.keys, 0), pointer(table.log_p, 0), pointer(table.backoff, 0)
    mask, order, unknown = np.uint64(len(table.keys) - 1), settings[0], settings[1]
    for k in range(len(means)):
        num_tokens = _token_hashes(text, texts.offsets[k], texts.offsets[k + 1] - 1, flags, work)
        total = 0.0
        for i in range(num_tokens):
            length = min(order, i + 1)
            slot = np.int64(-1)
            while length > 0:
                first = i + 1 - length
                context, key = ZERO, hashes[first]
                for j in range(first + 1, i + 1):
                    context, key = key, _extended(key, hashes[j])
                slot = _slot_of(keys, mask, key)
                if slot >= 0:
                    total += log_p[slot]
                    break
                if length > 1:
                    slot = _slot_of(keys, mask, context)
                    total += backoff[slot] if slot >= 0 else 0.0
                    slot = np.int64(-1)
                length -= 1
            if slot < 0:
                total += unknown
        if num_tokens:
            means[k] = total / num_tokens
