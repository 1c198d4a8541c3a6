"""Features of text blocks for the first stage of trees.

FIRST_FEATURES names them in the order in which the kernels write them. float32; a ratio is 0 where its denominator is
0."""

import numpy as np

from gristmill.data_pipeline.extraction.attributes import (
    BOLD_BYTES,
    BREAKS,
    CONTROLS,
    DEPTH,
    ELEMENT,
    ELEMENT_FLAGS,
    END,
    IMAGES,
    INLINE_FLAGS,
    IS_ARTICLE,
    IS_ARTICLE_BODY,
    IS_MAIN,
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
from gristmill.data_pipeline.extraction.blocks_config import NUM_KINDS, PAGE_KINDS
from gristmill.data_pipeline.extraction.page_stats import (
    BLOCKS,
    BYTES,
    CARD_BYTES,
    CHARS,
    COMMAS,
    COPIES,
    DIGITS,
    FIRST_KIND,
    HEADINGS,
    I_BYTES,
    I_COUNT,
    I_FIRST,
    I_LINKED,
    I_PROSE,
    ITEM,
    LABEL_HIGH,
    LABEL_LOW,
    LABEL_SUM,
    LAST_KIND,
    LCA_READABLE,
    LCA_TITLE,
    LINKED,
    LONG_BYTES,
    NUM_CARDS,
    P_BLOCKS,
    P_BYTES,
    P_CARDS,
    P_COMMENT_BYTES,
    P_DIGITS,
    P_ELEMENTS,
    P_FIRST_HEADING,
    P_FLAGS,
    P_IMAGES,
    P_ITEM_BYTES,
    P_ITEM_LINKED,
    P_ITEM_SLOT,
    P_ITEMS,
    P_KINDS,
    P_LARGEST,
    P_LINKED,
    P_LONG_BLOCKS,
    P_LONG_BYTES,
    P_PARAGRAPHS,
    P_PRICES,
    P_READABLE_BEST,
    P_READABLE_SCORE,
    P_TITLE_BLOCK,
    PICTURES,
    PRICES,
    READABLE,
    REPEATS,
    SECTION,
    SEEN,
    SENTENCE_ENDS,
    STOPS,
    SYMBOLS,
    TITLE_BYTES,
    TITLE_WORDS,
    UPPERS,
    WORDS,
    item_slot,
)
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

OWN = (
    "chars", "words", "link_share", "links", "sentence_ends", "commas", "digit_share", "upper_share", "symbols",
    "last_kind", "first_kind", "title_words", "title_share", "repeats", "bold_share", "breaks", "images", "controls",
    "inline_flags", "chars_per_word", "bytes_per_char", "words_per_sentence",
    "label_low", "label_high", "label_mean", "copies", "seen",
)  # fmt: skip
NEIGHBOUR = ("chars", "link_share", "sentence_ends", "tag", "same_parent", "depth", "label_mean")
NEIGHBOURS = (-3, -2, -1, 1, 2, 3)
CONTAINER = ("bytes", "link_share", "blocks", "stops_per_kb", "share", "prose_share", "readable", "tag", "children")
PAGE = (
    "blocks", "bytes", "link_share", "prose_share", "prose_blocks", "paragraphs", "elements", "readable_score",
    "has_article", "has_main", "has_article_body", "prose_per_block", "images", "headings", "links", "list_share",
    "table_share", "code_share", "comment_share", "digit_share", "prices", "items", "item_share", "item_link_share",
    "bytes_per_item", "cards", "card_share", "card_prices", "card_links", *PAGE_KINDS,
)  # fmt: skip
ITEM_FEATURES = (
    "count", "tag", "above", "bytes", "link_share", "blocks", "images", "headings", "share", "group_share",
    "group_link_share", "bytes_per_item", "group_prose_share", "group_position", "is_main_group",
    "prices",
)  # fmt: skip
FIRST_FEATURES = (
    *(f"own_{name}" for name in OWN),
    *(f"block{offset:+d}_{name}" for offset in NEIGHBOURS for name in NEIGHBOUR),
    "tag", "depth", *(f"flag_{bit}" for bit in range(NUM_FLAGS)),
    "weight_own_min", "weight_own_max", "weight_own_sum", "weight_path_min", "weight_path_max", "weight_path_sum",
    *(f"{place}_{name}" for place in ("element", "parent", "grandparent", "great_grandparent") for name in CONTAINER),
    "weight_parent_sum", "weight_grandparent_sum",
    *(f"{candidate}_{name}" for candidate in ("readable", "largest", "cards")
      for name in ("common_depth", "above", "below", "share", "blocks_before", "blocks_after")),
    *(f"page_{name}" for name in PAGE),
    "position", "position_in_bytes", "position_in_source", "blocks_from_heading", "index", "blocks_to_end",
    "path_blocks", "path_bytes_per_block", "path_link_share", "path_stops_per_block", "path_share",
    *(f"item_{name}" for name in ITEM_FEATURES),
    "section_low", "section_high", "section_mean", "section_tag", "section_blocks", "section_title_words",
    "title_common_share", "title_above", "title_below", "blocks_from_title",
)  # fmt: skip
NUM_FIRST = len(FIRST_FEATURES)
NUM_PAGE_FEATURES = len(PAGE) - NUM_KINDS
KIND_FEATURES = (*PAGE[:NUM_PAGE_FEATURES], *(f"tokens_{kind}" for kind in PAGE_KINDS), "tokens",
                 *(f"words_{kind}" for kind in PAGE_KINDS), "words")  # fmt: skip
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


@cached_njit(nogil=True, forceinline=True)
def _candidate(page, which):
    return np.int64(page[P_READABLE_BEST] if which == 0 else page[P_LARGEST] if which == 1 else page[P_CARDS])


@cached_njit(nogil=True)
def candidate_ranges(elements, blocks, num_blocks, sums, page, ranges):
    """ranges int32[3, 2]: first and last block inside each candidate."""
    for which in range(3):
        chosen = _candidate(page, which)
        column, depth = LCA_READABLE + which, elements[chosen, DEPTH]
        ranges[which, 0], ranges[which, 1] = num_blocks, -1
        for k in range(num_blocks):
            if sums[blocks[k, ELEMENT], column] == depth:
                ranges[which, 0] = min(ranges[which, 0], k)
                ranges[which, 1] = k


@cached_njit(nogil=True)
def first_features(first, last, elements, weights, blocks, counts, sums, groups, items, ranges, page, size, rows):
    """Fill rows[0 : last - first] (float32[N, NUM_FIRST]) for blocks first to last. size: bytes of the page."""
    for k in range(first, last):
        row = rows[k - first]
        at = _own(k, blocks, counts, row)
        at = _neighbours(k, np.int64(page[P_BLOCKS]), elements, blocks, counts, row, at)
        at = _element(blocks[k, ELEMENT], elements, weights, row, at)
        at = _containers(blocks[k, ELEMENT], elements, sums, row, at)
        at = _candidates(k, blocks[k, ELEMENT], elements, weights, sums, ranges, page, row, at)
        if k == first:
            page_features(sums, page, row, at)
            row[at + NUM_PAGE_FEATURES : at + len(PAGE)] = page[P_KINDS:]
        else:
            row[at : at + len(PAGE)] = rows[0, at : at + len(PAGE)]
        at += len(PAGE)
        at = _position(k, blocks, page, size, row, at)
        at = _group(blocks[k, ELEMENT], elements, groups, page, row, at)
        at = _item(blocks[k, ELEMENT], elements, sums, items, page, row, at)
        _section(k, blocks, elements, counts, sums, page, row, at)


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
    row[22] = counts[k, LABEL_LOW]
    row[23] = counts[k, LABEL_HIGH]
    row[24] = ratio(counts[k, LABEL_SUM], words)
    row[25] = counts[k, COPIES]
    row[26] = ratio(counts[k, SEEN], words)
    return 27


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
            row[at + 6] = ratio(counts[j, LABEL_SUM], counts[j, WORDS])
        else:
            row[at : at + 7] = -1
        at += 7
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
    for which in range(3):
        chosen = _candidate(page, which)
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
def page_features(sums, page, row, at):
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
    for column in range(6):
        row[at + 12 + column] = page[P_IMAGES + column]
    for column in (3, 4, 5):
        row[at + 12 + column] = ratio(page[P_IMAGES + column], page[P_BYTES])
    row[at + 18] = ratio(page[P_COMMENT_BYTES], page[P_BYTES])
    row[at + 19] = ratio(page[P_DIGITS], page[P_BYTES])
    row[at + 20] = page[P_PRICES]
    row[at + 21] = page[P_ITEMS]
    row[at + 22] = ratio(page[P_ITEM_BYTES], page[P_BYTES])
    row[at + 23] = ratio(page[P_ITEM_LINKED], page[P_ITEM_BYTES])
    row[at + 24] = ratio(page[P_ITEM_BYTES], page[P_ITEMS])
    cards = np.int64(page[P_CARDS])
    row[at + 25] = sums[cards, NUM_CARDS] if cards else 0
    row[at + 26] = ratio(sums[cards, CARD_BYTES], page[P_BYTES]) if cards else 0
    row[at + 27] = ratio(sums[cards, PRICES], sums[cards, NUM_CARDS]) if cards else 0
    row[at + 28] = ratio(sums[cards, LINKED], sums[cards, BYTES]) if cards else 0
    return at + NUM_PAGE_FEATURES


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


@cached_njit(nogil=True)
def _item(e, elements, sums, items, page, row, at):
    item = np.int64(sums[e, ITEM])
    slot, size = item_slot(elements, item), sums[item, BYTES]
    row[at] = items[slot, I_COUNT]
    row[at + 1] = elements[item, TAG]
    row[at + 2] = elements[e, DEPTH] - elements[item, DEPTH]
    row[at + 3] = size
    row[at + 4] = ratio(sums[item, LINKED], size)
    row[at + 5] = sums[item, BLOCKS]
    row[at + 6] = sums[item, PICTURES]
    row[at + 7] = sums[item, HEADINGS]
    row[at + 8] = ratio(size, page[P_BYTES])
    row[at + 9] = ratio(items[slot, I_BYTES], page[P_BYTES])
    row[at + 10] = ratio(items[slot, I_LINKED], items[slot, I_BYTES])
    row[at + 11] = ratio(items[slot, I_BYTES], items[slot, I_COUNT])
    row[at + 12] = ratio(items[slot, I_PROSE], items[slot, I_BYTES])
    row[at + 13] = ratio(items[slot, I_FIRST], page[P_ELEMENTS])
    row[at + 14] = 1 if slot == np.int64(page[P_ITEM_SLOT]) else 0
    row[at + 15] = sums[item, PRICES]
    return at + 16


@cached_njit(nogil=True)
def _section(k, blocks, elements, counts, sums, page, row, at):
    """Heading that the block stands below, and the block's relation to the page's <h1>."""
    heading, e = counts[k, SECTION], blocks[k, ELEMENT]
    if heading >= 0:
        row[at] = counts[heading, LABEL_LOW]
        row[at + 1] = counts[heading, LABEL_HIGH]
        row[at + 2] = ratio(counts[heading, LABEL_SUM], counts[heading, WORDS])
        row[at + 3] = elements[blocks[heading, ELEMENT], TAG]
        row[at + 4] = k - heading
        row[at + 5] = counts[heading, TITLE_WORDS]
    else:
        row[at : at + 6] = -1
    title = np.int64(page[P_TITLE_BLOCK])
    row[at + 6] = ratio(sums[e, TITLE_BYTES], page[P_BYTES])
    row[at + 7] = elements[blocks[title, ELEMENT], DEPTH] - sums[e, LCA_TITLE] if title >= 0 else -1
    row[at + 8] = elements[e, DEPTH] - sums[e, LCA_TITLE]
    row[at + 9] = k - title if title >= 0 else -1000
