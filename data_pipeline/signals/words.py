"""Counts of characters, words and sentences in one pass over UTF-8 bytes, and the hash and length of every word.

Each block of 64 bytes becomes bit masks: which bytes are white space, letters, digits and so on. Those of ASCII come
from vector instructions; other characters are decoded and added to the same masks."""

from typing import Any, NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.bits import (
    ALL,
    BLOCK,
    ONE,
    TOP,
    ZERO,
    below,
    bytes_below,
    character_start,
    decode,
    first_bit,
    hash_bytes,
    without_first,
)
from gristmill.data_pipeline.signals.characters import (
    ALPHA,
    DIGIT,
    IDEOGRAPH,
    JOINER,
    LINE_END,
    PUNCTUATION,
    SPACE,
    STOP,
    TERMINAL,
    UPPER,
    WORD,
)
from gristmill.data_pipeline.signals.intrinsics import bytes_within, letters_within, load64, ones
from gristmill.data_pipeline.signals.reference import STOP_WORDS, TITLES
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Places in the counts that scan_words fills. STOPS: one bit per slot; ODD_ENDS: line ends other than newlines.
CHARS, NEWLINES, HASHES, ELLIPSIS, UPPERS, DIGITS, ODD_ENDS = range(7)
WORDS, PLAIN, PLAIN_CHARS, ALPHA_WORDS, STOPS, SENTENCES = range(7, 13)
NUM_COUNTS = 13

# Masks of a block's characters beyond ASCII. FOUND_: their bytes in this block (see _beyond_ascii); SPILLED_: the bytes
# of its last character that lie in the next block.
FOUND_SPACE, FOUND_WORD, FOUND_RUN, FOUND_ALPHA, FOUND_PLAIN, FOUND_WORDED, FOUND_END = range(7)
SPILLED_SPACE, SPILLED_WORD = 7, 8
NUM_FOUND = 9


class Block(NamedTuple):
    """Masks of a block of 64 bytes: bit k is byte k. inside: bytes of the text; lead: the first byte of each character;
    the others are of ASCII characters inside the text, and space has the bytes behind the text's end too."""

    inside: Any
    letter: Any
    digit: Any
    space: Any
    newline: Any
    odd_end: Any
    lead: Any


class Carry(NamedTuple):
    """The byte before a block, as 0 or 1. token: it is not white space; run: it is in a word or joins two parts of one;
    word: it is a word character; hyphen: it is a hyphen."""

    token: Any
    run: Any
    word: Any
    hyphen: Any


class OpenWord(NamedTuple):
    """A word whose end is not yet found. chars: how many it has so far; alpha: one is a letter; plain: one is not
    punctuation."""

    chars: Any
    alpha: Any
    plain: Any


