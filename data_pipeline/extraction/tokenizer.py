"""Flat tokenizer of HTML: text blocks and the tree of block-level elements in one pass, without a DOM library.

A text block is the text between two tags of block-level elements (or between two <br> in a row). Elements are rows of
an array in document order, each with its parent; inline elements have no row."""

import numpy as np

from gristmill.data_pipeline.extraction.attributes import NUM_FOUND, SELF_CLOSED, scan_attributes, skip_attributes
from gristmill.data_pipeline.extraction.element_tree import end_tag, start_block
from gristmill.data_pipeline.extraction.find_byte import find_byte
from gristmill.data_pipeline.extraction.page_arrays import (
    AT,
    BOLD_FROM,
    LINK_FROM,
    NUM_ELEMENTS,
    NUM_PAIRS,
    S_CONTROLS,
    TITLE_END,
    TITLE_START,
)
from gristmill.data_pipeline.extraction.page_text import copy_text
from gristmill.data_pipeline.extraction.tags import (
    BLOCK,
    CONTROL,
    LOOKUP_BITS,
    RAW,
    SKIPPED,
    TAG_IDS,
    TAG_KEYS,
    TAG_KINDS,
    TAG_VALUES,
)
from gristmill.data_pipeline.extraction.text_blocks import end_block, start_inline
from gristmill.foundation.cached_njit import cached_njit

TITLE, SCRIPT, STYLE_TAG = (TAG_IDS[name] for name in ("title", "script", "style"))


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
        at = copy_text(html, at, end, out, elements, state)
        if at >= end:
            break
        following = html[at + 1]
        if following == 47:  # </
            key, name_end = _tag_name(html, at + 2, end)
            at = skip_attributes(html, name_end, end)
            state[AT] = at
            end_tag(_lookup(key), elements, blocks, state)
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
                start_block(tag, kind, found, found_weights, elements, element_weights, blocks, state)
            else:
                start_inline(kind, found, elements, blocks, links, state)
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
