"""Sums of a fastText model's rows over the tokens of a line: of their words, character n-grams and word n-grams.

A token's sum is added as a whole, so a sum that comes from the cache gives the same bits as one computed anew."""

from typing import Any, NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.bits import ONE, ZERO, add_floats, bytes_below
from gristmill.data_pipeline.signals.fasttext_model import (
    BUCKETS,
    EOL,
    FNV_START,
    MAX_CHARS,
    MIN_CHARS,
    NUM_WORDS,
    WIDTH,
    WORD_NGRAMS,
    hash_token,
    next_hash,
)
from gristmill.data_pipeline.signals.intrinsics import folded_product, load64, ones, pointer, prefetch
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

LABEL_PREFIX = np.frombuffer(b"__label__", np.uint8)
WORD_NGRAM_FACTOR = np.uint64(116049371)
# Tokens of up to 24 bytes are cached. Of 65,536 entries 93 % of English words are found, of 16,384 86 %.
CACHED_BYTES, CACHE_BYTES, ENTRY_BYTES = 24, 8 << 20, 32
KEY_FACTOR = np.uint64(0x9E3779B97F4A7C15)
TOKEN, LEFT_OUT, LINE_END = 0, 1, 2  # kinds of tokens; a label is left out, </s> ends the line


class Pointers(NamedTuple):
    """The arrays inside a kernel: numba would count references to arrays at every call."""

    entry_text: Any
    entry_offsets: Any
    entry_table: Any
    table_mask: Any
    bucket_marks: Any
    has_dropped: Any
    input_rows: Any
    settings: Any
    cache_keys: Any
    cache_sums: Any
    cache_mask: Any
    token: Any
    token_sum: Any
    hidden: Any


@cached_njit(nogil=True, forceinline=True)
def pointers(model, cache, work):
    return Pointers(
        pointer(model.entry_text, 0),
        pointer(model.entry_offsets, 0),
        pointer(model.entry_table, 0),
        len(model.entry_table) - 1,
        pointer(model.bucket_marks, 0),
        len(model.bucket_marks) > 0,
        pointer(model.input_rows, 0),
        pointer(model.settings, 0),
        pointer(cache.keys, 0),
        pointer(cache.sums, 0),
        len(cache.keys) - 1,
        pointer(work.token, 0),
        pointer(work.token_sum, 0),
        pointer(work.hidden, 0),
    )


@cached_njit(nogil=True)
def add_tokens(at, text, work, num_tokens):
    """Adds the rows of all tokens and of the line's end to at.hidden; returns how many rows."""
    rows, num_hashes = 0, 0
    end_of_line, hashes = at.settings[EOL], work.hashes
    starts, ends, entries = pointer(work.starts, 0), pointer(work.ends, 0), pointer(work.entries, 0)
    # the cache is larger than those of the processor: all its lines are on their way before the first is needed
    for k in range(num_tokens):
        entries[k] = _cache_entry(at, text, starts[k], ends[k])
    for k in range(num_tokens):
        kind, token_rows, token_hash = _add_token(at, text, starts[k], ends[k], entries[k])
        rows += token_rows
        if kind == LEFT_OUT:
            continue
        if len(hashes) and not (kind == LINE_END and end_of_line >= 0):
            hashes[num_hashes] = np.int32(np.uint32(token_hash))
            num_hashes += 1
        if kind == LINE_END:
            break
    if end_of_line >= 0:
        rows += _add_row(at, at.hidden, end_of_line)
    if len(hashes):
        hashes[num_hashes] = np.int32(np.uint32(_end_of_line_hash()))
        rows += _add_word_ngrams(at, hashes, num_hashes + 1)
    return rows


@cached_njit(nogil=True, forceinline=True)
def _cache_key(text, start, end):
    """The first 24 bytes of the token text[start:end]."""
    size = end - start
    first = load64(text, start) & bytes_below(min(size, 8))
    second = load64(text, start + 8) & bytes_below(min(max(size - 8, 0), 8))
    third = load64(text, start + 16) & bytes_below(min(max(size - 16, 0), 8))
    return first, second, third


@cached_njit(nogil=True, forceinline=True)
def _cache_entry(at, text, start, end):
    """Where the token's sum is in the cache if it is there; the processor starts to load it."""
    first, second, third = _cache_key(text, start, end)
    mixed = folded_product(first ^ KEY_FACTOR, (second ^ third * KEY_FACTOR) + KEY_FACTOR)
    entry = np.int64(mixed) & at.cache_mask
    prefetch(at.cache_keys, 4 * entry)
    prefetch(at.cache_sums, entry * at.settings[WIDTH])
    return entry


@cached_njit(nogil=True, forceinline=True)
def _add_token(at, text, start, end, entry):
    """Adds the sum of the token text[start:end]; returns (kind, number of rows, hash)."""
    if end - start > CACHED_BYTES:
        return _add_uncached(at, text, start, end)
    first, second, third = _cache_key(text, start, end)
    place, width = 4 * entry, at.settings[WIDTH]
    if at.cache_keys[place] == first and at.cache_keys[place + 1] == second and at.cache_keys[place + 2] == third:
        add_floats(at.hidden, 0, at.cache_sums, entry * width, width)
        cached_key = at.cache_keys[place + 3]
        return TOKEN, np.int64(cached_key & np.uint64(0xFFFFFFFF)), cached_key >> np.uint64(32)
    kind, rows, token_hash = _add_uncached(at, text, start, end)
    if kind == TOKEN:
        at.cache_keys[place], at.cache_keys[place + 1], at.cache_keys[place + 2] = first, second, third
        at.cache_keys[place + 3] = token_hash << np.uint64(32) | np.uint64(rows)
        for i in range(width):
            at.cache_sums[entry * width + i] = at.token_sum[i]
    return kind, rows, token_hash