@cached_njit(nogil=True)
def scan_words(span, unicode_words, words, positions, counts):
    """Counts the characters, words and sentences of the span (counts: CHARS ...) and writes the hash and the length of
    each word to words: (hashes, lengths), which have an entry for each byte of the text.

    unicode_words: the word rule `unicode`; else words are what white space separates. found: uint64[NUM_FOUND], work
    space."""
    text, start, end = span.text, span.start, span.end
    for i in range(NUM_COUNTS):
        counts[i] = 0
    positions[SPILLED_SPACE] = positions[SPILLED_WORD] = ZERO
    carry = Carry(ZERO, ZERO, ZERO, ZERO)
    is_open, first, open_word = False, start, OpenWord(ZERO, False, False)  # of a word that began before the block
    has_word = False  # a letter, digit or ideograph since the last sentence end
    behind_dots = start
    for base in range(start, end + 1, BLOCK):
        block = _ascii_masks(text, base, below(end - base))
        behind_dots = _count_ascii(text, base, block, behind_dots, counts)
        worded = block.letter | block.digit | bytes_within(text, base, 0x5F, 1) & block.inside
        word = worded | positions[SPILLED_WORD]
        run, alphas, plains = ZERO, block.letter, block.letter | block.digit
        line_end = block.newline | block.odd_end | ~block.inside
        space = block.space | positions[SPILLED_SPACE]
        beyond = bytes_within(text, base, 0xC0, 0x40) & block.inside
        if beyond != ZERO:
            _beyond_ascii(span, base, beyond, (word, carry.word), positions, counts)
            space |= positions[FOUND_SPACE]
            word |= positions[FOUND_WORD]
            run = positions[FOUND_RUN]
            alphas |= positions[FOUND_ALPHA]
            plains |= positions[FOUND_PLAIN]
            worded |= positions[FOUND_WORDED]
            line_end |= positions[FOUND_END]
        else:
            positions[SPILLED_SPACE] = positions[SPILLED_WORD] = ZERO

        events = space & ~(space << ONE) & ~(word << ONE | carry.word) | line_end
        has_word, ended = end_sentences(span, base, events, line_end, worded, has_word)
        counts[SENTENCES] += ended
        if unicode_words:
            run, hyphen = _runs(span, base, block.inside, run, word, carry)
            starts = _starts(block.lead, space, run, hyphen, carry)
        else:
            run, hyphen, starts = ZERO, ZERO, ~space & ~(~space << ONE | carry.token)
        stops = (starts | space) & (~space << ONE | carry.token)
        carry = Carry(~space >> TOP, run >> TOP, word >> TOP, hyphen >> TOP)

        low = ZERO
        if not is_open and starts != ZERO:
            low = np.uint64(first_bit(starts))
            starts = without_first(starts)
            first, is_open = base + np.int64(low), True
        while stops != ZERO:
            stop = np.uint64(first_bit(stops))
            stops = without_first(stops)
            within = (ALL << low) & ((ONE << stop) - ONE)
            word_here = _extended(open_word, within, block.lead, alphas, plains)
            _note(text, first, base + np.int64(stop), word_here, words, counts)
            open_word = OpenWord(ZERO, False, False)
            is_open = starts != ZERO
            low = np.uint64(first_bit(starts)) & TOP
            first = base + np.int64(low)
            starts = without_first(starts)
        if is_open:
            open_word = _extended(open_word, ALL << low, block.lead, alphas, plains)


@cached_njit(nogil=True, forceinline=True)
def _ascii_masks(text, base, inside):
    return Block(
        inside,
        letters_within(text, base, 0x61, 26) & inside,
        bytes_within(text, base, 0x30, 10) & inside,
        bytes_within(text, base, 0x09, 5) | bytes_within(text, base, 0x1C, 5) | ~inside,
        bytes_within(text, base, 0x0A, 1) & inside,
        (bytes_within(text, base, 0x0B, 3) | bytes_within(text, base, 0x1C, 3)) & inside,
        ~bytes_within(text, base, 0x80, 0x40) & inside,
    )


@cached_njit(nogil=True, forceinline=True)
def _count_ascii(text, base, block, behind_dots, counts):
    """Add the counts of single characters and of ellipses; returns the end of the last run of dots."""
    dot = bytes_within(text, base, 0x2E, 1) & bytes_within(text, base + 1, 0x2E, 1)
    dots = dot & bytes_within(text, base + 2, 0x2E, 1) & block.inside
    if dots != ZERO:
        behind_dots, ellipses = _count_ellipses(text, base, dots, behind_dots)
        counts[ELLIPSIS] += ellipses
    counts[CHARS] += np.int64(ones(block.lead))
    counts[NEWLINES] += np.int64(ones(block.newline))
    counts[HASHES] += np.int64(ones(bytes_within(text, base, 0x23, 1) & block.inside))
    counts[UPPERS] += np.int64(ones(bytes_within(text, base, 0x41, 26) & block.inside))
    counts[DIGITS] += np.int64(ones(block.digit))
    counts[ODD_ENDS] += np.int64(ones(block.odd_end))
    return behind_dots


@cached_njit(nogil=True, forceinline=True)
def _runs(span, base, inside, run, word, carry):
    """Return (bytes of words with the joiners between their characters and with hyphens, hyphens), by the rule
    `unicode`. run: the joiners beyond ASCII."""
    text = span.text
    joiner = bytes_within(text, base, 0x2E, 2) | bytes_within(text, base, 0x27, 1)
    joiner |= bytes_within(text, base, 0x3A, 1) | bytes_within(text, base, 0x40, 1)
    joiner &= (word << ONE | carry.word) & inside
    if joiner >> TOP and base + BLOCK < span.end:
        code, _ = decode(text, base + BLOCK)
        run |= joiner & (word >> ONE | np.uint64(span.flags[code] & WORD != 0) << TOP)
    else:
        run |= joiner & (word >> ONE)
    hyphen = (bytes_within(text, base, 0x2D, 1) | bytes_within(text, base, 0x40, 1) & ~run) & inside
    return run | word | hyphen, hyphen


