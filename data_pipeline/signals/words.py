"""Words in one pass over UTF-8 bytes: their hashes and lengths, and what Gopher counts about them."""

import numba
import numpy as np

from gristmill.data_pipeline.intrinsics import load64
from gristmill.data_pipeline.signals.bits import (
    HIGH,
    ZERO,
    bytes_below,
    character_start,
    decode,
    digits,
    first_marked,
    hash_bytes,
    letters,
    space_or_special,
    underscores,
)
from gristmill.data_pipeline.signals.characters import (
    ALPHA,
    IDEOGRAPH,
    JOINER,
    LINE_END,
    PUNCTUATION,
    SPACE,
    TERMINAL,
    WORD,
)
from gristmill.data_pipeline.signals.reference import STOP_WORDS

# Gopher's stop words as groups, each in the slot its product with the factor points to: no two share one.
STOP_SHIFT = np.uint64(60)


def _stop_slots() -> tuple[np.uint64, np.ndarray, np.ndarray]:
    groups = [int.from_bytes(word.encode(), "little") for word in STOP_WORDS]
    factor = 0x9E3779B97F4A7C15
    while len({(group * factor % 2**64) >> 60 for group in groups}) < len(groups):
        factor = (factor * 0xD1342543DE82EF95 + 1) % 2**64 | 1
    slots, sizes = np.zeros(16, np.uint64), np.zeros(16, np.int64)
    for group, word in zip(groups, STOP_WORDS, strict=True):
        slots[(group * factor % 2**64) >> 60] = group
        sizes[(group * factor % 2**64) >> 60] = len(word)
    return np.uint64(factor), slots, sizes


STOP_FACTOR, STOP_SLOTS, STOP_SIZES = _stop_slots()

# Places in the counts that scan_words fills.
WORDS, PLAIN, PLAIN_CHARS, ALPHA_WORDS, STOPS, SENTENCES = range(6)
NUM_WORD_COUNTS = 6


@numba.njit(cache=True, nogil=True)
def scan_words(text, start, end, flags, unicode_words, hashes, lengths, counts):
    """Fills counts (see WORDS ...) and hashes, lengths of every word in text[start:end]; STOPS is a bit a slot.

    flags: the character table. text[end] is white space, and eight more bytes may be read. Needs room for end - start
    words."""
    counts[:] = 0
    at = start
    has_word = False  # a letter, digit or ideograph since the last sentence's end
    while at < end:
        code, size = decode(text, at)
        flag = flags[code]
        if flag & SPACE:
            if flag & LINE_END and has_word:
                counts[SENTENCES] += 1
                has_word = False
            at += size
            continue
        first = at
        at, ascii_only = _chunk_end(text, at, end, flags)
        if ascii_only and unicode_words:
            words = _ascii_words(text, first, at, hashes, lengths, counts)
        elif ascii_only:
            words = _ascii_chunk(text, first, at, hashes, lengths, counts)
        elif unicode_words:
            words = _unicode_words(text, first, at, flags, hashes, lengths, counts)
        else:
            words = _unicode_chunk(text, first, at, flags, hashes, lengths, counts)
        has_word = has_word or words
        if has_word and _ends_sentence(text, first, at, flags):
            counts[SENTENCES] += 1
            has_word = False
    if has_word:
        counts[SENTENCES] += 1


@numba.njit(cache=True, nogil=True, inline="always")
def _chunk_end(text, at, end, flags):
    """(where the white space after `at` begins, whether all before it is ASCII)."""
    ascii_only = True
    while True:
        marks = space_or_special(load64(text, at))
        if marks == ZERO:
            at += 8
            continue
        at += first_marked(marks)
        if at >= end:
            return end, ascii_only
        code, size = decode(text, at)
        if flags[code] & SPACE:
            return at, ascii_only
        ascii_only = ascii_only and size == 1
        at += size


@numba.njit(cache=True, nogil=True, inline="always")
def _add(text, start, end, num_chars, hashes, lengths, counts):
    """Notes one word; a stop word's bit is set without a branch."""
    place = counts[WORDS]
    hashes[place] = hash_bytes(text, start, end)
    lengths[place] = num_chars
    counts[WORDS] = place + 1
    size = end - start
    group = load64(text, start) & bytes_below(min(size, 8))
    slot = np.int64((group * STOP_FACTOR) >> STOP_SHIFT)
    counts[STOPS] |= np.int64((STOP_SLOTS[slot] == group) & (STOP_SIZES[slot] == size)) << slot