@cached_njit(nogil=True)
def _add_uncached(at, text, start, end):
    """_add_token without the cache; at.token_sum has the token's sum."""
    token, width, num_words = at.token, at.settings[WIDTH], at.settings[NUM_WORDS]
    size = end - start
    token[0], token[size + 1] = 0x3C, 0x3E
    for i in range(size):
        token[1 + i] = text[start + i]
    token_hash = hash_token(token, 1, size + 1)
    entry = _find(at, size, token_hash)
    if entry >= 0 and entry == at.settings[EOL]:
        return LINE_END, 0, token_hash
    if entry >= num_words or (entry < 0 and _is_label(token, size)):
        return LEFT_OUT, 0, token_hash
    if entry < 0 and _is_end_of_line(token, size):
        return LINE_END, 0, token_hash
    for i in range(width):
        at.token_sum[i] = np.float32(0)
    rows = _add_row(at, at.token_sum, entry) if entry >= 0 else 0
    rows += _add_ngrams(at, size + 2)
    add_floats(at.hidden, 0, at.token_sum, 0, width)
    return TOKEN, rows, token_hash


@cached_njit(nogil=True, forceinline=True)
def _add_row(at, total, row):
    add_floats(total, 0, at.input_rows, row * at.settings[WIDTH], at.settings[WIDTH])
    return 1


@cached_njit(nogil=True)
def _add_ngrams(at, stop):
    """Adds the rows of the character n-grams of at.token[:stop] to at.token_sum (dictionary.cc, computeSubwords)."""
    rows, token = 0, at.token
    min_chars, max_chars, buckets = at.settings[MIN_CHARS], at.settings[MAX_CHARS], at.settings[BUCKETS]
    inverse = 1.0 / max(buckets, 1)
    start = 0
    while start < stop:
        value, place, count = FNV_START, start, 1
        while place < stop and count <= max_chars:
            value = next_hash(value, token[place])
            place += 1
            while place < stop and token[place] & 0xC0 == 0x80:
                value = next_hash(value, token[place])
                place += 1
            if count >= min_chars and not (count == 1 and (start == 0 or place == stop)):
                rows += _add_bucket(at, at.token_sum, _remainder(np.int64(value), buckets, inverse))
            count += 1
        start += 1
        while start < stop and token[start] & 0xC0 == 0x80:
            start += 1
    return rows


@cached_njit(nogil=True, forceinline=True)
def _remainder(value, divisor, inverse):
    """value % divisor of a value below 2**32, by a product: a division takes as long as all the rest."""
    left = value - np.int64(value * inverse) * divisor
    if left < 0:
        return left + divisor
    return left - divisor if left >= divisor else left


@cached_njit(nogil=True, forceinline=True)
def _add_bucket(at, total, bucket):
    if not at.has_dropped:
        return _add_row(at, total, at.settings[NUM_WORDS] + bucket)
    marks, mark = at.bucket_marks[2 * (bucket >> 6)], ONE << np.uint64(bucket & 63)
    if marks & mark == ZERO:
        return 0
    row = np.int64(at.bucket_marks[2 * (bucket >> 6) + 1] + ones(marks & (mark - ONE)))
    return _add_row(at, total, at.settings[NUM_WORDS] + row)


@cached_njit(nogil=True)
def _add_word_ngrams(at, hashes, num_hashes):
    """dictionary.cc, addWordNgrams."""
    rows = 0
    for i in range(num_hashes):
        value = np.uint64(np.int64(hashes[i]))
        for j in range(i + 1, min(num_hashes, i + at.settings[WORD_NGRAMS])):
            value = value * WORD_NGRAM_FACTOR + np.uint64(np.int64(hashes[j]))
            rows += _add_bucket(at, at.hidden, np.int64(value % np.uint64(at.settings[BUCKETS])))
    return rows


@cached_njit(nogil=True, forceinline=True)
def _end_of_line_hash():
    value = FNV_START
    for byte in (0x3C, 0x2F, 0x73, 0x3E):
        value = next_hash(value, np.uint8(byte))
    return value


@cached_njit(nogil=True, forceinline=True)
def _is_end_of_line(token, size):
    return size == 4 and token[1] == 0x3C and token[2] == 0x2F and token[3] == 0x73 and token[4] == 0x3E


@cached_njit(nogil=True, forceinline=True)
def _is_label(token, size):
    """Whether an unknown token begins like a label: fastText leaves it out."""
    if size < len(LABEL_PREFIX):
        return False
    same = 0
    while same < len(LABEL_PREFIX) and token[1 + same] == LABEL_PREFIX[same]:
        same += 1
    return same == len(LABEL_PREFIX)


@cached_njit(nogil=True, forceinline=True)
def _find(at, size, token_hash):
    """The dictionary's entry of the token, or -1."""
    slot = np.int64(token_hash) & at.table_mask
    while at.entry_table[slot] >= 0:
        entry = np.int64(at.entry_table[slot])
        start = at.entry_offsets[entry]
        if at.entry_offsets[entry + 1] - 1 - start == size:
            i = 0
            while i < size and at.entry_text[start + i] == at.token[1 + i]:
                i += 1
            if i == size:
                return entry
        slot = (slot + 1) & at.table_mask
    return np.int64(-1)