@cached_njit(nogil=True, forceinline=True)
def _starts(lead, space, run, hyphen, carry):
    """Where words begin by the rule `unicode`."""
    return run & ~(run << ONE | carry.run) | hyphen & ~(hyphen << ONE | carry.hyphen) | ~run & ~space & lead


@cached_njit(nogil=True, forceinline=True)
def _extended(open_word, within, lead, alphas, plains):
    """The open word with the characters of the block that are `within` it."""
    return OpenWord(
        open_word.chars + ones(lead & within),
        open_word.alpha or (alphas & within) != ZERO,
        open_word.plain or (plains & within) != ZERO,
    )


@cached_njit(nogil=True, forceinline=True)
def _note(text, first, stop, word, words, counts):
    """Add one word. The bit of a stop word is set without a branch."""
    hashes, lengths = words
    chars, alpha, plain = word
    place = counts[WORDS]
    hashes[place] = hash_bytes(text, first, stop)
    lengths[place] = chars
    counts[WORDS] = place + 1
    counts[ALPHA_WORDS] += alpha
    counts[PLAIN] += plain
    counts[PLAIN_CHARS] += np.int64(chars) if plain else 0
    counts[STOPS] |= stop_word_bit(text, first, stop)


@cached_njit(nogil=True)
def _beyond_ascii(span, base, beyond, word_masks, positions, counts):
    """Decode the characters that begin at `beyond`, fill found and add to counts. word_masks: (word characters of this
    block, of the byte before it).

    The masks of space and word cover all bytes of a character, and bytes in the next block are SPILLED; the other masks
    cover the first byte. RUN: a joiner (’) between two word characters. WORDED: word characters and ideographs. END:
    of a line, or a terminal that ends a sentence anywhere."""
    text, _, end, flags = span
    word, in_word = word_masks
    for i in range(NUM_FOUND):
        positions[i] = ZERO
    while beyond != ZERO:
        place = np.uint64(first_bit(beyond))
        beyond = without_first(beyond)
        at = base + np.int64(place)
        code, size = decode(text, at)
        flag = np.int64(flags[code])
        whole = (ONE << np.uint64(size)) - ONE
        here, bit = whole << place, ONE << place
        spilled = whole >> (np.uint64(BLOCK) - place) if place != ZERO else ZERO
        if flag & WORD:
            word |= here
            positions[FOUND_WORD] |= here
            positions[SPILLED_WORD] |= spilled
        elif flag & SPACE:
            positions[FOUND_SPACE] |= here
            positions[SPILLED_SPACE] |= spilled
        elif flag & JOINER:
            before = word >> (place - ONE) if place != ZERO else in_word
            after, _ = decode(text, at + size)
            if before & ONE and at + size < end and flags[after] & WORD:
                positions[FOUND_RUN] |= here
                positions[SPILLED_WORD] |= spilled
        positions[FOUND_ALPHA] |= bit if flag & ALPHA else ZERO
        positions[FOUND_PLAIN] |= ZERO if flag & PUNCTUATION else bit
        positions[FOUND_WORDED] |= bit if flag & (WORD | IDEOGRAPH) else ZERO
        positions[FOUND_END] |= bit if flag & (LINE_END | STOP) else ZERO
        counts[UPPERS] += flag & UPPER != 0
        counts[DIGITS] += flag & DIGIT != 0
        counts[ODD_ENDS] += flag & LINE_END != 0
        counts[ELLIPSIS] += code == 0x2026


@cached_njit(nogil=True)
def _count_ellipses(text, base, dots, behind):
    """Return (end of the last run of dots, number of groups of three dots) of the runs at `behind` or later.

    dots: where three dots begin. The byte behind the text is no dot."""
    ellipses = 0
    while dots != ZERO:
        at = base + first_bit(dots)
        dots = without_first(dots)
        if at < behind:
            continue
        behind = at
        while text[behind] == 0x2E:
            behind += 1
        ellipses += (behind - at) // 3
    return behind, ellipses


