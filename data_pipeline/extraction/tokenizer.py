"""Flat tokenizer of HTML: text blocks and the tree of block-level elements in one pass, without a DOM library.

A text block is the text between two tags of block-level elements (or between two <br> in a row). Elements are rows of
an array in document order, each with its parent; inline elements have no row. Differences to browsers: no foster
parenting, no adoption of formatting elements, at most MAX_DEPTH levels (deeper elements belong to their ancestor)."""

import numpy as np

from gristmill.data_pipeline.extraction.attributes import (
    FLAGS,
    HAS_HREF,
    HREF_END,
    HREF_START,
    IS_ARTICLE,
    IS_MAIN,
    IS_NAVIGATION,
    MAX_WEIGHT,
    MIN_WEIGHT,
    NUM_FOUND,
    SELF_CLOSED,
    SUM_WEIGHT,
    TOKENS_HASH,
    scan_attributes,
    skip_attributes,
)
from gristmill.data_pipeline.extraction.entities import decode_reference
from gristmill.data_pipeline.extraction.find_byte import find_byte
from gristmill.data_pipeline.extraction.tags import (
    BLOCK,
    BOLD,
    BREAK,
    CELL,
    CONTROL,
    HEADING,
    IMAGE,
    ITEM,
    LINK,
    LOOKUP_BITS,
    RAW,
    SKIPPED,
    TAG_IDS,
    TAG_KEYS,
    TAG_KINDS,
    TAG_VALUES,
    VOID,
)
from gristmill.foundation.cached_njit import cached_njit

MAX_DEPTH = 250

# Columns of elements, int32[E, 6].
PARENT, TAG, ELEMENT_FLAGS, DEPTH, PATH_HASH, NUM_CHILDREN = range(6)
# Columns of the elements' token weights, float32[E, 6]: of the element, and over it and its ancestors.
OWN_MIN, OWN_MAX, OWN_SUM, PATH_MIN, PATH_MAX, PATH_SUM = range(6)
# Columns of blocks, int32[B, 11]. START, END: bytes of the text buffer. SOURCE: byte of the page where the block ends.
ELEMENT, START, END, LINK_BYTES, LINKS, BOLD_BYTES, BREAKS, IMAGES, CONTROLS, INLINE_FLAGS, SOURCE = range(11)

# Columns of links, int32[L, 3]: the block the link is in, and the bytes of the page that hold its address.
LINK_BLOCK, ADDRESS_START, ADDRESS_END = range(3)

# Flags of elements beside those of attributes.py: of the element's tag and its ancestors'.
FLAG_BIT = 8
FLAG_TAGS = (
    ("nav", IS_NAVIGATION), ("main", IS_MAIN), ("article", IS_ARTICLE), ("header", 1 << 8), ("footer", 1 << 9),
    ("aside", 1 << 10), ("form", 1 << 11), ("ul", 1 << 12), ("ol", 1 << 12), ("table", 1 << 13), ("li", 1 << 14),
    ("figure", 1 << 15), ("blockquote", 1 << 16), ("section", 1 << 17), ("dl", 1 << 18), ("pre", 1 << 19),
    ("p", 1 << 20), ("button", 1 << 21), ("details", 1 << 22), ("listing", 1 << 19), ("figcaption", 1 << 23),
    ("h1", 1 << 24), ("h2", 1 << 25), ("h3", 1 << 25), ("h4", 1 << 25), ("h5", 1 << 25), ("h6", 1 << 25),
)  # fmt: skip
IN_LIST, IN_TABLE, IN_CODE = 1 << 12, 1 << 13, 1 << 19
NUM_FLAGS = 26
TAG_FLAGS = np.zeros(len(TAG_KINDS), np.int64)
for _name, _flag in FLAG_TAGS:
    TAG_FLAGS[TAG_IDS[_name]] |= _flag

# State of a page's pass.
(
    OUT, BLOCK_START, SPACE, LINK_FROM, BOLD_FROM, S_LINK_BYTES, S_LINKS, S_BOLD_BYTES, S_BREAKS, S_IMAGES, S_CONTROLS,
    BREAKS_IN_A_ROW, CURRENT, OVERFLOW, NUM_BLOCKS, NUM_ELEMENTS, NUM_PAIRS, TITLE_START, TITLE_END, SEEN_BODY, AT,
    S_INLINE_FLAGS, NUM_LINKS,
) = range(23)  # fmt: skip
NUM_STATES = 23
NO_SPACE, ONE_SPACE, LINE_END = 0, 1, 2

