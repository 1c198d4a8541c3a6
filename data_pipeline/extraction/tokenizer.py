"""Flat tokenizer of HTML: text blocks and the tree of block-level elements in one pass, without a DOM library.

A text block is the text between two tags of block-level elements (or between two <br> in a row). Elements are rows of
an array in document order, each with its parent; inline elements have no row."""

import numpy as np

from gristmill.data_pipeline.extraction.attributes import (
    AT,
    BOLD_FROM,
    CURRENT,
    DEPTH,
    ELEMENT_FLAGS,
    FLAGS,
    FOUND_WEIGHTS,
    HAS_PLAIN_MATH,
    IS_LINE_NUMBER,
    IS_RENDERED_MATH,
    IS_TEX,
    LINK_FROM,
    MAX_WEIGHT,
    MIN_WEIGHT,
    MISSING,
    NUM_CHILDREN,
    NUM_ELEMENTS,
    NUM_PAIRS,
    NUM_STATES,
    OUT,
    OVERFLOW,
    OWN_MAX,
    OWN_MIN,
    OWN_SUM,
    PARENT,
    PATH_HASH,
    PATH_MAX,
    PATH_MIN,
    PATH_SUM,
    S_BOLD_BYTES,
    S_CONTROLS,
    SEEN_BODY,
    SELF_CLOSED,
    STATE_SIZE,
    SUM_WEIGHT,
    TAG,
    TAG_FLAGS,
    TAG_START,
    TITLE_END,
    TITLE_START,
    TOKENS_HASH,
    find_byte,
    holds_tex,
    scan_attributes,
    skip_attributes,
)
from gristmill.data_pipeline.extraction.tags import (
    BLOCK,
    BOLD,
    CELL,
    CONTROL,
    HEADING,
    ITEM,
    LINK,
    LOOKUP_BITS,
    MATH,
    RAW,
    READING,
    SKIPPED,
    TAG_IDS,
    TAG_KEYS,
    TAG_KINDS,
    TAG_VALUES,
    VOID,
)
from gristmill.data_pipeline.extraction.text_blocks import (
    copy_formula,
    copy_text,
    end_block,
    end_link,
    find_mark,
    is_code,
    start_inline,
)
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

RENDERED = 0  # the row of elements of rendered mathematics among those without an end tag
TITLE, SCRIPT, STYLE_TAG, RT, RP, RB, RUBY, MATH_TAG, ANNOTATION = (
    TAG_IDS[name] for name in ("title", "script", "style", "rt", "rp", "rb", "ruby", "math", "annotation")
)


@cached_njit(nogil=True)
def tokenize(html, end, weights, out, elements, element_weights, blocks, links, seen, pairs, state):
    """Fill out (the blocks' text), elements, element_weights, blocks, links and pairs; state has their lengths.
    seen gets the page's tokens. No array is made here: a kernel that owns one counts its references at every call.

    html: uint8[end + PADDING]. Row 0 of elements is the page itself. out has 3 / 2 of the page's bytes (no character
    reference grows by more), elements, blocks and links a row for each '<' and one more."""
    state[:] = 0
    state[LINK_FROM] = state[BOLD_FROM] = -1
    elements[0] = 0
    element_weights[0] = 0
    state[NUM_ELEMENTS] = 1
    properties, missing = state[NUM_STATES:FOUND_WEIGHTS], state[MISSING:STATE_SIZE]
    property_weights = state[FOUND_WEIGHTS:MISSING].view(np.float32)
    at = 0
    while at < end:
        at = copy_text(html, at, end, out, elements, state)
        if at >= end:
            break
        following = html[at + 1]
        if following == 47:  # </
            key, name_end = _tag_name(html, at + 2, end)
            at = skip_attributes(html, name_end, end)
            state[AT] = at
            end_tag(_lookup(key), html, out, elements, blocks, links, state)
        elif following == 33 or following == 63:  # <! <?
            at = _skip_declaration(html, at, end)
        else:
            key, name_end = _tag_name(html, at + 1, end)
            tag = _lookup(key)
            kind = TAG_KINDS[tag]
            state[AT] = at
            element = state[NUM_ELEMENTS] if kind & BLOCK else -1
            at, state[NUM_PAIRS] = scan_attributes(
                html, name_end, end, weights, properties, property_weights, seen, pairs, state[NUM_PAIRS], element
            )
            if tag == SCRIPT and properties[FLAGS] & IS_TEX:
                at = put_tex(html, at, end, SCRIPT, out, state)
            elif kind & (RAW | SKIPPED):
                at = _skip_content(html, at, end, tag, kind, properties[SELF_CLOSED], missing, state)
            elif kind & READING:
                at = _skip_reading(html, at, end)
            elif kind & MATH:
                behind = _start_math(html, at, end, out, state)
                state[HAS_PLAIN_MATH] |= behind == at
                at = behind
            elif properties[FLAGS] & IS_RENDERED_MATH and not kind & (BLOCK | VOID):
                at = _skip_element(html, at, end, key, missing)
            elif properties[FLAGS] & IS_LINE_NUMBER and not kind & (BLOCK | VOID) and is_code(elements, state):
                at = _skip_line_number(html, at, end)
            elif kind & BLOCK:
                start_block(tag, kind, properties, property_weights, elements, element_weights, blocks, state)
            else:
                start_inline(kind, properties, out, elements, blocks, links, state)
    state[AT] = end
    end_block(blocks, state)


