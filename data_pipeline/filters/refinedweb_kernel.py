"""RefinedWeb's line rules on many texts in one compiled pass; the reference in plain Python is in filters/lines.py.

Texts with boilerplate to remove from lines, and texts in which non-ASCII characters could matter to a phrase, are rare;
they are reported and edited by the plain Python rules."""

from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.filters.c4_kernel import close_text, copy_bytes, has_words, holds_bytes, phrase, phrase_at
from gristmill.data_pipeline.signals.bits import (
    BLOCK,
    NEWLINE,
    ZERO,
    Span,
    below,
    character_start,
    count_chars,
    decode,
    find_newline,
    first_bit,
    without_first,
)
from gristmill.data_pipeline.signals.characters import ALPHA, DIGIT, SPACE, UPPER, WORD
from gristmill.data_pipeline.signals.intrinsics import bytes_within, letters_within, ones, pointer
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Places in the counts, as in filters/lines.py's REFINEDWEB_COUNTS.
LINES, UPPERCASE, DIGITS, COUNTER, FEW_WORDS, BOILERPLATE = range(6)
NUM_COUNTS = 6
KEPT, UNDECIDED = 0, -1

COUNTED = b"likes|shares|comments|retweets|reposts|quotes|bookmarks|upvotes|downvotes|downloads|views|followers"
_WORDS = np.frombuffer(COUNTED + b"|", np.uint8)
# Substrings of the rules' phrases whose letters have no non-ASCII case variants.
CART, MORE, SIGN = phrase("n cart"), phrase("read more"), phrase("gn-")


class RefinedWebRules(NamedTuple):
    """upper, digits, min_words, boilerplate (the most words of such a line): -1 for no such rule; counters: whether the
    rule is in use."""

    upper: float
    digits: float
    counters: bool
    min_words: int
    boilerplate: int


@cached_njit(nogil=True)
def edit_texts(texts, rules, edited):
    """Fill edited (kept_lines.EditedTexts) by the rules."""
    text, flags, kept = pointer(texts.text, 0), pointer(texts.flags, 0), pointer(edited.out, 0)
    ends, left = edited.ends, edited.left
    ends[0] = 0
    for k in range(len(left)):
        start, end = texts.offsets[k], texts.offsets[k + 1] - 1
        row = pointer(edited.counts, k * NUM_COUNTS)
        stop = UNDECIDED
        if not _holds_kelvin(text, start, end):
            stop, edited.same_words[k] = _edit(Span(text, start, end, flags), rules, kept, ends[k], row)
        left[k] = stop == UNDECIDED
        ends[k + 1] = close_text(kept, ends[k], ends[k] if left[k] else stop, flags)


@cached_njit(nogil=True)
def _edit(span, rules, out, at_out, counts):
    """Copy the kept lines; returns (their end in out, or UNDECIDED, whether they are all lines)."""
    text, at, end, flags = span
    boilerplate, all_kept = rules.boilerplate, True
    while at <= end:
        stop = find_newline(text, at, end)
        counts[LINES] += 1
        refused = _refused(Span(text, at, stop, flags), rules) if stop > at else KEPT
        if refused == KEPT and boilerplate >= 0 and _holds_boilerplate(text, at, stop):
            refused = KEPT if has_words(text, at, stop, flags, boilerplate + 1) else UNDECIDED
        if refused == UNDECIDED:
            return UNDECIDED, False
        if refused == KEPT:
            at_out = copy_bytes(text, at, stop, out, at_out)
            out[at_out] = NEWLINE
            at_out += 1
        else:
            counts[refused] += 1
            all_kept = False
        at = stop + 1
    return at_out, all_kept


@cached_njit(nogil=True, forceinline=True)
def _refused(span, rules):
    """The count of the rule that removes the line; KEPT if none does."""
    text, start, end, flags = span
    if rules.upper >= 0 and _share(span, 0x41, 26, UPPER) > rules.upper:
        return UPPERCASE
    if rules.digits >= 0:
        code, _ = decode(text, start)
        if flags[code] & DIGIT and _share(span, 0x30, 10, DIGIT) > rules.digits:
            return DIGITS
    if rules.counters:
        stop = _counted_word(text, start, end, flags)
        if stop == UNDECIDED:
            return UNDECIDED
        if stop > start and _counts_before(text, start, stop, flags):
            return COUNTER
    if rules.min_words >= 0 and not has_words(text, start, end, flags, rules.min_words):
        return FEW_WORDS
    return KEPT


