"""Characters, words and sentences in one pass over UTF-8 bytes, 64 at a time: counts, and every word's hash and length.

A block of 64 bytes becomes a few masks: which bytes are space, letters, digits and so on. ASCII's come from vector
instructions; what lies beyond is decoded and put into the same masks, so that all that follows knows no scripts."""

import numpy as np

from gristmill.data_pipeline.signals.bits import (
    ALL,
    BLOCK,
    ONE,
    TOP,
    ZERO,
    below,
    bytes_below,
    decode,
    first_bit,
    hash_bytes,
    load64,
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
    UPPER,
    WORD,
)
from gristmill.data_pipeline.signals.intrinsics import bytes_within, letters_within, ones
from gristmill.data_pipeline.signals.reference import STOP_WORDS
from gristmill.data_pipeline.signals.sentences import end_sentences
from gristmill.foundation.cached_njit import cached_njit

# Gopher's stop words as groups of bytes, each in the slot its product with the factor points to: no two share one.
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

# Places in the counts that scan_words fills. STOPS is a bit a slot; ODD_ENDS are line ends other than newlines.
CHARS, NEWLINES, HASHES, ELLIPSIS, UPPERS, DIGITS, ODD_ENDS = range(7)
WORDS, PLAIN, PLAIN_CHARS, ALPHA_WORDS, STOPS, SENTENCES = range(7, 13)
NUM_COUNTS = 13

# What stands beyond ASCII in a block, as masks (see _beyond_ascii).
FOUND_SPACE, FOUND_WORD, FOUND_RUN, FOUND_ALPHA, FOUND_PLAIN, FOUND_WORDED, FOUND_END = range(7)
SPILLED_SPACE, SPILLED_WORD = 7, 8
NUM_FOUND = 9


@cached_njit(nogil=True)
def scan_words(text, start, end, flags, unicode_words, hashes, lengths, found, counts):
    """Fills counts (see CHARS ...) and hashes, lengths of every word in text[start:end].

    flags: the character table. found: uint64[NUM_FOUND], work space. Needs room for end - start words."""
    for i in range(NUM_COUNTS):
        counts[i] = 0
    found[SPILLED_SPACE] = found[SPILLED_WORD] = ZERO
    in_token = in_run = in_word = in_hyphen = ZERO  # of the byte before the block, in the lowest bit
    open_token, first, chars, alpha, plain = False, start, ZERO, False, False  # of the word begun before the block
    has_word = False  # a letter, digit or ideograph since the last sentence's end
    behind_dots = start
    for base in range(start, end + 1, BLOCK):
        inside = below(end - base)
        letter = letters_within(text, base, 0x61, 26) & inside
        digit = bytes_within(text, base, 0x30, 10) & inside
        space = bytes_within(text, base, 0x09, 5) | bytes_within(text, base, 0x1C, 5) | ~inside
        newline = bytes_within(text, base, 0x0A, 1) & inside
        odd_end = (bytes_within(text, base, 0x0B, 3) | bytes_within(text, base, 0x1C, 3)) & inside
        lead = ~bytes_within(text, base, 0x80, 0x40) & inside
        dot = bytes_within(text, base, 0x2E, 1)
        dots = dot & bytes_within(text, base + 1, 0x2E, 1) & bytes_within(text, base + 2, 0x2E, 1) & inside
        if dots != ZERO:
            behind_dots, ellipses = _count_ellipses(text, base, dots, behind_dots)
            counts[ELLIPSIS] += ellipses
        counts[CHARS] += np.int64(ones(lead))
        counts[NEWLINES] += np.int64(ones(newline))
        counts[HASHES] += np.int64(ones(bytes_within(text, base, 0x23, 1) & inside))
        counts[UPPERS] += np.int64(ones(bytes_within(text, base, 0x41, 26) & inside))
        counts[DIGITS] += np.int64(ones(digit))
        counts[ODD_ENDS] += np.int64(ones(odd_end))

        worded = letter | digit | bytes_within(text, base, 0x5F, 1) & inside
        word = worded | found[SPILLED_WORD]
        run, alphas, plains, line_end = ZERO, letter, letter | digit, newline | odd_end | ~inside
        space |= found[SPILLED_SPACE]
        beyond = bytes_within(text, base, 0xC0, 0x40) & inside
        if beyond != ZERO:
            _beyond_ascii(text, base, end, beyond, word, in_word, flags, found, counts)
            space |= found[FOUND_SPACE]
            word |= found[FOUND_WORD]
            run = found[FOUND_RUN]
            alphas |= found[FOUND_ALPHA]
            plains |= found[FOUND_PLAIN]
            worded |= found[FOUND_WORDED]
            line_end |= found[FOUND_END]
        else:
            found[SPILLED_SPACE] = found[SPILLED_WORD] = ZERO

        events = space & ~(space << ONE) & ~(word << ONE | in_word) | line_end
        has_word, ended = end_sentences(text, start, base, events, line_end, worded, has_word, flags)
        counts[SENTENCES] += ended
        in_word_before, in_word = in_word, word >> TOP
        if unicode_words:
            joiner = bytes_within(text, base, 0x2E, 2) | bytes_within(text, base, 0x27, 1)
            joiner |= bytes_within(text, base, 0x3A, 1) | bytes_within(text, base, 0x40, 1)
            joiner &= (word << ONE | in_word_before) & inside
            if joiner >> TOP and base + BLOCK < end:
                code, _ = decode(text, base + BLOCK)
                run |= joiner & (word >> ONE | np.uint64(flags[code] & WORD != 0) << TOP)
            else:
                run |= joiner & (word >> ONE)
            hyphen = (bytes_within(text, base, 0x2D, 1) | bytes_within(text, base, 0x40, 1) & ~run) & inside
            run |= word | hyphen
            starts = run & ~(run << ONE | in_run) | hyphen & ~(hyphen << ONE | in_hyphen) | ~run & ~space & lead
            in_run, in_hyphen = run >> TOP, hyphen >> TOP
        else:
            starts = ~space & ~(~space << ONE | in_token)
        stops = (starts | space) & (~space << ONE | in_token)
        in_token = ~space >> TOP

        low = ZERO
        if not open_token and starts != ZERO:
            low = np.uint64(first_bit(starts))
            starts = without_first(starts)
            first, open_token = base + np.int64(low), True
        while stops != ZERO:
            stop = np.uint64(first_bit(stops))
            stops = without_first(stops)
            within = (ALL << low) & ((ONE << stop) - ONE)
            chars += ones(lead & within)
            alpha = alpha or (alphas & within) != ZERO
            plain = plain or (plains & within) != ZERO
            _note(text, first, base + np.int64(stop), chars, alpha, plain, hashes, lengths, counts)
            chars, alpha, plain = ZERO, False, False
            open_token = starts != ZERO
            low = np.uint64(first_bit(starts)) & TOP
            first = base + np.int64(low)
            starts = without_first(starts)
        if open_token:
            within = ALL << low
            chars += ones(lead & within)
            alpha = alpha or (alphas & within) != ZERO
            plain = plain or (plains & within) != ZERO


