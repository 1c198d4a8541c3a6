"""Features of text blocks for the first stage of trees.

FIRST_FEATURES names them in the order in which the kernels write them. float32; a ratio is 0 where its denominator is
0."""

import numpy as np

from gristmill.data_pipeline.extraction.attributes import IS_ARTICLE, IS_ARTICLE_BODY, IS_MAIN
from gristmill.data_pipeline.extraction.page_arrays import (
    BOLD_BYTES,
    BREAKS,
    CONTROLS,
    DEPTH,
    ELEMENT,
    ELEMENT_FLAGS,
    END,
    IMAGES,
    INLINE_FLAGS,
    LINK_BYTES,
    LINKS,
    NUM_CHILDREN,
    NUM_FLAGS,
    OWN_SUM,
    PARENT,
    PATH_HASH,
    SOURCE,
    START,
    TAG,
)
from gristmill.data_pipeline.extraction.page_stats import (
    BLOCKS,
    BYTES,
    CHARS,
    COMMAS,
    DIGITS,
    FIRST_KIND,
    LAST_KIND,
    LCA_READABLE,
    LINKED,
    LONG_BYTES,
    P_BLOCKS,
    P_BYTES,
    P_ELEMENTS,
    P_FIRST_HEADING,
    P_FLAGS,
    P_LARGEST,
    P_LINKED,
    P_LONG_BLOCKS,
    P_LONG_BYTES,
    P_PARAGRAPHS,
    P_READABLE_BEST,
    P_READABLE_SCORE,
    READABLE,
    REPEATS,
    SENTENCE_ENDS,
    STOPS,
    SYMBOLS,
    TITLE_WORDS,
    UPPERS,
    WORDS,
)
from gristmill.foundation.cached_njit import cached_njit

OWN = (
    "chars", "words", "link_share", "links", "sentence_ends", "commas", "digit_share", "upper_share", "symbols",
    "last_kind", "first_kind", "title_words", "title_share", "repeats", "bold_share", "breaks", "images", "controls",
    "inline_flags", "chars_per_word", "bytes_per_char", "words_per_sentence",
)  # fmt: skip
NEIGHBOUR = ("chars", "link_share", "sentence_ends", "tag", "same_parent", "depth")
NEIGHBOURS = (-3, -2, -1, 1, 2, 3)
CONTAINER = ("bytes", "link_share", "blocks", "stops_per_kb", "share", "prose_share", "readable", "tag", "children")
PAGE = (
    "blocks", "bytes", "link_share", "prose_share", "prose_blocks", "paragraphs", "elements", "readable_score",
    "has_article", "has_main", "has_article_body", "prose_per_block",
)  # fmt: skip
FIRST_FEATURES = (
    *(f"own_{name}" for name in OWN),
    *(f"block{offset:+d}_{name}" for offset in NEIGHBOURS for name in NEIGHBOUR),
    "tag", "depth", *(f"flag_{bit}" for bit in range(NUM_FLAGS)),
    "weight_own_min", "weight_own_max", "weight_own_sum", "weight_path_min", "weight_path_max", "weight_path_sum",
    *(f"{place}_{name}" for place in ("element", "parent", "grandparent", "great_grandparent") for name in CONTAINER),
    "weight_parent_sum", "weight_grandparent_sum",
    *(f"{candidate}_{name}" for candidate in ("readable", "largest")
      for name in ("common_depth", "above", "below", "share", "blocks_before", "blocks_after")),
    *(f"page_{name}" for name in PAGE),
    "position", "position_in_bytes", "position_in_source", "blocks_from_heading", "index", "blocks_to_end",
    "path_blocks", "path_bytes_per_block", "path_link_share", "path_stops_per_block", "path_share",
)  # fmt: skip
NUM_FIRST = len(FIRST_FEATURES)
GROUP_SLOTS = 4096
# Columns of groups, float32[4096, 5]: over the blocks whose elements have one path. G_LIKELY: second stage.
G_BLOCKS, G_BYTES, G_LINKED, G_STOPS, G_LIKELY = range(5)
NUM_GROUP_SUMS = 5


@cached_njit(nogil=True, forceinline=True)
def ratio(part, whole):
    return part / whole if whole > 0 else 0.0


