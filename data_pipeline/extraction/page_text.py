"""Text of a page: copied with white space collapsed and character references decoded."""

from gristmill.data_pipeline.extraction.entities import decode_reference
from gristmill.data_pipeline.extraction.page_arrays import (
    BLOCK_START,
    BREAKS_IN_A_ROW,
    CURRENT,
    ELEMENT_FLAGS,
    IN_CODE,
    LINE_END,
    NO_SPACE,
    ONE_SPACE,
    OUT,
    SPACE,
)
from gristmill.foundation.cached_njit import cached_njit


@cached_njit(nogil=True)
def copy_text(html, at, end, out, elements, state):
    """Copy text up to the next tag, white space collapsed (not in <pre>) and references decoded; returns where."""
    where, space = state[OUT], state[SPACE]
    start = state[BLOCK_START]
    code = (elements[state[CURRENT], ELEMENT_FLAGS] & IN_CODE) != 0
    while at < end:
        byte = html[at]
        size, written = 1, 1
        if byte == 60:
            following = html[at + 1] if at + 1 < end else 0
            if 97 <= following | 32 <= 122 or following == 47 or following == 33 or following == 63:
                break
            out[where + 1] = byte
        elif byte <= 32:
            if code and (byte == 32 or byte == 10 or byte == 9):
                out[where] = byte
                where += 1 if where > start or byte != 10 else 0
            elif byte == 32 or 9 <= byte <= 13:
                space = max(space, ONE_SPACE)
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
                space = max(space, ONE_SPACE)
                continue
            if role == 2:
                continue
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
    return at


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
