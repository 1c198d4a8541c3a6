"""Text blocks of a page: where they end, and what inline elements add to them."""

from gristmill.data_pipeline.extraction.attributes import FLAGS, HAS_HREF, HREF_END, HREF_START, SELF_CLOSED
from gristmill.data_pipeline.extraction.page_arrays import (
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
    IMAGES,
    IN_CODE,
    INLINE_FLAGS,
    LINE_END,
    LINK_BLOCK,
    LINK_BYTES,
    LINK_FROM,
    LINKS,
    NO_SPACE,
    NUM_BLOCKS,
    NUM_LINKS,
    OUT,
    S_BOLD_BYTES,
    S_BREAKS,
    S_CONTROLS,
    S_IMAGES,
    S_INLINE_FLAGS,
    S_LINK_BYTES,
    S_LINKS,
    SOURCE,
    SPACE,
    START,
)
from gristmill.data_pipeline.extraction.tags import BOLD, BREAK, CONTROL, IMAGE, LINK
from gristmill.foundation.cached_njit import cached_njit


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


@cached_njit(nogil=True)
def start_inline(kind, found, elements, blocks, links, state):
    if kind & LINK:
        end_link(state)
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
            end_block(blocks, state)
        else:
            state[SPACE] = LINE_END
    elif kind & IMAGE:
        state[S_IMAGES] += 1
    elif kind & CONTROL:
        state[S_CONTROLS] += 1
    state[S_INLINE_FLAGS] |= found[FLAGS]
