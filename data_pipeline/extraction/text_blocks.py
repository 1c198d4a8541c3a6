"""Text blocks of a page: where they end, and what inline elements add to them."""

import numpy as np

from gristmill.data_pipeline.extraction.attributes import (
    ADDRESS_END,
    ADDRESS_START,
    AT,
    BLOCK_START,
    BOLD_BYTES,
    BOLD_FROM,
    BREAKS,
    BREAKS_IN_A_ROW,
    CONTROLS,
    CURRENT,
    ELEMENT,
    ELEMENT_FLAGS,
    END,
    FIXED_SPACE,
    FLAGS,
    HAS_HREF,
    HREF_END,
    HREF_START,
    HTML_END,
    HTML_START,
    IMAGES,
    IN_CODE,
    INLINE_FLAGS,
    LINE_END,
    LINK_BLOCK,
    LINK_BYTES,
    LINK_FROM,
    LINK_HTML_END,
    LINKS,
    MARK,
    NO_SPACE,
    NUM_BLOCKS,
    NUM_LINKS,
    ONE_SPACE,
    OUT,
    S_BOLD_BYTES,
    S_BREAKS,
    S_CONTROLS,
    S_HTML_END,
    S_HTML_START,
    S_IMAGES,
    S_INLINE_FLAGS,
    S_LINK_BYTES,
    S_LINKS,
    SELF_CLOSED,
    SOURCE,
    SOURCE_LINE_END,
    SPACE,
    START,
    decode_reference,
    find_byte,
)
from gristmill.data_pipeline.extraction.tags import BOLD, BREAK, CONTROL, IMAGE, LINK
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit


@cached_njit(nogil=True)
def end_block(blocks, state):
    """End the current block; one without text is dropped, and its images and controls count for the next."""
    where = state[OUT]
    state[SPACE], state[BREAKS_IN_A_ROW] = NO_SPACE, 0
    if where == state[BLOCK_START]:
        return
    end_link(state)
    link_is_open, bold_is_open = state[LINK_FROM] == -2, state[BOLD_FROM] >= 0
    if bold_is_open:
        state[S_BOLD_BYTES] += where - state[BOLD_FROM]
    k = state[NUM_BLOCKS]
    blocks[k, ELEMENT], blocks[k, START], blocks[k, END] = state[CURRENT], state[BLOCK_START], where
    blocks[k, LINK_BYTES], blocks[k, LINKS] = state[S_LINK_BYTES], state[S_LINKS]
    blocks[k, BOLD_BYTES], blocks[k, BREAKS] = state[S_BOLD_BYTES], state[S_BREAKS]
    blocks[k, IMAGES], blocks[k, CONTROLS], blocks[k, SOURCE] = state[S_IMAGES], state[S_CONTROLS], state[AT]
    blocks[k, INLINE_FLAGS] = state[S_INLINE_FLAGS]
    blocks[k, HTML_START], blocks[k, HTML_END] = state[S_HTML_START], state[S_HTML_END]
    state[NUM_BLOCKS] = k + 1
    state[BLOCK_START] = where
    state[LINK_FROM] = where if link_is_open else -1
    state[BOLD_FROM] = where if bold_is_open else -1
    state[S_LINK_BYTES] = state[S_BOLD_BYTES] = state[S_BREAKS] = state[S_IMAGES] = state[S_CONTROLS] = 0
    state[S_LINKS] = 1 if link_is_open else 0
    state[S_INLINE_FLAGS] = 0


@cached_njit(nogil=True)
def end_link(state):
    """Add the open link's text; LINK_FROM becomes -2 if one was open."""
    if state[LINK_FROM] >= 0:
        state[S_LINK_BYTES] += state[OUT] - state[LINK_FROM]
        state[LINK_FROM] = -2


_MARKS = "¶§#^↩↑🔗"  # of links from a heading to itself, and from a note to where it is called
_MARK_ENDS = np.cumsum([len(mark.encode()) for mark in _MARKS])
_MARK_BYTES = np.frombuffer(_MARKS.encode(), np.uint8)
_VARIATION = np.frombuffer("\ufe0e".encode(), np.uint8)  # as text, behind a mark