HTML, BODY, P, LI, DT, DD, UL, OL = (TAG_IDS[name] for name in ("html", "body", "p", "li", "dt", "dd", "ul", "ol"))
TABLE, TR, TD, TH, DIV, TITLE = (TAG_IDS[name] for name in ("table", "tr", "td", "th", "div", "title"))
THEAD, TBODY, TFOOT, CAPTION, SCRIPT = (TAG_IDS[name] for name in ("thead", "tbody", "tfoot", "caption", "script"))
ADDRESS, STYLE_TAG, SVG = (TAG_IDS[name] for name in ("address", "style", "svg"))


@cached_njit(nogil=True)
def tokenize(html, end, weights, out, elements, element_weights, blocks, links, pairs, state):
    """Fill out (the blocks' text), elements, element_weights, blocks, links and pairs; state has their lengths.

    html: uint8[end + PADDING]. Row 0 of elements is the page itself. out has 3 / 2 of the page's bytes (no character
    reference grows by more), elements, blocks and links a row for each '<' and one more."""
    state[:] = 0
    state[LINK_FROM] = state[BOLD_FROM] = -1
    elements[0] = 0
    element_weights[0] = 0
    state[NUM_ELEMENTS] = 1
    missing = np.zeros(len(TAG_KINDS), np.bool_)
    found, found_weights = np.zeros(NUM_FOUND, np.int64), np.zeros(3, np.float32)
    at = 0
    while at < end:
        at = _copy_text(html, at, end, out, elements, state)
        if at >= end:
            break
        following = html[at + 1]
        if following == 47:  # </
            key, name_end = _tag_name(html, at + 2, end)
            at = skip_attributes(html, name_end, end)
            state[AT] = at
            _end_tag(_lookup(key), elements, blocks, state)
        elif following == 33 or following == 63:  # <! <?
            at = _skip_declaration(html, at, end)
        else:
            key, name_end = _tag_name(html, at + 1, end)
            tag = _lookup(key)
            kind = TAG_KINDS[tag]
            state[AT] = at
            element = state[NUM_ELEMENTS] if kind & BLOCK else -1
            at, state[NUM_PAIRS] = scan_attributes(
                html, name_end, end, weights, found, found_weights, pairs, state[NUM_PAIRS], element
            )
            if kind & (RAW | SKIPPED):
                at = _skip_content(html, at, end, tag, kind, found[SELF_CLOSED], missing, state)
            elif kind & BLOCK:
                _start_block(tag, kind, found, found_weights, elements, element_weights, blocks, state)
            else:
                _start_inline(kind, found, elements, blocks, links, state)
    state[AT] = end
    _flush(blocks, state)


@cached_njit(nogil=True, inline="always")
def _tag_name(html, at, end):
    key, start = np.int64(0), at
    while at < end:
        byte = np.int64(html[at])
        if byte <= 32 or byte == 62 or byte == 47:
            break
        key = key * 40 + (byte & 31 if byte >= 64 else max(byte - 21, 0)) if at - start < 11 else np.int64(-2)
        at += 1
    return key, at