@cached_njit(nogil=True, forceinline=True)
def _share(span, low, count, flag):
    """Share of the characters with the flag; low, count: the range of ASCII bytes with it."""
    text, start, end, flags = span
    matching = ZERO
    for base in range(start, end, BLOCK):
        inside = below(end - base)
        matching += ones(bytes_within(text, base, low, count) & inside)
        beyond = bytes_within(text, base, 0xC0, 0x40) & inside
        while beyond != ZERO:
            code, _ = decode(text, base + first_bit(beyond))
            beyond = without_first(beyond)
            matching += np.uint64(flags[code] & flag != 0)
    return np.int64(matching) / count_chars(text, start, end)


@cached_njit(nogil=True, forceinline=True)
def _counted_word(text, start, end, flags):
    """Where the counted word (likes, shares ...) begins that the line ends in, what is no word character put aside;
    `start` if there is none, UNDECIDED if characters beyond ASCII could decide."""
    last = end
    while last > start and not _is_word_byte(text[last - 1]):
        last = character_start(text, last - 1)
        if text[last] >= 0x80:
            code, _ = decode(text, last)
            if flags[code] & (ALPHA | DIGIT):
                return start
            if flags[code] & WORD:  # a mark, or a number that is no digit: re's word characters are fewer than ours
                return UNDECIDED
    if last == start or text[last - 1] | 0x20 != 0x73:  # each of them ends in s
        return start
    word = 0
    for i in range(len(_WORDS)):
        if _WORDS[i] == 0x7C:
            first = last - (i - word)
            if first > start and _is_word(text, first, word, i):
                return UNDECIDED if holds_bytes(text, start, end, 0x80, 0x80) else first
            word = i + 1
    return start


@cached_njit(nogil=True)
def _is_word(text, first, word, stop):
    for i in range(stop - word):  # noqa: SIM110 - numba has no all()
        if text[first + i] | 0x20 != _WORDS[word + i]:
            return False
    return True


@cached_njit(nogil=True)
def _counts_before(text, start, stop, flags):
    """Whether text[start:stop], ASCII, is a number and white space: 12, 3,141 or 12k."""
    at = stop
    while at > start and flags[text[at - 1]] & SPACE:
        at -= 1
    if at == stop:
        return False
    if at > start and (text[at - 1] | 0x20 == 0x6B or text[at - 1] | 0x20 == 0x6D or text[at - 1] | 0x20 == 0x62):
        at -= 1
    first = start
    while first < at and not _is_word_byte(text[first]):
        first += 1
    if first == at or not 0x30 <= text[first] <= 0x39:
        return False
    for i in range(first, at):  # noqa: SIM110 - numba has no all()
        if not (0x30 <= text[i] <= 0x39 or text[i] == 0x2C or text[i] == 0x2E):
            return False
    return True


@cached_njit(nogil=True, forceinline=True)
def _is_word_byte(byte):
    return 0x30 <= byte <= 0x39 or 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A or byte == 0x5F


@cached_njit(nogil=True)
def _holds_kelvin(text, start, end):
    """Whether the text contains a Kelvin sign, whose lower case is k."""
    for base in range(start, end, BLOCK):
        wide = bytes_within(text, base, 0xE2, 1) & below(end - base)
        if wide & bytes_within(text, base + 1, 0x84, 1) & bytes_within(text, base + 2, 0xAA, 1) != ZERO:
            return True
    return False


@cached_njit(nogil=True)
def _holds_boilerplate(text, start, end):
    """Whether the line may hold a phrase that the rules cut out: it is looked for by the letters that no character
    beyond ASCII stands for."""
    for base in range(start, end, BLOCK):
        space = bytes_within(text, base + 1, 0x20, 1)
        marks = _letter(text, base, 0x6E) & space & _letter(text, base + 2, 0x63)
        marks |= _letter(text, base, 0x64) & space & _letter(text, base + 2, 0x6D)
        marks |= _letter(text, base, 0x67) & _letter(text, base + 1, 0x6E) & bytes_within(text, base + 2, 0x2D, 1)
        marks &= below(end - base)
        while marks != ZERO:
            place = base + first_bit(marks)
            marks = without_first(marks)
            if phrase_at(text, start, end, place, CART):
                return True
            if place - start <= 4 and phrase_at(text, start, end, place, SIGN):
                return True
            if phrase_at(text, start, end, place - 3, MORE) and count_chars(text, place - 3 + len(MORE), end) == 3:
                return True
    return False


@cached_njit(nogil=True, forceinline=True)
def _letter(text, base, small):
    return letters_within(text, base, small, 1)