@cached_njit(nogil=True, forceinline=True)
def _tag_name(html, at, end):
    key, start = np.int64(0), at
    while at < end:
        byte = np.int64(html[at])
        if byte <= 32 or byte == 62 or byte == 47:
            break
        key = key * 40 + (byte & 31 if byte >= 64 else max(byte - 21, 0)) if at - start < 11 else np.int64(-2)
        at += 1
    return key, at


@cached_njit(nogil=True, forceinline=True)
def _lookup(key):
    at = (((key ^ (key >> 17)) * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - LOOKUP_BITS)
    while TAG_KEYS[at] >= 0:
        if TAG_KEYS[at] == key:
            return TAG_VALUES[at]
        at = (at + 1) & ((1 << LOOKUP_BITS) - 1)
    return np.int64(0)


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
    missing[tag] = 1
    return at


@cached_njit(nogil=True)
def _skip_reading(html, at, end):
    """The position of the next tag that ends the pronunciation in a ruby; `at` if there is none."""
    k = find_byte(html, at, end, 60)
    while k < end:
        key, name_end = _tag_name(html, k + 1 + (html[k + 1] == 47), end)
        tag = _lookup(key)
        if tag in (RT, RP):
            return skip_attributes(html, name_end, end) if html[k + 1] == 47 else k
        if tag in (RB, RUBY):
            return k
        if TAG_KINDS[tag] & BLOCK:
            return at
        k = find_byte(html, k + 1, end, 60)
    return at


@cached_njit(nogil=True)
def _start_math(html, at, end, out, state):
    """Copy the TeX annotation of a formula, and return the position behind it; without one, `at`: its text is kept."""
    k = find_byte(html, at, end, 60)
    tex_end = np.int64(-1)
    while k < end:
        is_end = html[k + 1] == 47
        key, name_end = _tag_name(html, k + 1 + is_end, end)
        tag = _lookup(key)
        if tag == MATH_TAG:
            return skip_attributes(html, name_end, end) if is_end and tex_end >= 0 else at
        if tag == ANNOTATION and not is_end and tex_end < 0:
            after = skip_attributes(html, name_end, end)
            if holds_tex(html, name_end, after):
                tex_end = put_tex(html, after, end, ANNOTATION, out, state)
        if TAG_KINDS[tag] & BLOCK:
            return max(at, tex_end)
        k = find_byte(html, max(k + 1, tex_end), end, 60)
    return max(at, tex_end)


@cached_njit(nogil=True)
def _skip_element(html, at, end, name, missing):
    """The position behind the end tag of an inline element, counting elements of its name inside; `at` without one,
    and from then on for all elements, so that the time is linear."""
    depth, k = 1, find_byte(html, at, end, 60)
    while k < end and missing[RENDERED] == 0:
        is_end = html[k + 1] == 47
        key, name_end = _tag_name(html, k + 1 + is_end, end)
        if key == name:
            depth += -1 if is_end else 1
            if depth == 0:
                return skip_attributes(html, name_end, end)
        elif TAG_KINDS[_lookup(key)] & BLOCK:
            break
        k = find_byte(html, k + 1, end, 60)
    missing[RENDERED] = 1
    return at


@cached_njit(nogil=True)
def _skip_line_number(html, at, end):
    """The position behind the end tag of an inline element of digits alone; `at` if it holds something else."""
    depth, k = 1, at
    while k < end:
        byte = html[k]
        if byte <= 32 or 48 <= byte <= 57:
            k += 1
        elif byte == 60:
            depth += -1 if html[k + 1] == 47 else 1
            k = skip_attributes(html, k + 1, end)
            if depth == 0:
                return k
        else:
            return at
    return at


@cached_njit(nogil=True)
def put_tex(html, at, end, tag, out, state):
    """Copy the text up to the element's end tag as a formula between `$`; returns the position behind the tag."""
    k = find_byte(html, at, end, 60)
    while k < end:
        if html[k + 1] == 47:
            key, name_end = _tag_name(html, k + 2, end)
            if _lookup(key) == tag:
                copy_formula(html, at, k, out, state)
                return skip_attributes(html, name_end, end)
        k = find_byte(html, k + 1, end, 60)
    return end


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


# The tree of block-level elements: start tags, the elements that they close, and end tags.
#
# Source: WHATWG, HTML, 13.1.2.4 (optional tags). Differences to browsers: no foster parenting, no adoption of
# formatting elements, at most MAX_DEPTH levels (deeper elements belong to their ancestor).

HTML, BODY, P, LI, DT, DD, TABLE, TR = (
    TAG_IDS[name] for name in ("html", "body", "p", "li", "dt", "dd", "table", "tr")
)
TD, TH, DIV, THEAD, TBODY, TFOOT, CAPTION, ADDRESS = (
    TAG_IDS[name] for name in ("td", "th", "div", "thead", "tbody", "tfoot", "caption", "address")
)

MAX_DEPTH = 250


@cached_njit(nogil=True)
def start_block(tag, kind, properties, property_weights, elements, element_weights, blocks, state):
    end_block(blocks, state)
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
    elements[e, NUM_CHILDREN], elements[e, TAG_START] = 0, state[AT]
    elements[e, ELEMENT_FLAGS] = elements[parent, ELEMENT_FLAGS] | properties[FLAGS] | TAG_FLAGS[tag]
    mixed = (np.int64(elements[parent, PATH_HASH]) * 31 + tag * 7919 + properties[TOKENS_HASH]) * 0x9E3779B1
    elements[e, PATH_HASH] = (mixed >> 7) & 0x7FFFFFFF
    element_weights[e, OWN_MIN], element_weights[e, OWN_MAX] = (
        property_weights[MIN_WEIGHT],
        property_weights[MAX_WEIGHT],
    )
    element_weights[e, OWN_SUM] = property_weights[SUM_WEIGHT]
    element_weights[e, PATH_MIN] = min(element_weights[parent, PATH_MIN], property_weights[MIN_WEIGHT])
    element_weights[e, PATH_MAX] = max(element_weights[parent, PATH_MAX], property_weights[MAX_WEIGHT])
    element_weights[e, PATH_SUM] = element_weights[parent, PATH_SUM] + property_weights[SUM_WEIGHT]
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
            open_tag = elements[e, TAG]
            if open_tag == tag or (tag != LI and (open_tag in (DT, DD))):
                state[CURRENT] = elements[e, PARENT]
                return
            if open_tag != P and open_tag != DIV and open_tag != ADDRESS:
                return
            e = elements[e, PARENT]
    elif tag in (TD, TH, TR, TBODY, THEAD, TFOOT):
        e = current
        while e > 0:
            open_tag = elements[e, TAG]
            if open_tag == TABLE:
                return
            if open_tag == TR and (tag in (TD, TH)):
                return
            if (open_tag in (TBODY, THEAD, TFOOT)) and tag == TR:
                return
            is_cell = open_tag in (TD, TH)
            if is_cell or open_tag in (TR, TBODY, THEAD, TFOOT, CAPTION):
                state[CURRENT] = elements[e, PARENT]
            e = elements[e, PARENT]


@cached_njit(nogil=True)
def end_tag(tag, html, out, elements, blocks, links, state):
    kind = TAG_KINDS[tag]
    if kind & LINK:
        find_mark(html, out, elements, links, state)
        end_link(state)
        state[LINK_FROM] = -1
    elif kind & BOLD:
        if state[BOLD_FROM] >= 0:
            state[S_BOLD_BYTES] += state[OUT] - state[BOLD_FROM]
            state[BOLD_FROM] = -1
    elif kind & BLOCK:
        end_block(blocks, state)
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
        open_tag = elements[e, TAG]
        if open_tag == tag or (TAG_KINDS[tag] & HEADING and TAG_KINDS[open_tag] & HEADING):
            state[CURRENT] = elements[e, PARENT]
            return
        if open_tag == TABLE and tag != TABLE:
            return
        if (open_tag in (TD, TH)) and not is_part and tag != TABLE:
            return
        e = elements[e, PARENT]