@cached_njit(nogil=True, inline="always")
def _lookup(key):
    at = (((key ^ (key >> 17)) * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - LOOKUP_BITS)
    while TAG_KEYS[at] >= 0:
        if TAG_KEYS[at] == key:
            return TAG_VALUES[at]
        at = (at + 1) & ((1 << LOOKUP_BITS) - 1)
    return np.int64(0)


@cached_njit(nogil=True)
def _copy_text(html, at, end, out, elements, state):
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


@cached_njit(nogil=True, inline="always")
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
def _flush(blocks, state):
    """End the current block; one without text is dropped, and its images and controls count for the next."""
    where = state[OUT]
    state[SPACE], state[BREAKS_IN_A_ROW] = NO_SPACE, 0
    if where == state[BLOCK_START]:
        return
    _end_link(state)
    link_is_open, bold_is_open = state[LINK_FROM] == -2, state[BOLD_FROM] >= 0
    if bold_is_open:
        state[S_BOLD_BYTES] += where - state[BOLD_FROM]
    k = state[NUM_BLOCKS]
    blocks[k, ELEMENT], blocks[k, START], blocks[k, END] = state[CURRENT], state[BLOCK_START], where
    blocks[k, LINK_BYTES], blocks[k, LINKS] = state[S_LINK_BYTES], state[S_LINKS]
    blocks[k, BOLD_BYTES], blocks[k, BREAKS] = state[S_BOLD_BYTES], state[S_BREAKS]
    blocks[k, IMAGES], blocks[k, CONTROLS], blocks[k, SOURCE] = state[S_IMAGES], state[S_CONTROLS], state[AT]
    blocks[k, INLINE_FLAGS] = state[S_INLINE_FLAGS]
    state[NUM_BLOCKS] = k + 1
    state[BLOCK_START] = where
    state[LINK_FROM] = where if link_is_open else -1
    state[BOLD_FROM] = where if bold_is_open else -1
    state[S_LINK_BYTES] = state[S_BOLD_BYTES] = state[S_BREAKS] = state[S_IMAGES] = state[S_CONTROLS] = 0
    state[S_LINKS] = 1 if link_is_open else 0
    state[S_INLINE_FLAGS] = 0


@cached_njit(nogil=True)
def _end_link(state):
    """Add the open link's text; LINK_FROM becomes -2 if one was open."""
    if state[LINK_FROM] >= 0:
        state[S_LINK_BYTES] += state[OUT] - state[LINK_FROM]
        state[LINK_FROM] = -2


@cached_njit(nogil=True)
def _start_inline(kind, found, elements, blocks, links, state):
    if kind & LINK:
        _end_link(state)
        is_link = found[HAS_HREF] and not found[SELF_CLOSED]
        state[LINK_FROM] = state[OUT] if is_link else -1
        state[S_LINKS] += found[HAS_HREF]
        if is_link:
            k = state[NUM_LINKS]
            links[k, LINK_BLOCK] = state[NUM_BLOCKS]
            links[k, ADDRESS_START], links[k, ADDRESS_END] = found[HREF_START], found[HREF_END]
            state[NUM_LINKS] = k + 1
    elif kind & BOLD:
        if state[BOLD_FROM] < 0:
            state[BOLD_FROM] = state[OUT]
    elif kind & BREAK:
        state[S_BREAKS] += 1
        state[BREAKS_IN_A_ROW] += 1
        if state[BREAKS_IN_A_ROW] > 1 and not elements[state[CURRENT], ELEMENT_FLAGS] & IN_CODE:
            _flush(blocks, state)
        else:
            state[SPACE] = LINE_END
    elif kind & IMAGE:
        state[S_IMAGES] += 1
    elif kind & CONTROL:
        state[S_CONTROLS] += 1
    state[S_INLINE_FLAGS] |= found[FLAGS]


@cached_njit(nogil=True)
def _start_block(tag, kind, found, found_weights, elements, element_weights, blocks, state):
    _flush(blocks, state)
    if kind & VOID:
        return
    if tag == HTML or (tag == BODY and state[SEEN_BODY]):
        return
    if tag == BODY:
        state[SEEN_BODY] = 1
    _close_implied(tag, kind, elements, state)
    parent = state[CURRENT]
    if state[OVERFLOW] > 0 or elements[parent, DEPTH] >= MAX_DEPTH:
        if tag != P and not kind & (ITEM | CELL):  # those are often left open
            state[OVERFLOW] += 1
        return
    e = state[NUM_ELEMENTS]
    state[NUM_ELEMENTS] = e + 1
    elements[parent, NUM_CHILDREN] += 1
    elements[e, PARENT], elements[e, TAG], elements[e, DEPTH] = parent, tag, elements[parent, DEPTH] + 1
    elements[e, NUM_CHILDREN] = 0
    elements[e, ELEMENT_FLAGS] = elements[parent, ELEMENT_FLAGS] | found[FLAGS] | TAG_FLAGS[tag]
    mixed = (np.int64(elements[parent, PATH_HASH]) * 31 + tag * 7919 + found[TOKENS_HASH]) * 0x9E3779B1
    elements[e, PATH_HASH] = (mixed >> 7) & 0x7FFFFFFF
    element_weights[e, OWN_MIN], element_weights[e, OWN_MAX] = found_weights[MIN_WEIGHT], found_weights[MAX_WEIGHT]
    element_weights[e, OWN_SUM] = found_weights[SUM_WEIGHT]
    element_weights[e, PATH_MIN] = min(element_weights[parent, PATH_MIN], found_weights[MIN_WEIGHT])
    element_weights[e, PATH_MAX] = max(element_weights[parent, PATH_MAX], found_weights[MAX_WEIGHT])
    element_weights[e, PATH_SUM] = element_weights[parent, PATH_SUM] + found_weights[SUM_WEIGHT]
    state[CURRENT] = e


@cached_njit(nogil=True)
def _close_implied(tag, kind, elements, state):
    """Close what a start tag closes: a paragraph, a heading before another, items, cells and rows."""
    current = state[CURRENT]
    if elements[current, TAG] == P:
        current = state[CURRENT] = elements[current, PARENT]
    if kind & HEADING and TAG_KINDS[elements[current, TAG]] & HEADING:
        state[CURRENT] = elements[current, PARENT]
    elif kind & ITEM:
        e = current
        while e > 0:
            held = elements[e, TAG]
            if held == tag or (tag != LI and (held in (DT, DD))):
                state[CURRENT] = elements[e, PARENT]
                return
            if held != P and held != DIV and held != ADDRESS:
                return
            e = elements[e, PARENT]
    elif tag in (TD, TH, TR, TBODY, THEAD, TFOOT):
        e = current
        while e > 0:
            held = elements[e, TAG]
            if held == TABLE:
                return
            if held == TR and (tag in (TD, TH)):
                return
            if (held in (TBODY, THEAD, TFOOT)) and tag == TR:
                return
            is_cell = held in (TD, TH)
            if is_cell or held in (TR, TBODY, THEAD, TFOOT, CAPTION):
                state[CURRENT] = elements[e, PARENT]
            e = elements[e, PARENT]


@cached_njit(nogil=True)
def _end_tag(tag, elements, blocks, state):
    kind = TAG_KINDS[tag]
    if kind & LINK:
        _end_link(state)
        state[LINK_FROM] = -1
    elif kind & BOLD:
        if state[BOLD_FROM] >= 0:
            state[S_BOLD_BYTES] += state[OUT] - state[BOLD_FROM]
            state[BOLD_FROM] = -1
    elif kind & BLOCK:
        _flush(blocks, state)
        if tag in (BODY, HTML) or kind & VOID:
            return
        if state[OVERFLOW] > 0:
            if tag != P and not kind & (ITEM | CELL):
                state[OVERFLOW] -= 1
            return
        _close(tag, elements, state)


@cached_njit(nogil=True)
def _close(tag, elements, state):
    """Close the nearest open element of that tag, and what is open inside; none beyond the table or cell it is in."""
    is_part = tag in (TR, TD, TH, TBODY, THEAD, TFOOT, CAPTION)
    e = state[CURRENT]
    while e > 0:
        held = elements[e, TAG]
        if held == tag or (TAG_KINDS[tag] & HEADING and TAG_KINDS[held] & HEADING):
            state[CURRENT] = elements[e, PARENT]
            return
        if held == TABLE and tag != TABLE:
            return
        if (held in (TD, TH)) and not is_part and tag != TABLE:
            return
        e = elements[e, PARENT]


@cached_njit(nogil=True)
def _skip_content(html, at, end, tag, kind, self_closed, missing, state):
    """The position behind the end tag of an element whose content is no text. Without an end tag: the end of the page
    for scripts, styles and their like, as in browsers; else `at`, so that the page is not lost."""
    if kind & CONTROL:
        state[S_CONTROLS] += 1
    if self_closed or missing[tag]:
        return at
    k = find_byte(html, at, end, 60)
    while k < end:
        if html[k + 1] == 47:
            key, name_end = _tag_name(html, k + 2, end)
            if _lookup(key) == tag:
                if tag == TITLE and state[TITLE_END] == 0:
                    state[TITLE_START], state[TITLE_END] = at, k
                return skip_attributes(html, name_end, end)
        k = find_byte(html, k + 1, end, 60)
    if tag in (SCRIPT, STYLE_TAG):
        return end
    missing[tag] = True
    return at


@cached_njit(nogil=True)
def _skip_declaration(html, at, end):
    """The position behind a comment, a doctype or a processing instruction."""
    if html[at + 1] == 33 and html[at + 2] == 45 and html[at + 3] == 45:
        k = at + 4
        if html[k] == 62:
            return k + 1
        k = find_byte(html, k, end, 62)
        while k < end:
            if html[k - 1] == 45 and html[k - 2] == 45:
                return k + 1
            k = find_byte(html, k + 1, end, 62)
        return end
    return min(find_byte(html, at + 2, end, 62) + 1, end)
