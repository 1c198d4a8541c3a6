"""The tree of block-level elements: start tags, the elements that they close, and end tags.

Source: WHATWG, HTML, 13.1.2.4 (optional tags). Differences to browsers: no foster parenting, no adoption of formatting
elements, at most MAX_DEPTH levels (deeper elements belong to their ancestor)."""

import numpy as np

from gristmill.data_pipeline.extraction.attributes import FLAGS, MAX_WEIGHT, MIN_WEIGHT, SUM_WEIGHT, TOKENS_HASH
from gristmill.data_pipeline.extraction.page_arrays import (
    BOLD_FROM,
    CURRENT,
    DEPTH,
    ELEMENT_FLAGS,
    LINK_FROM,
    NUM_CHILDREN,
    NUM_ELEMENTS,
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
    SEEN_BODY,
    TAG,
    TAG_FLAGS,
)
from gristmill.data_pipeline.extraction.tags import BLOCK, BOLD, CELL, HEADING, ITEM, LINK, TAG_IDS, TAG_KINDS, VOID
from gristmill.data_pipeline.extraction.text_blocks import end_block, end_link
from gristmill.foundation.cached_njit import cached_njit

HTML, BODY, P, LI, DT, DD, TABLE, TR = (
    TAG_IDS[name] for name in ("html", "body", "p", "li", "dt", "dd", "table", "tr")
)
TD, TH, DIV, THEAD, TBODY, TFOOT, CAPTION, ADDRESS = (
    TAG_IDS[name] for name in ("td", "th", "div", "thead", "tbody", "tfoot", "caption", "address")
)

MAX_DEPTH = 250


@cached_njit(nogil=True)
def start_block(tag, kind, found, found_weights, elements, element_weights, blocks, state):
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
def end_tag(tag, elements, blocks, state):
    kind = TAG_KINDS[tag]
    if kind & LINK:
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
        held = elements[e, TAG]
        if held == tag or (TAG_KINDS[tag] & HEADING and TAG_KINDS[held] & HEADING):
            state[CURRENT] = elements[e, PARENT]
            return
        if held == TABLE and tag != TABLE:
            return
        if (held in (TD, TH)) and not is_part and tag != TABLE:
            return
        e = elements[e, PARENT]