@cached_njit(nogil=True)
def group_by_path(elements, blocks, num_blocks, counts, groups):
    """Fill groups, by the hash of the elements' path (tags, classes and ids up to the root); paths of one slot are
    counted together."""
    groups[:] = 0
    for k in range(num_blocks):
        slot = elements[blocks[k, ELEMENT], PATH_HASH] & (GROUP_SLOTS - 1)
        groups[slot, G_BLOCKS] += 1
        groups[slot, G_BYTES] += blocks[k, END] - blocks[k, START]
        groups[slot, G_LINKED] += blocks[k, LINK_BYTES]
        groups[slot, G_STOPS] += counts[k, SENTENCE_ENDS]


@cached_njit(nogil=True)
def candidate_ranges(elements, blocks, num_blocks, sums, page, ranges):
    """ranges int32[2, 2]: first and last block inside each candidate."""
    for which in range(2):
        chosen = np.int64(page[P_READABLE_BEST] if which == 0 else page[P_LARGEST])
        column, depth = LCA_READABLE + which, elements[chosen, DEPTH]
        ranges[which, 0], ranges[which, 1] = num_blocks, -1
        for k in range(num_blocks):
            if sums[blocks[k, ELEMENT], column] == depth:
                ranges[which, 0] = min(ranges[which, 0], k)
                ranges[which, 1] = k


@cached_njit(nogil=True)
def first_features(first, last, elements, weights, blocks, counts, sums, groups, ranges, page, source_bytes, rows):
    """Fill rows[0 : last - first] (float32[N, NUM_FIRST]) for blocks first to last."""
    for k in range(first, last):
        row = rows[k - first]
        at = _own(k, blocks, counts, row)
        at = _neighbours(k, np.int64(page[P_BLOCKS]), elements, blocks, counts, row, at)
        at = _element(blocks[k, ELEMENT], elements, weights, row, at)
        at = _containers(blocks[k, ELEMENT], elements, sums, row, at)
        at = _candidates(k, blocks[k, ELEMENT], elements, weights, sums, ranges, page, row, at)
        at = _page(page, row, at)
        at = _position(k, blocks, page, source_bytes, row, at)
        _group(blocks[k, ELEMENT], elements, groups, page, row, at)


@cached_njit(nogil=True)
def _own(k, blocks, counts, row):
    size, chars, words = blocks[k, END] - blocks[k, START], counts[k, CHARS], counts[k, WORDS]
    row[0] = chars
    row[1] = words
    row[2] = ratio(blocks[k, LINK_BYTES], size)
    row[3] = blocks[k, LINKS]
    row[4] = counts[k, SENTENCE_ENDS]
    row[5] = counts[k, COMMAS]
    row[6] = ratio(counts[k, DIGITS], chars)
    row[7] = ratio(counts[k, UPPERS], chars)
    row[8] = counts[k, SYMBOLS]
    row[9] = counts[k, LAST_KIND]
    row[10] = counts[k, FIRST_KIND]
    row[11] = counts[k, TITLE_WORDS]
    row[12] = ratio(counts[k, TITLE_WORDS], words)
    row[13] = counts[k, REPEATS]
    row[14] = ratio(blocks[k, BOLD_BYTES], size)
    row[15] = blocks[k, BREAKS]
    row[16] = blocks[k, IMAGES]
    row[17] = blocks[k, CONTROLS]
    row[18] = blocks[k, INLINE_FLAGS]
    row[19] = ratio(chars, words)
    row[20] = ratio(size, chars)
    row[21] = ratio(words, counts[k, SENTENCE_ENDS] + 1)
    return 22


@cached_njit(nogil=True)
def _neighbours(k, num_blocks, elements, blocks, counts, row, at):
    parent = elements[blocks[k, ELEMENT], PARENT]
    for offset in NEIGHBOURS:
        j = k + offset
        if 0 <= j < num_blocks:
            e = blocks[j, ELEMENT]
            row[at] = counts[j, CHARS]
            row[at + 1] = ratio(blocks[j, LINK_BYTES], blocks[j, END] - blocks[j, START])
            row[at + 2] = counts[j, SENTENCE_ENDS]
            row[at + 3] = elements[e, TAG]
            row[at + 4] = 1 if elements[e, PARENT] == parent else 0
            row[at + 5] = elements[e, DEPTH] - elements[blocks[k, ELEMENT], DEPTH]
        else:
            row[at : at + 6] = -1
        at += 6
    return at


