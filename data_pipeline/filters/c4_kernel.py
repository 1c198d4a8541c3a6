"""C4's line rules on many texts in one compiled pass; filters/lines.py says in plain Python what they are.

Texts that hold what the kernel does not judge (a phrase, a citation, a line end other than a newline) are few; they
are named, and the plain rules take them."""

import numba
import numpy as np

from gristmill.data_pipeline.intrinsics import load64
from gristmill.data_pipeline.signals.bits import (
    CASE,
    HIGH,
    ZERO,
    between,
    bytes_below,
    decode,
    equal,
    every,
    find_newline,
    first_marked,
)
from gristmill.data_pipeline.signals.characters import SPACE
from gristmill.data_pipeline.signals.lines import skip_space, strip_end

# Places in the counts, as in filters/lines.py's C4_COUNTS.
LINES, LONG_WORD, NO_TERMINAL, FEW_WORDS, CURLY = 0, 1, 2, 3, 7
NUM_COUNTS = 8


def _phrase(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


JAVASCRIPT, COOKIE, PRIVACY = _phrase("javascript"), _phrase("cookie"), _phrase("privacy policy")
TERMS, LOREM = _phrase("terms of use"), _phrase("lorem ipsum")


@numba.njit(cache=True, nogil=True)
def edit_texts(text, offsets, flags, max_word, terminal, min_words, out, ends, counts, unjudged):
    """Fills out with the edited texts (kept lines, each with a newline), text k in ends[k] : ends[k + 1], and counts.

    max_word, min_words: -1 for no such rule. unjudged[k]: the text is left to the plain rules."""
    at_out = 0
    ends[0] = 0
    for k in range(len(offsets) - 1):
        start, end = offsets[k], offsets[k + 1] - 1
        unjudged[k] = _needs_plain(text, start, end)
        if not unjudged[k]:
            at_out = _edit(text, start, end, flags, max_word, terminal, min_words, out, at_out, counts[k])
        ends[k + 1] = at_out


@numba.njit(cache=True, nogil=True)
def _edit(text, start, end, flags, max_word, terminal, min_words, out, at_out, counts):
    at = start
    while at < end:
        stop = find_newline(text, at, end)
        counts[LINES] += 1
        first = skip_space(text, at, stop, flags)
        last = strip_end(text, first, stop, flags)
        at = stop + 1
        if max_word >= 0 and last - first > max_word and _has_longer_word(text, first, last, flags, max_word):
            counts[LONG_WORD] += 1
        elif terminal and not _is_terminated(text, first, last):
            counts[NO_TERMINAL] += 1
        elif min_words > 0 and not _has_words(text, first, last, flags, min_words):
            counts[FEW_WORDS] += 1
        else:
            for i in range(first, last):
                out[at_out] = text[i]
                at_out += 1
            counts[CURLY] += _has_bracket(text, first, last)
            out[at_out] = 0x0A
            at_out += 1
    return at_out


@numba.njit(cache=True, nogil=True, inline="always")
def _is_terminated(text, first, last):
    """. ? ! " ' but not ..."""
    if first == last:
        return False
    byte = text[last - 1]
    if byte == 0x2E:
        return not (last - first >= 3 and text[last - 2] == 0x2E and text[last - 3] == 0x2E)
    return byte == 0x3F or byte == 0x21 or byte == 0x22 or byte == 0x27


@numba.njit(cache=True, nogil=True, inline="always")
def _has_bracket(text, first, last):
    for at in range(first, last, 8):
        if equal(load64(text, at), every(0x7B)) & bytes_below(min(last - at, 8)) != ZERO:
            return True
    return False


@numba.njit(cache=True, nogil=True)
def _has_words(text, first, last, flags, wanted):
    words, inside, at = 0, False, first
    while at < last:
        code, size = decode(text, at)
        space = flags[code] & SPACE != 0
        if not space and not inside:
            words += 1
            if words >= wanted:
                return True
        inside = not space
        at += size
    return False


@numba.njit(cache=True, nogil=True)
def _has_longer_word(text, first, last, flags, most):
    length, at = 0, first
    while at < last:
        code, size = decode(text, at)
        length = 0 if flags[code] & SPACE else length + 1
        if length > most:
            return True
        at += size
    return False


@numba.njit(cache=True, nogil=True)
def _needs_plain(text, start, end):
    """Whether the text holds a phrase of the rules, a citation, or a line end other than a newline.

    Each phrase is looked for at its rarest letter: j, k (cookie), v (privacy), f (of use), p (ipsum)."""
    for at in range(start, end, 8):
        group = load64(text, at)
        inside = bytes_below(min(end - at, 8))
        odd = (between(group, 0x0B, 0x0E) | between(group, 0x1C, 0x1F)) & inside
        if odd != ZERO:
            return True
        folded = group | CASE
        marks = equal(folded, every(0x6A)) | equal(folded, every(0x6B)) | equal(folded, every(0x76))
        marks |= equal(folded, every(0x66)) | equal(folded, every(0x70)) | equal(group, every(0x5B))
        marks = (marks | (group & HIGH)) & inside
        while marks != ZERO:
            place = at + first_marked(marks)
            marks &= marks - np.uint64(1)
            if _is_special(text, start, end, place):
                return True
    return False


@numba.njit(cache=True, nogil=True)
def _is_special(text, start, end, place):
    byte = text[place]
    if byte >= 0x80:  # U+0085, U+2028, U+2029 end lines; the Kelvin sign is a k in lower case
        if byte == 0xC2:
            return text[place + 1] == 0x85
        if byte == 0xE2:
            second, third = text[place + 1], text[place + 2]
            return (second == 0x80 and (third == 0xA8 or third == 0xA9)) or (second == 0x84 and third == 0xAA)
        return False
    if byte == 0x5B:  # [ before a digit, "]", edit] or citation needed]
        after = text[place + 1]
        return 0x30 <= after <= 0x39 or after == 0x5D or after == 0x65 or after == 0x63 or after >= 0x80
    letter = byte | 0x20
    if letter == 0x6A:
        return _stands(text, start, end, place, JAVASCRIPT)
    if letter == 0x6B:
        return _stands(text, start, end, place - 3, COOKIE)
    if letter == 0x76:
        return _stands(text, start, end, place - 3, PRIVACY)
    if letter == 0x66:
        return _stands(text, start, end, place - 7, TERMS)
    return _stands(text, start, end, place - 7, LOREM)


@numba.njit(cache=True, nogil=True, inline="always")
def _stands(text, start, end, first, phrase):
    """Whether the phrase stands there, upper case or lower."""
    if first < start or first + len(phrase) > end:
        return False
    for i in range(len(phrase)):
        byte = text[first + i]
        if byte != phrase[i] and (byte | 0x20 != phrase[i] or not 0x41 <= byte <= 0x5A):
            return False
    return True