@cached_njit(nogil=True)
def find_mark(html, out, elements, links, state):
    """At the end of a link: if it leads to a place of a page and its text is a mark, its row becomes that of one."""
    start, stop = state[LINK_FROM], state[OUT]
    if start < 0 or not 0 < stop - start <= 8 or state[NUM_LINKS] == 0 or is_code(elements, state):
        return
    first = start + (out[start] <= 32)
    if stop - first > 3 and _are_equal(out, stop - 3, stop, _VARIATION, 0, 3):
        stop -= 3
    number, at = 0, 0
    while number < len(_MARK_ENDS) and not _are_equal(out, first, stop, _MARK_BYTES, at, _MARK_ENDS[number]):
        at = _MARK_ENDS[number]
        number += 1
    row = links[state[NUM_LINKS] - 1]
    address_end = row[ADDRESS_END]
    if number < len(_MARK_ENDS) and find_byte(html, row[ADDRESS_START], address_end, 35) < address_end:
        row[LINK_BLOCK], row[ADDRESS_START], row[ADDRESS_END] = MARK, first, state[OUT]
        state[S_HTML_END] = state[LINK_HTML_END]


@cached_njit(nogil=True)
def drop_marks(text, blocks, marks):
    """Take the marks out of the text, with the spaces that they leave at the start or the end of a block or beside
    another space. marks: rows of links."""
    written, m = 0, 0
    for k in range(len(blocks)):
        at, end, start, before = blocks[k, START], blocks[k, END], written, m
        while at < end:
            if m < len(marks) and at == marks[m, ADDRESS_START]:
                at = marks[m, ADDRESS_END]
                m += 1
                while at < end and text[at] <= 32 and (written == start or text[written - 1] <= 32):
                    at += 1
            else:
                text[written] = text[at]
                written += 1
                at += 1
        while m > before and written > start and text[written - 1] <= 32:
            written -= 1
        blocks[k, START], blocks[k, END] = start, written


@cached_njit(nogil=True)
def _are_equal(out, start, stop, marks, at, end):
    if stop - start != end - at:
        return False
    k = 0
    while k < end - at and out[start + k] == marks[at + k]:
        k += 1
    return k == end - at


@cached_njit(nogil=True, forceinline=True)
def is_code(elements, state):
    return (elements[state[CURRENT], ELEMENT_FLAGS] & IN_CODE) != 0


@cached_njit(nogil=True)
def start_inline(kind, properties, out, elements, blocks, links, state):
    if kind & LINK:
        end_link(state)
        is_link = properties[HAS_HREF] and not properties[SELF_CLOSED]
        state[LINK_FROM], state[LINK_HTML_END] = state[OUT] if is_link else -1, state[S_HTML_END]
        state[S_LINKS] += properties[HAS_HREF]
        if is_link:
            k = state[NUM_LINKS]
            links[k, LINK_BLOCK] = state[NUM_BLOCKS]
            links[k, ADDRESS_START], links[k, ADDRESS_END] = properties[HREF_START], properties[HREF_END]
            state[NUM_LINKS] = k + 1
    elif kind & BOLD:
        if state[BOLD_FROM] < 0:
            state[BOLD_FROM] = state[OUT]
    elif kind & BREAK:
        state[S_BREAKS] += 1
        state[BREAKS_IN_A_ROW] += 1
        if is_code(elements, state):
            if state[OUT] > state[BLOCK_START]:
                out[state[OUT]] = 10
                state[OUT] += 1
        elif state[BREAKS_IN_A_ROW] > 1:
            end_block(blocks, state)
        else:
            state[SPACE] = LINE_END
    elif kind & IMAGE:
        state[S_IMAGES] += 1
    elif kind & CONTROL:
        state[S_CONTROLS] += 1
    state[S_INLINE_FLAGS] |= properties[FLAGS]


# Text of a page: copied with white space collapsed and character references decoded.


