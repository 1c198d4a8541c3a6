"""C4's line rules on many texts in one compiled pass; the reference in plain Python is in filters/lines.py.

Texts in which non-ASCII characters could matter (line ends other than newlines, the Kelvin sign, whose lower case is k,
citations with non-ASCII digits) are rare; they are reported and edited by the plain Python rules."""

from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.bits import (
    BLOCK,
    NEWLINE,
    ZERO,
    Span,
    below,
    decode,
    find_newline,
    first_bit,
    load64,
    skip_space,
    strip_end,
    without_first,
)
from gristmill.data_pipeline.signals.characters import DIGIT, SPACE
from gristmill.data_pipeline.signals.intrinsics import bytes_within, letters_within, pointer, store64
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Kernels shared by the compiled line rules: copying kept lines and searching for phrases.


def phrase(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


class EditedTexts(NamedTuple):
    """Output of the line kernels for N texts. out: uint8, the edited texts as in a TextBuffer, with the offsets ends
    int64[N + 1]; counts: int64[N, counts]; left: bool[N], texts for the plain Python rules, which out does not have;
    same_words: bool[N], texts that lost white space alone, or nothing."""

    out: np.ndarray
    ends: np.ndarray
    counts: np.ndarray
    left: np.ndarray
    same_words: np.ndarray


@cached_njit(nogil=True, forceinline=True)
def copy_bytes(text, first, last, out, at_out):
    """Copy text[first:last] to out at at_out and return its end there. Up to seven more bytes are overwritten."""
    for at in range(0, last - first, 8):
        store64(out, at_out + at, load64(text, first + at))
    return at_out + last - first


@cached_njit(nogil=True)
def close_text(out, start, end, flags):
    """Strip the text at out[start:end], append a newline and return the start of the next text."""
    first = skip_space(out, start, end, flags, SPACE)
    last = strip_end(out, first, end, flags, SPACE)
    if first > start:
        for at in range(last - first):
            out[start + at] = out[first + at]
    out[start + last - first] = NEWLINE
    return start + last - first + 1


@cached_njit(nogil=True)
def has_words(text, first, last, flags, wanted):
    """Whether text[first:last] has at least `wanted` words separated by white space."""
    words, inside, at = 0, False, first
    while at < last:
        byte = text[at]
        if 0x20 < byte < 0x80:
            space, size = False, 1
        else:
            code, size = decode(text, at)
            space = flags[code] & SPACE != 0
        if not space and not inside:
            words += 1
            if words >= wanted:
                return True
        inside = not space
        at += size
    return words >= wanted


@cached_njit(nogil=True, forceinline=True)
def holds_bytes(text, first, last, low, count):
    """Whether text[first:last] contains a byte from `low` to low + count - 1."""
    marks = ZERO
    for base in range(first, last, BLOCK):
        marks |= bytes_within(text, base, low, count) & below(last - base)
    return marks != ZERO


@cached_njit(nogil=True, forceinline=True)
def phrase_at(text, start, end, first, wanted):
    """Whether the phrase (given in lower case) is at `first` in text[start:end], ignoring ASCII case."""
    if first < start or first + len(wanted) > end:
        return False
    for i in range(len(wanted)):
        byte = text[first + i]
        if byte != wanted[i] and (byte | 0x20 != wanted[i] or not 0x41 <= byte <= 0x5A):
            return False
    return True


# Places in the counts, as in filters/lines.py's C4_COUNTS.
LINES, LONG_WORD, NO_TERMINAL, FEW_WORDS, REMOVED_JAVASCRIPT, REMOVED_POLICY, LOREM_IPSUM, CURLY = range(8)
NUM_COUNTS = 8
# Flags of what a line contains.
HAS_LOREM, HAS_JAVASCRIPT, HAS_BRACKET, HAS_POLICY = 1, 2, 4, 8
UNDECIDED = -1

JAVASCRIPT, LOREM = phrase("javascript"), phrase("lorem ipsum")
COOKIE_POLICY, COOKIES, PRIVACY, TERMS = (
    phrase("cookie policy"),
    phrase("cookies"),
    phrase("privacy policy"),
    phrase("terms of use"),
)
USE, USES, USE_OF = phrase("use "), phrase("uses "), phrase("use of ")
EDIT, NEEDED = phrase("edit]"), phrase("citation needed]")


class C4Rules(NamedTuple):
    """max_word, min_words: -1 for no such rule; the others: whether the rule is in use."""

    max_word: int
    citations: bool
    terminal: bool
    min_words: int
    javascript: bool
    policy: bool


@cached_njit(nogil=True)
def edit_texts(texts, rules, edited):
    """Fill edited (kept_lines.EditedTexts) by the rules."""
    text, flags, kept = pointer(texts.text, 0), pointer(texts.flags, 0), pointer(edited.out, 0)
    ends, left = edited.ends, edited.left
    ends[0] = 0
    for k in range(len(left)):
        start, end = texts.offsets[k], texts.offsets[k + 1] - 1
        at_out = ends[k]
        left[k] = _needs_plain(text, start, end)
        if not left[k]:
            row = pointer(edited.counts, k * NUM_COUNTS)
            stop, edited.same_words[k] = _edit(Span(text, start, end, flags), rules, kept, at_out, row)
            left[k] = stop == UNDECIDED
            at_out = at_out if left[k] else stop
        ends[k + 1] = close_text(kept, ends[k], at_out, flags)


@cached_njit(nogil=True)
def _edit(span, rules, out, at_out, counts):
    """Copy the kept lines; returns (their end in out, or UNDECIDED, whether they have all words of the text)."""
    text, at, end, flags = span
    max_word, citations, terminal, min_words, javascript, policy = rules
    changed = 0  # lines with words that were removed or changed
    while at < end:
        stop = find_newline(text, at, end)
        counts[LINES] += 1
        first = skip_space(text, at, stop, flags, SPACE)
        last = strip_end(text, first, stop, flags, SPACE)
        at = stop + 1
        changed += first < last
        if max_word >= 0 and last - first > max_word and _has_longer_word(text, first, last, flags, max_word):
            counts[LONG_WORD] += 1
            continue
        # a citation at the end hides the mark before it, and dots behind one may be an ellipsis when it is gone
        if terminal and not _is_terminated(text, first, last, citations):
            counts[NO_TERMINAL] += 1
            continue
        if citations and holds_bytes(text, first, last, 0x5B, 1):
            end_out = _without_citations(text, first, last, flags, out, at_out)
            if end_out == UNDECIDED:
                return UNDECIDED, False
        else:
            end_out = copy_bytes(text, first, last, out, at_out)
        if terminal and not _is_terminated(out, at_out, end_out, False):
            counts[NO_TERMINAL] += 1
            continue
        if min_words > 0 and not has_words(text, first, last, flags, min_words):
            counts[FEW_WORDS] += 1
            continue
        phrases = _phrases(out, at_out, end_out)
        counts[LOREM_IPSUM] += phrases & HAS_LOREM != 0
        if javascript and phrases & HAS_JAVASCRIPT:
            counts[REMOVED_JAVASCRIPT] += 1
            continue
        counts[CURLY] += phrases & HAS_BRACKET != 0
        if policy and phrases & HAS_POLICY:
            counts[REMOVED_POLICY] += 1
            continue
        out[end_out] = NEWLINE
        changed -= first < last and end_out - at_out == last - first
        at_out = end_out + 1
    return at_out, changed == 0


@cached_njit(nogil=True, forceinline=True)
def _is_terminated(text, first, last, citations):
    """. ? ! " ' but not ...; with citations also what may be one of these once citations are gone."""
    if first == last:
        return False
    byte = text[last - 1]
    if byte == 0x2E:
        return citations or not (last - first >= 3 and text[last - 2] == 0x2E and text[last - 3] == 0x2E)
    return byte == 0x3F or byte == 0x21 or byte == 0x22 or byte == 0x27 or (citations and byte == 0x5D)


@cached_njit(nogil=True)
def _without_citations(text, first, last, flags, out, at_out):
    """Copy the line without its citations ([12], [], [edit], [citation needed]); returns UNDECIDED for non-ASCII
    digits."""
    at = first
    while at < last:
        byte = text[at]
        if byte == 0x5B:
            stop = at + 1
            while stop < last and 0x30 <= text[stop] <= 0x39:
                stop += 1
            if stop < last and text[stop] == 0x5D:
                at = stop + 1
                continue
            if stop < last and text[stop] >= 0x80:
                code, _ = decode(text, stop)
                if flags[code] & DIGIT:
                    return UNDECIDED
            if _is(text, last, at + 1, EDIT):
                at += 1 + len(EDIT)
                continue
            if _is(text, last, at + 1, NEEDED):
                at += 1 + len(NEEDED)
                continue
        out[at_out] = byte
        at_out += 1
        at += 1
    return at_out


@cached_njit(nogil=True, forceinline=True)
def _is(text, end, first, wanted):
    if first + len(wanted) > end:
        return False
    for i in range(len(wanted)):  # noqa: SIM110 - numba has no all()
        if text[first + i] != wanted[i]:
            return False
    return True


@cached_njit(nogil=True)
def _has_longer_word(text, first, last, flags, most):
    length, at = 0, first
    while at < last:
        code, size = decode(text, at)
        length = 0 if flags[code] & SPACE else length + 1
        if length > most:
            return True
        at += size
    return False


@cached_njit(nogil=True)
def _phrases(text, first, last):
    """Which phrases the line contains (HAS_...). Each is searched at three letters that are rarely adjacent: jav,
    ook (cookie), vac (privacy), "f u" (of use), ips (ipsum)."""
    phrases = 0
    for base in range(first, last, BLOCK):
        after_a = _letter(text, base + 1, 0x61)
        marks = _letter(text, base, 0x6A) & after_a & _letter(text, base + 2, 0x76)
        marks |= _letter(text, base, 0x76) & after_a & _letter(text, base + 2, 0x63)
        marks |= _letter(text, base, 0x6F) & _letter(text, base + 1, 0x6F) & _letter(text, base + 2, 0x6B)
        marks |= _letter(text, base, 0x66) & bytes_within(text, base + 1, 0x20, 1) & _letter(text, base + 2, 0x75)
        marks |= _letter(text, base, 0x69) & _letter(text, base + 1, 0x70) & _letter(text, base + 2, 0x73)
        inside = below(last - base)
        if bytes_within(text, base, 0x7B, 1) & inside != ZERO:
            phrases |= HAS_BRACKET
        marks &= inside
        while marks != ZERO:
            phrases |= _phrase_at(text, first, last, base + first_bit(marks))
            marks = without_first(marks)
    return phrases


@cached_njit(nogil=True, forceinline=True)
def _letter(text, base, small):
    return letters_within(text, base, small, 1)


@cached_njit(nogil=True)
def _phrase_at(text, first, last, place):
    """The phrase whose three letters are at `place`, if any."""
    small = text[place] | 0x20
    if small == 0x6A:
        return HAS_JAVASCRIPT if phrase_at(text, first, last, place, JAVASCRIPT) else 0
    if small == 0x69:
        return HAS_LOREM if phrase_at(text, first, last, place - 6, LOREM) else 0
    if small == 0x76:
        return HAS_POLICY if phrase_at(text, first, last, place - 3, PRIVACY) else 0
    if small == 0x66:
        return HAS_POLICY if phrase_at(text, first, last, place - 7, TERMS) else 0
    cookie = place - 1
    if phrase_at(text, first, last, cookie, COOKIE_POLICY):
        return HAS_POLICY
    if not phrase_at(text, first, last, cookie, COOKIES):
        return 0
    used = phrase_at(text, first, last, cookie - 4, USE) or phrase_at(text, first, last, cookie - 5, USES)
    return HAS_POLICY if used or phrase_at(text, first, last, cookie - 7, USE_OF) else 0


@cached_njit(nogil=True)
def _needs_plain(text, start, end):
    """Whether the text contains a line end other than a newline, or a Kelvin sign."""
    for base in range(start, end, BLOCK):
        odd = bytes_within(text, base, 0x0B, 3) | bytes_within(text, base, 0x1C, 3)
        odd |= bytes_within(text, base, 0xC2, 1) & bytes_within(text, base + 1, 0x85, 1)
        wide = bytes_within(text, base, 0xE2, 1)
        if wide != ZERO:
            odd |= wide & bytes_within(text, base + 1, 0x80, 1) & bytes_within(text, base + 2, 0xA8, 2)
            odd |= wide & bytes_within(text, base + 1, 0x84, 1) & bytes_within(text, base + 2, 0xAA, 1)
        if odd & below(end - base) != ZERO:
            return True
    return False