@cached_njit(nogil=True, inline="always")
def _note(text, first, stop, chars, alpha, plain, hashes, lengths, counts):
    """One word; a stop word's bit is set without a branch."""
    place = counts[WORDS]
    hashes[place] = hash_bytes(text, first, stop)
    lengths[place] = chars
    counts[WORDS] = place + 1
    counts[ALPHA_WORDS] += alpha
    counts[PLAIN] += plain
    counts[PLAIN_CHARS] += np.int64(chars) if plain else 0
    size = stop - first
    group = load64(text, first) & bytes_below(min(size, 8))
    slot = np.int64((group * STOP_FACTOR) >> STOP_SHIFT)
    counts[STOPS] |= np.int64((STOP_SLOTS[slot] == group) & (STOP_SIZES[slot] == size)) << slot


@cached_njit(nogil=True)
def _beyond_ascii(text, base, end, beyond, word, in_word, flags, found, counts):
    """Decodes the characters that begin at `beyond`, fills found and adds what they count.

    Space and word cover all bytes of a character, and what reaches into the next block is SPILLED; the others mark the
    first byte. RUN: a joiner (’) between two word characters. WORDED: word characters and ideographs. END: of a line,
    or a terminal that ends a sentence wherever it stands."""
    for i in range(NUM_FOUND):
        found[i] = ZERO
    while beyond != ZERO:
        place = np.uint64(first_bit(beyond))
        beyond = without_first(beyond)
        at = base + np.int64(place)
        code, size = decode(text, at)
        flag = np.int64(flags[code])
        whole = (ONE << np.uint64(size)) - ONE
        here, one = whole << place, ONE << place
        spilled = whole >> (np.uint64(BLOCK) - place) if place != ZERO else ZERO
        if flag & WORD:
            word |= here
            found[FOUND_WORD] |= here
            found[SPILLED_WORD] |= spilled
        elif flag & SPACE:
            found[FOUND_SPACE] |= here
            found[SPILLED_SPACE] |= spilled
        elif flag & JOINER:
            before = word >> (place - ONE) if place != ZERO else in_word
            after, _ = decode(text, at + size)
            if before & ONE and at + size < end and flags[after] & WORD:
                found[FOUND_RUN] |= here
                found[SPILLED_WORD] |= spilled
        found[FOUND_ALPHA] |= one if flag & ALPHA else ZERO
        found[FOUND_PLAIN] |= ZERO if flag & PUNCTUATION else one
        found[FOUND_WORDED] |= one if flag & (WORD | IDEOGRAPH) else ZERO
        found[FOUND_END] |= one if flag & (LINE_END | STOP) else ZERO
        counts[UPPERS] += flag & UPPER != 0
        counts[DIGITS] += flag & DIGIT != 0
        counts[ODD_ENDS] += flag & LINE_END != 0
        counts[ELLIPSIS] += code == 0x2026


@cached_njit(nogil=True)
def _count_ellipses(text, base, dots, behind):
    """(where the last run of dots ends, how many threes of dots the runs hold) of those at `behind` or later.

    dots: where three stand. Text ends before what is no dot."""
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