@cached_njit(nogil=True)
def copy_text(html, at, end, out, elements, state):
    """Copy text up to the next tag, white space collapsed (not in <pre>) and references decoded; returns where."""
    where, space = state[OUT], state[SPACE]
    start = state[BLOCK_START]
    html_start, html_end = state[S_HTML_START], state[S_HTML_END]
    code = is_code(elements, state)
    while at < end:
        byte = html[at]
        if where > start and space == NO_SPACE and 32 < byte < 0x80 and byte != 38 and byte != 60:  # most of a word
            out[where] = byte
            where += 1
            at += 1
            html_end = at
            continue
        size, written = 1, 1
        if byte == 60:
            following = html[at + 1] if at + 1 < end else 0
            if 97 <= following | 32 <= 122 or following == 47 or following == 33 or following == 63:
                break
            out[where + 1] = byte
        elif byte <= 32:
            if code and (byte == 32 or byte == 10 or byte == 9):
                out[where] = byte
                if where == start:
                    html_start = at
                where += 1 if where > start or byte != 10 else 0
            elif byte == 32 or 9 <= byte <= 13:
                space = max(space, SOURCE_LINE_END if byte == 10 or byte == 13 else ONE_SPACE)
            at += 1
            continue
        elif byte == 38:  # a reference
            size, written = decode_reference(html, at, end, out, where + 1)
            if size == 0:
                size, written = 1, 1
                out[where + 1] = byte
        elif byte < 0xC2:
            out[where + 1] = byte
        else:
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            size = min(size, end - at)
            written = size
            for k in range(size):
                out[where + 1 + k] = html[at + k]
        at += size
        if written > 1 or out[where + 1] <= 32:
            role = _special(out, where + 1, written)
            if role == 1:
                space = max(space, FIXED_SPACE)
                continue
            if role == 2:
                continue
        html_end = at
        if where == start:
            html_start = at - size
        if space == SOURCE_LINE_END and where > start + 2 and _is_wide(out, where - 3) and _is_wide(out, where + 1):
            space = NO_SPACE
        if space and where > start:
            out[where] = 10 if space == LINE_END else 32
            where += 1
        else:
            for k in range(written):
                out[where + k] = out[where + 1 + k]
        space = NO_SPACE
        where += written
    state[BREAKS_IN_A_ROW] = state[BREAKS_IN_A_ROW] if where == state[OUT] else 0
    state[OUT], state[SPACE] = where, space
    state[S_HTML_START], state[S_HTML_END] = html_start, html_end
    return at


@cached_njit(nogil=True, forceinline=True)
def _is_wide(out, at):
    """Whether a character of Chinese or Japanese, up to U+FFFF, stands there. A line end of the source between two of
    them is no white space.

    Source: W3C, CSS Text 3, 4.1.3 (segment breaks)."""
    first, second = out[at], out[at + 1]
    return 0xE3 <= first <= 0xE9 or (first == 0xEF and 0xBC <= second <= 0xBD)


@cached_njit(nogil=True, forceinline=True)
def _special(out, at, size):
    """1: a space (U+0020, U+00A0, U+3000, U+2000 to U+200A); 2: nothing (controls, U+00AD, U+200B, U+FEFF); 0: text."""
    first = out[at]
    if size == 1:
        return 1 if first == 32 or 9 <= first <= 13 else 2
    second = out[at + 1]
    if first == 0xC2:
        return 1 if second == 0xA0 else 2 if second == 0xAD or second < 0xA0 else 0
    if size == 3:
        third = out[at + 2]
        if first == 0xE2 and second == 0x80 and third <= 0x8B:
            return 2 if third == 0x8B else 1
        if first == 0xE3 and second == 0x80 and third == 0x80:
            return 1
        if first == 0xEF and second == 0xBB and third == 0xBF:
            return 2
    return 0


@cached_njit(nogil=True)
def copy_formula(html, at, end, out, state):
    """Copy TeX between `$`, white space collapsed and references decoded. out has room: its tags are longer than the
    two signs and the space."""
    where, html_start = state[OUT], at
    if state[SPACE] and where > state[BLOCK_START]:
        out[where] = 10 if state[SPACE] == LINE_END else 32
        where += 1
    start = where + 1
    out[where] = 36
    where += 1
    space = False
    while at < end:
        byte = html[at]
        if byte <= 32:
            space = where > start
            at += 1
            continue
        at_space = where
        where += space
        size, written = (1, 0) if byte != 38 else decode_reference(html, at, end, out, where)
        at += max(size, 1)
        if written == 1 and out[where] <= 32:  # a space or a control character
            where, space = at_space, at_space > start
            continue
        if written == 0:
            out[where], written = byte, 1
        if space:
            out[at_space], space = 32, False
        where += written
    if where == start:
        return
    out[where] = 36
    if state[OUT] == state[BLOCK_START]:
        state[S_HTML_START] = html_start
    state[S_HTML_END] = end
    state[OUT], state[SPACE], state[BREAKS_IN_A_ROW] = where + 1, NO_SPACE, 0