# Gopher's eight English stop words, found in a table without collisions.

STOP_SHIFT = np.uint64(60)


def _stop_slots() -> tuple[np.uint64, np.ndarray, np.ndarray]:
    """(factor, slots, sizes): each word as a group of eight bytes, in slot group * factor >> 60, and its bytes."""
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


@cached_njit(nogil=True, forceinline=True)
def stop_word_bit(text, first, stop):
    """The bit of the stop word text[first:stop], which is 1 << its slot; 0 for other words. There is no branch."""
    size = stop - first
    group = load64(text, first) & bytes_below(min(size, 8))
    slot = np.int64((group * STOP_FACTOR) >> STOP_SHIFT)
    return np.int64((STOP_SLOTS[slot] == group) & (STOP_SIZES[slot] == size)) << slot


# Ends of sentences in blocks of 64 bytes; signals/reference.py defines what ends one.

TITLE_GROUPS = np.array([int.from_bytes(title.encode(), "little") for title in TITLES], np.uint64)
TITLE_CHARS = max(map(len, TITLES))


@cached_njit(nogil=True, forceinline=True)
def end_sentences(span, base, events, line_end, worded, has_word):
    """Return (whether there is a word after the last sentence end, number of sentence ends in the block). A sentence
    ends with a line, at a stop (。), or at white space behind a terminal.

    line_end: ends of lines, and stops. events: those, and white space behind anything but a word character. worded:
    letters, digits, ideographs. has_word: the result of the previous block."""
    rest, ended = ALL, 0
    while events != ZERO:
        place = np.uint64(first_bit(events))
        events = without_first(events)
        before = (ONE << place) - ONE
        if not (has_word or (worded & rest & before) != ZERO):
            continue
        if line_end >> place & ONE or _ends_sentence(span.text, span.start, base + np.int64(place), span.flags):
            ended += 1
            has_word, rest = False, ~before
    return has_word or (worded & rest) != ZERO, ended


@cached_njit(nogil=True)
def _ends_sentence(text, start, end, flags):
    """Whether text[start:end] ends in a terminal, closing quotes and brackets put aside."""
    at = end
    while at > start:
        at = character_start(text, at - 1)
        code, _ = decode(text, at)
        if flags[code] & TERMINAL:
            return not (code == 0x2E and _abbreviates(text, start, at))
        if not _closes(code):
            return False
    return False


@cached_njit(nogil=True)
def _abbreviates(text, start, dot):
    """Whether the dot behind text[start:dot] is one of an initial (J.), of e.g. and its like, or of a title."""
    first = dot
    while first > start and dot - first <= TITLE_CHARS and _is_word_byte(text[first - 1]):
        if _ends_line_separator(text, start, first):
            break
        first -= 1
    size = dot - first
    if size == 0 or size > TITLE_CHARS:
        return False
    if size == 1:
        letter = text[first]
        return 0x41 <= letter <= 0x5A or (0x61 <= letter <= 0x7A and first > start and text[first - 1] == 0x2E)
    group = load64(text, first) & bytes_below(size)
    for i in range(len(TITLE_GROUPS)):  # noqa: SIM110 - numba has no any()
        if TITLE_GROUPS[i] == group:
            return True
    return False


@cached_njit(nogil=True, forceinline=True)
def _is_word_byte(byte):
    """ASCII's letters, digits and _, and all bytes of what lies beyond."""
    return 0x30 <= byte <= 0x39 or 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A or byte == 0x5F or byte >= 0x80


@cached_njit(nogil=True, forceinline=True)
def _ends_line_separator(text, start, end):
    """Whether text[start:end] ends with U+2028, U+2029 or U+0085, which end a line as "\\n" does."""
    last = text[end - 1]
    if last == 0x85:
        return end - start >= 2 and text[end - 2] == 0xC2
    return (last == 0xA8 or last == 0xA9) and end - start >= 3 and text[end - 2] == 0x80 and text[end - 3] == 0xE2


@cached_njit(nogil=True, forceinline=True)
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