@cached_njit(nogil=True)
def _element(e, elements, weights, row, at):
    row[at] = elements[e, TAG]
    row[at + 1] = elements[e, DEPTH]
    at += 2
    flags = elements[e, ELEMENT_FLAGS]
    for bit in range(NUM_FLAGS):
        row[at + bit] = (flags >> bit) & 1
    at += NUM_FLAGS
    for column in range(6):
        row[at + column] = weights[e, column]
    return at + 6


@cached_njit(nogil=True)
def _containers(e, elements, sums, row, at):
    for _ in range(4):
        size = sums[e, BYTES]
        row[at] = size
        row[at + 1] = ratio(sums[e, LINKED], size)
        row[at + 2] = sums[e, BLOCKS]
        row[at + 3] = ratio(1000 * sums[e, STOPS], size)
        row[at + 4] = ratio(size, sums[0, BYTES])
        row[at + 5] = ratio(sums[e, LONG_BYTES], sums[0, LONG_BYTES])
        row[at + 6] = sums[e, READABLE]
        row[at + 7] = elements[e, TAG]
        row[at + 8] = elements[e, NUM_CHILDREN]
        at += 9
        e = elements[e, PARENT]
    return at


@cached_njit(nogil=True)
def _candidates(k, e, elements, weights, sums, ranges, page, row, at):
    parent = elements[e, PARENT]
    row[at] = weights[parent, OWN_SUM]
    row[at + 1] = weights[elements[parent, PARENT], OWN_SUM]
    at += 2
    for which in range(2):
        chosen = np.int64(page[P_READABLE_BEST] if which == 0 else page[P_LARGEST])
        common = sums[e, LCA_READABLE + which]
        row[at] = common
        row[at + 1] = elements[chosen, DEPTH] - common
        row[at + 2] = elements[e, DEPTH] - common
        row[at + 3] = ratio(sums[chosen, BYTES], page[P_BYTES])
        row[at + 4] = k - ranges[which, 0]
        row[at + 5] = ranges[which, 1] - k
        at += 6
    return at


@cached_njit(nogil=True)
def _page(page, row, at):
    flags = np.int64(page[P_FLAGS])
    row[at] = page[P_BLOCKS]
    row[at + 1] = page[P_BYTES]
    row[at + 2] = ratio(page[P_LINKED], page[P_BYTES])
    row[at + 3] = ratio(page[P_LONG_BYTES], page[P_BYTES])
    row[at + 4] = page[P_LONG_BLOCKS]
    row[at + 5] = page[P_PARAGRAPHS]
    row[at + 6] = page[P_ELEMENTS]
    row[at + 7] = page[P_READABLE_SCORE]
    row[at + 8] = 1 if flags & IS_ARTICLE else 0
    row[at + 9] = 1 if flags & IS_MAIN else 0
    row[at + 10] = 1 if flags & IS_ARTICLE_BODY else 0
    row[at + 11] = ratio(page[P_LONG_BYTES], page[P_LONG_BLOCKS])
    return at + 12


@cached_njit(nogil=True)
def _position(k, blocks, page, source_bytes, row, at):
    row[at] = ratio(k, page[P_BLOCKS])
    row[at + 1] = ratio(blocks[k, START], page[P_BYTES])
    row[at + 2] = ratio(blocks[k, SOURCE], source_bytes)
    row[at + 3] = k - page[P_FIRST_HEADING] if page[P_FIRST_HEADING] >= 0 else -1000
    row[at + 4] = k
    row[at + 5] = page[P_BLOCKS] - 1 - k
    return at + 6


@cached_njit(nogil=True)
def _group(e, elements, groups, page, row, at):
    slot = elements[e, PATH_HASH] & (GROUP_SLOTS - 1)
    row[at] = groups[slot, G_BLOCKS]
    row[at + 1] = ratio(groups[slot, G_BYTES], groups[slot, G_BLOCKS])
    row[at + 2] = ratio(groups[slot, G_LINKED], groups[slot, G_BYTES])
    row[at + 3] = ratio(groups[slot, G_STOPS], groups[slot, G_BLOCKS])
    row[at + 4] = ratio(groups[slot, G_BYTES], page[P_BYTES])
    return at + 5