@numba.njit(cache=True, nogil=True, inline="always")
def _ascii_chunk(text, start, end, hashes, lengths, counts):
    """The chunk as one word. Returns whether it holds a letter, digit or underscore."""
    alpha = plain = word = ZERO
    for at in range(start, end, 8):
        group = load64(text, at)
        inside = bytes_below(min(end - at, 8))
        alpha |= letters(group) & inside
        plain |= digits(group) & inside
        word |= underscores(group) & inside
    plain |= alpha
    _add(text, start, end, end - start, hashes, lengths, counts)
    counts[ALPHA_WORDS] += alpha != ZERO
    if plain != ZERO:  # all other ASCII is punctuation
        counts[PLAIN] += 1
        counts[PLAIN_CHARS] += end - start
    return (plain | word) != ZERO


@numba.njit(cache=True, nogil=True, inline="always")
def _ascii_words(text, start, end, hashes, lengths, counts):
    """The chunk cut into words and punctuation. Returns whether it holds a letter, digit or underscore."""
    found = False
    at = start
    while at < end:
        first = at
        alpha = plain = ZERO
        while True:
            group = load64(text, at)
            letter, digit = letters(group), digits(group)
            size = first_marked(~(letter | digit | underscores(group)) & HIGH)
            inside = bytes_below(size)
            alpha |= letter & inside
            plain |= (letter | digit) & inside
            at += size
            if size == 8:
                continue
            if size == 0 and at == first:
                break
            joined = at + 1 < end and _is_joiner(text[at]) and _is_word_byte(text[at + 1])
            if not joined:
                break
            at += 1
        if at == first:
            at += 1
            _add(text, first, at, 1, hashes, lengths, counts)
            continue
        found = True
        _add(text, first, at, at - first, hashes, lengths, counts)
        counts[ALPHA_WORDS] += alpha != ZERO
        if plain != ZERO:
            counts[PLAIN] += 1
            counts[PLAIN_CHARS] += at - first
    return found


@numba.njit(cache=True, nogil=True, inline="always")
def _is_joiner(byte):
    """' . / : @"""
    return byte == 0x27 or byte == 0x2E or byte == 0x2F or byte == 0x3A or byte == 0x40


@numba.njit(cache=True, nogil=True, inline="always")
def _is_word_byte(byte):
    return 0x30 <= byte <= 0x39 or 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A or byte == 0x5F


@numba.njit(cache=True, nogil=True)
def _unicode_chunk(text, start, end, flags, hashes, lengths, counts):
    """As _ascii_chunk, for any characters."""
    num_chars, any_flags, all_flags = 0, 0, 0xFFFF
    at = start
    while at < end:
        code, size = decode(text, at)
        flag = np.int64(flags[code])
        any_flags |= flag
        all_flags &= flag
        num_chars += 1
        at += size
    _note(text, start, end, num_chars, any_flags, all_flags, hashes, lengths, counts)
    return any_flags & (WORD | IDEOGRAPH) != 0


@numba.njit(cache=True, nogil=True)
def _unicode_words(text, start, end, flags, hashes, lengths, counts):
    """As _ascii_words, for any characters."""
    found = False
    at = start
    while at < end:
        first = at
        code, size = decode(text, at)
        flag = np.int64(flags[code])
        any_flags = all_flags = flag
        num_chars = 1
        at += size
        if flag & (WORD | IDEOGRAPH):
            found = True
        if flag & WORD:
            while at < end:
                code, size = decode(text, at)
                flag = np.int64(flags[code])
                if not flag & WORD:
                    if not flag & JOINER or at + size >= end:
                        break
                    after, _ = decode(text, at + size)
                    if not flags[after] & WORD:
                        break
                any_flags |= flag
                all_flags &= flag
                num_chars += 1
                at += size
        _note(text, first, at, num_chars, any_flags, all_flags, hashes, lengths, counts)
    return found


@numba.njit(cache=True, nogil=True)
def _note(text, start, end, num_chars, any_flags, all_flags, hashes, lengths, counts):
    _add(text, start, end, num_chars, hashes, lengths, counts)
    counts[ALPHA_WORDS] += any_flags & ALPHA != 0
    if not all_flags & PUNCTUATION:
        counts[PLAIN] += 1
        counts[PLAIN_CHARS] += num_chars


@numba.njit(cache=True, nogil=True, inline="always")
def _ends_sentence(text, start, end, flags):
    """Whether the chunk ends in a terminal, closing quotes and brackets put aside."""
    if _is_word_byte(text[end - 1]):
        return False
    at = end
    while at > start:
        at = character_start(text, at - 1)
        code, _ = decode(text, at)
        if flags[code] & TERMINAL:
            return True
        if not _closes(code):
            return False
    return False


@numba.njit(cache=True, nogil=True, inline="always")
def _closes(code):
    """ " ' ) ] } ’ ” »"""
    return (
        code == 0x22
        or code == 0x27
        or code == 0x29
        or code == 0x5D
        or code == 0x7D
        or code == 0x2019
        or code == 0x201D
        or code == 0xBB
    )
