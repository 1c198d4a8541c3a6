"""Statistics of a page's blocks and elements from which features are computed: text counts, sums over subtrees, and the
two elements that most probably contain the main text."""

import numpy as np

from gristmill.data_pipeline.extraction.attributes import (
    DEPTH,
    ELEMENT,
    ELEMENT_FLAGS,
    END,
    IMAGES,
    IN_CODE,
    IN_LIST,
    IN_MARGIN,
    IN_TABLE,
    IS_COMMENT,
    LINK_BYTES,
    LINKS,
    NUM_TOKENS,
    PARENT,
    PATH_HASH,
    START,
    TAG,
    WORD_BITS,
)
from gristmill.data_pipeline.extraction.blocks_config import NUM_KINDS
from gristmill.data_pipeline.extraction.tags import HEADING, TAG_IDS, TAG_KINDS
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Columns of counts, int32[B, 17]: of the block's text. LABEL_LOW, LABEL_HIGH, LABEL_SUM: weights of the words of a
# short block, in thousandths. SECTION: the nearest heading, the block itself or one before it, or -1. COPIES: blocks
# before it of the same text. SEEN: its word trigrams that the page has before it.
(
    CHARS, WORDS, SENTENCE_ENDS, COMMAS, DIGITS, UPPERS, SYMBOLS, LAST_KIND, FIRST_KIND, TITLE_WORDS, REPEATS,
    LABEL_LOW, LABEL_HIGH, LABEL_SUM, SECTION, COPIES, SEEN,
) = range(17)  # fmt: skip
NUM_COUNTS = 17
# Columns of sums, float32[E, 19]: over the blocks in the element and below it. LONG_BYTES: of blocks that are prose.
# ITEM: the element's repeated ancestor, see find_items. LCA_TITLE, TITLE_BYTES: depth and bytes of the lowest common
# ancestor with the page's <h1>. NUM_CARDS, CARD_BYTES: number and bytes of the element's children that are cards.
(
    BYTES, LINKED, BLOCKS, STOPS, LONG_BYTES, LONG_BLOCKS, PICTURES, HEADINGS, PRICES, READABLE, LCA_READABLE,
    LCA_LARGEST, LCA_CARDS, LIKELY_BYTES, ITEM, LCA_TITLE, TITLE_BYTES, NUM_CARDS, CARD_BYTES,
) = range(19)  # fmt: skip
NUM_SUMS = 19
# Columns of page, float64[34]. P_TITLE_BLOCK: of the <h1> with the most words of the title, or -1. P_ITEM_SLOT: of the
# group that P_ITEMS counts, or -1. P_CARDS: the element with the most bytes of cards, or 0.
(
    P_BLOCKS, P_BYTES, P_LINKED, P_LONG_BYTES, P_LONG_BLOCKS, P_READABLE_BEST, P_LARGEST, P_READABLE_SCORE,
    P_FIRST_HEADING, P_PARAGRAPHS, P_FLAGS, P_ELEMENTS, P_IMAGES, P_HEADINGS, P_LINKS, P_LIST_BYTES, P_TABLE_BYTES,
    P_CODE_BYTES, P_COMMENT_BYTES, P_DIGITS, P_PRICES, P_ITEMS, P_ITEM_BYTES, P_ITEM_LINKED,
    P_TITLE_BLOCK, P_ITEM_SLOT, P_CARDS,
) = range(27)  # fmt: skip
P_KINDS = 27  # the first of the probabilities of the page kinds
NUM_PAGE = P_KINDS + NUM_KINDS
# Columns of items, float32[4096, 6]: over the elements of one path below one parent. I_FIRST: the first of them.
# I_LIKELY: second stage.
I_COUNT, I_BYTES, I_LINKED, I_PROSE, I_FIRST, I_LIKELY = range(6)
NUM_ITEM_SUMS = 6
ITEM_SLOTS = 4096
MAX_PRICE_WORDS = 6
# A card is a short element of several blocks with an image, a heading or a price, outside of menus and margins.
MIN_CARDS, MAX_CARD_BYTES = 4, 600
MAX_LABEL_BYTES = 100  # of a block whose words are looked up

MIN_PROSE_BYTES, MAX_PROSE_LINKS = 80, 0.33  # of a block that is probably a paragraph
MIN_READABLE_BYTES = 25  # Readability counts paragraphs from this length on
LARGEST_SHARE = 0.6  # of the prose, which the second candidate holds
TITLE_SLOTS, HASH_SLOTS_BITS, TRIGRAM_BITS = 128, 12, 18

OTHER, LOWER, UPPER, DIGIT, STOP, COMMA, SYMBOL, COLON, QUOTE = range(9)
# Kinds of ASCII characters.
KINDS = np.zeros(256, np.int64)
for _kind, _members in (
    (LOWER, "abcdefghijklmnopqrstuvwxyz"), (UPPER, "ABCDEFGHIJKLMNOPQRSTUVWXYZ"), (DIGIT, "0123456789"), (STOP, ".!?"),
    (COMMA, ",;"), (SYMBOL, "|@#$%&*+/<=>[]\\^_`{}~"), (COLON, ":"), (QUOTE, "\"'()-"),
):  # fmt: skip
    for _member in _members:
        KINDS[ord(_member)] = _kind
KINDS[0x80:] = LOWER

P, LI, TD, DD, PRE, H1 = (TAG_IDS[name] for name in ("p", "li", "td", "dd", "pre", "h1"))


@cached_njit(nogil=True)
def count_text(text, blocks, num_blocks, title, token_weights, seen, counts, words):
    """Fill counts of every block; returns the number of words. title: the page's title in UTF-8. words: int32[N, 2],
    rows (block, place in token_weights) are written for the words of short blocks while there is room."""
    slots, title_words = np.zeros(TITLE_SLOTS, np.int64), 0
    for start in range(len(title)):
        if _begins_word(title, start, 0) and title_words < TITLE_SLOTS // 2:
            title_words += _put(slots, _word_hash(title, start, len(title)))
    num_words, trigrams = 0, np.zeros(1 << TRIGRAM_BITS, np.bool_)
    for k in range(num_blocks):
        start, end = blocks[k, START], blocks[k, END]
        num_words = _count_block(text, start, end, k, slots, trigrams, token_weights, seen, counts[k], words, num_words)
    _count_repeats(text, blocks, num_blocks, counts)
    return num_words


@cached_njit(nogil=True)
def _count_block(text, start, end, k, title, trigrams, token_weights, seen, row, words, num_words):
    row[:] = 0
    is_label = end - start <= MAX_LABEL_BYTES
    previous, in_word, word, before, last = OTHER, False, np.int64(0), np.int64(0), np.int64(0)
    chars = np.int64(0)
    for at in range(start, end):
        byte = np.int64(text[at])
        kind = KINDS[byte]
        if byte & 0xC0 != 0x80:
            chars += 1
        if kind == DIGIT:
            row[DIGITS] += 1
        elif kind == UPPER:
            row[UPPERS] += 1
        elif kind == SYMBOL:
            row[SYMBOLS] += 1
        elif kind == COMMA:
            row[COMMAS] += 1
        elif kind == STOP and (at + 1 == end or text[at + 1] <= 32 or KINDS[text[at + 1]] == QUOTE):
            row[SENTENCE_ENDS] += 1
        if byte >= 0xE2:
            kind = _wide_kind(text, at, end, kind, chars, row)
        is_letter = kind in (LOWER, UPPER, DIGIT)
        if is_letter:
            if not in_word:
                row[WORDS] += 1
                word = np.int64(0)
            word = (word * 31 + (byte | 32)) & 0xFFFFFFFF
        elif in_word:
            row[TITLE_WORDS] += _holds(title, word)
            _count_trigram(before, last, word, trigrams, row)
            before, last = last, word
            if is_label:
                num_words = _count_label(word, k, token_weights, seen, row, words, num_words)
        in_word = is_letter
        if byte > 32 and byte & 0xC0 != 0x80:
            previous = kind
            if row[FIRST_KIND] == 0:
                row[FIRST_KIND] = kind + 1
    if in_word:
        row[TITLE_WORDS] += _holds(title, word)
        _count_trigram(before, last, word, trigrams, row)
        if is_label:
            num_words = _count_label(word, k, token_weights, seen, row, words, num_words)
    row[CHARS], row[LAST_KIND] = chars, previous
    return num_words


@cached_njit(nogil=True, forceinline=True)
def _count_trigram(first, second, third, trigrams, row):
    if row[WORDS] > 2:
        mixed = ((first * 0x85EBCA6B + second) * 0xC2B2AE35 + third) * 0x9E3779B1
        place = (mixed & 0xFFFFFFFF) >> (32 - TRIGRAM_BITS)
        row[SEEN] += trigrams[place]
        trigrams[place] = True


@cached_njit(nogil=True, forceinline=True)
def _count_label(word, k, token_weights, seen, row, words, num_words):
    place = NUM_TOKENS + (((word * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - WORD_BITS))
    seen[place] = True
    weight = np.int64(1000 * token_weights[place])
    row[LABEL_LOW] = min(row[LABEL_LOW], weight)
    row[LABEL_HIGH] = max(row[LABEL_HIGH], weight)
    row[LABEL_SUM] += weight
    if num_words < len(words):
        words[num_words, 0], words[num_words, 1] = k, place
        return num_words + 1
    return num_words


@cached_njit(nogil=True, forceinline=True)
def _wide_kind(text, at, end, kind, chars, row):
    """The kind of a character of three bytes; ideographs count as half a word."""
    if at + 2 >= end:
        return kind
    first, second, third = text[at], text[at + 1], text[at + 2]
    if (first == 0xE3 and second == 0x80 and third == 0x82) or (first == 0xE0 and second == 0xA5 and third == 0xA4):
        row[SENTENCE_ENDS] += 1
        return STOP
    if first == 0xEF and second == 0xBC and (third == 0x81 or third == 0x9F):
        row[SENTENCE_ENDS] += 1
        return STOP
    if (first == 0xEF and second == 0xBC and third == 0x8C) or (first == 0xE3 and second == 0x80 and third == 0x81):
        row[COMMAS] += 1
        return COMMA
    if first == 0xE2 and second == 0x80:
        return QUOTE
    if first == 0xE2:
        row[SYMBOLS] += 1
        return SYMBOL
    if 0xE3 <= first <= 0xE9 and chars & 1:
        row[WORDS] += 1
    return kind


@cached_njit(nogil=True, forceinline=True)
def _begins_word(text, at, start):
    kind = KINDS[text[at]]
    if kind != LOWER and kind != UPPER and kind != DIGIT:
        return False
    before = KINDS[text[at - 1]] if at > start else OTHER
    return before != LOWER and before != UPPER and before != DIGIT


@cached_njit(nogil=True)
def _word_hash(text, at, end):
    word = np.int64(0)
    while at < end:
        byte = np.int64(text[at])
        kind = KINDS[byte]
        if kind != LOWER and kind != UPPER and kind != DIGIT:
            break
        word = (word * 31 + (byte | 32)) & 0xFFFFFFFF
        at += 1
    return word


@cached_njit(nogil=True)
def _put(slots, value):
    """1 if the value is new."""
    at = value & (len(slots) - 1)
    while slots[at] != 0:
        if slots[at] == value:
            return 0
        at = (at + 1) & (len(slots) - 1)
    slots[at] = value
    return 1


@cached_njit(nogil=True, forceinline=True)
def _holds(slots, value):
    at = value & (len(slots) - 1)
    while slots[at] != 0:
        if slots[at] == value:
            return True
        at = (at + 1) & (len(slots) - 1)
    return False


@cached_njit(nogil=True)
def _count_repeats(text, blocks, num_blocks, counts):
    """REPEATS, COPIES: how many blocks have a text of the same hash, modulo 4,096 slots without chaining."""
    seen = np.zeros((1 << HASH_SLOTS_BITS, 2), np.int64)
    for turn in range(2):
        for k in range(num_blocks):
            value = np.int64(2166136261)
            for at in range(blocks[k, START], min(blocks[k, END], blocks[k, START] + 64)):
                value = ((value ^ text[at]) * 16777619) & 0xFFFFFFFF
            value = (value * 31 + blocks[k, END] - blocks[k, START]) & 0xFFFFFFFF
            at = value & ((1 << HASH_SLOTS_BITS) - 1)
            if turn == 0:
                if seen[at, 1] == 0:
                    seen[at, 0] = value
                if seen[at, 0] == value:
                    counts[k, COPIES] = seen[at, 1]
                    seen[at, 1] += 1
            elif seen[at, 0] == value:
                counts[k, REPEATS] = seen[at, 1]
            else:
                counts[k, REPEATS] = 1


@cached_njit(nogil=True)
def sum_elements(elements, num_elements, blocks, num_blocks, counts, sums, page):
    """Fill sums and page."""
    sums[:num_elements] = 0
    page[:] = 0
    page[P_FIRST_HEADING] = page[P_TITLE_BLOCK] = -1
    section, title_words = -1, -1
    for k in range(num_blocks):
        e = blocks[k, ELEMENT]
        size, linked = blocks[k, END] - blocks[k, START], blocks[k, LINK_BYTES]
        sums[e, BYTES] += size
        sums[e, LINKED] += linked
        sums[e, BLOCKS] += 1
        sums[e, STOPS] += counts[k, SENTENCE_ENDS]
        if size >= MIN_PROSE_BYTES and linked < MAX_PROSE_LINKS * size:
            sums[e, LONG_BYTES] += size
            sums[e, LONG_BLOCKS] += 1
        if size >= MIN_READABLE_BYTES and 2 * linked < size:
            score = 1 + counts[k, COMMAS] + min(size / 100, 3)
            tag = elements[e, TAG]
            is_leaf = tag in (P, LI, TD, DD, PRE) or TAG_KINDS[tag] & HEADING != 0
            first = elements[e, PARENT] if is_leaf else e
            sums[first, READABLE] += score
            sums[elements[first, PARENT], READABLE] += score / 2
        if TAG_KINDS[elements[e, TAG]] & HEADING:
            section = k
            if page[P_FIRST_HEADING] < 0:
                page[P_FIRST_HEADING] = k
            if elements[e, TAG] == H1 and counts[k, TITLE_WORDS] > title_words:
                page[P_TITLE_BLOCK], title_words = k, counts[k, TITLE_WORDS]
        counts[k, SECTION] = section
        page[P_PARAGRAPHS] += elements[e, TAG] == P
        sums[e, PICTURES] += blocks[k, IMAGES]
        sums[e, PRICES] += _is_price(counts[k])
        sums[e, HEADINGS] += TAG_KINDS[elements[e, TAG]] & HEADING != 0
        _sum_page(elements[e, ELEMENT_FLAGS], size, blocks[k], counts[k], page)
    for e in range(num_elements - 1, 0, -1):
        parent = elements[e, PARENT]
        for column in range(READABLE):
            sums[parent, column] += sums[e, column]
        page[P_FLAGS] = np.int64(page[P_FLAGS]) | elements[e, ELEMENT_FLAGS]
    page[P_BLOCKS], page[P_ELEMENTS] = num_blocks, num_elements
    page[P_BYTES], page[P_LINKED] = sums[0, BYTES], sums[0, LINKED]
    page[P_LONG_BYTES], page[P_LONG_BLOCKS] = sums[0, LONG_BYTES], sums[0, LONG_BLOCKS]
    page[P_IMAGES], page[P_HEADINGS] = sums[0, PICTURES], sums[0, HEADINGS]
    _choose_candidates(elements, num_elements, sums, page)
    title = np.int64(page[P_TITLE_BLOCK])
    _common_depths(elements, num_elements, blocks[title, ELEMENT] if title >= 0 else 0, LCA_TITLE, sums)
    for e in range(num_elements):
        inherits = e > 0 and sums[e, LCA_TITLE] < elements[e, DEPTH]
        sums[e, TITLE_BYTES] = sums[elements[e, PARENT], TITLE_BYTES] if inherits else sums[e, BYTES]


@cached_njit(nogil=True, forceinline=True)
def _sum_page(flags, size, block, count, page):
    page[P_LINKS] += block[LINKS]
    page[P_LIST_BYTES] += size if flags & IN_LIST else 0
    page[P_TABLE_BYTES] += size if flags & IN_TABLE else 0
    page[P_CODE_BYTES] += size if flags & IN_CODE else 0
    page[P_COMMENT_BYTES] += size if flags & IS_COMMENT else 0
    page[P_DIGITS] += count[DIGITS]
    page[P_PRICES] += _is_price(count)


@cached_njit(nogil=True, forceinline=True)
def _is_price(count):
    return count[SYMBOLS] > 0 and count[DIGITS] > 0 and count[WORDS] <= MAX_PRICE_WORDS


@cached_njit(nogil=True, forceinline=True)
def item_slot(elements, e):
    """The row of items for the elements of this one's path and parent."""
    mixed = (np.int64(elements[e, PARENT]) * 0x9E3779B1 + np.int64(elements[e, PATH_HASH]) * 0x85EBCA6B) & 0xFFFFFFFF
    return mixed >> 20


@cached_njit(nogil=True)
def find_items(elements, num_elements, sums, items, page):
    """Fill items, and ITEM of sums: of the element and its ancestors the one with the most siblings of its own path
    (tags, classes and ids), the outermost of several: a card of a listing, a post of a thread, a paragraph of prose.

    The group with the most text outside of links is in page as P_ITEMS, P_ITEM_BYTES and P_ITEM_LINKED."""
    items[:] = 0
    for e in range(1, num_elements):
        slot = item_slot(elements, e)
        if items[slot, I_COUNT] == 0:
            items[slot, I_FIRST] = e
        items[slot, I_COUNT] += 1
        items[slot, I_PROSE] += sums[e, LONG_BYTES]
        items[slot, I_BYTES] += sums[e, BYTES]
        items[slot, I_LINKED] += sums[e, LINKED]
    best, highest = -1, 0.0
    sums[0, ITEM] = 0
    for e in range(1, num_elements):
        outer, slot = np.int64(sums[elements[e, PARENT], ITEM]), item_slot(elements, e)
        is_more = outer == 0 or items[slot, I_COUNT] > items[item_slot(elements, outer), I_COUNT]
        sums[e, ITEM] = e if is_more else outer
        plain = items[slot, I_BYTES] - items[slot, I_LINKED]
        if items[slot, I_COUNT] > 2 and plain > highest:
            best, highest = slot, plain
    page[P_ITEM_SLOT] = best
    if best >= 0:
        page[P_ITEMS] = items[best, I_COUNT]
        page[P_ITEM_BYTES], page[P_ITEM_LINKED] = items[best, I_BYTES], items[best, I_LINKED]


@cached_njit(nogil=True)
def _choose_candidates(elements, num_elements, sums, page):
    """The element of the best readability score, and the deepest that holds LARGEST_SHARE of the prose; the depth of
    every element's lowest common ancestor with each."""
    best, highest, largest = 0, -1.0, 0
    for e in range(1, num_elements):
        if sums[e, READABLE] > 0:
            score = sums[e, READABLE] * (1 - sums[e, LINKED] / max(sums[e, BYTES], 1))
            if score > highest:
                best, highest = e, score
        prose, whole = sums[e, LONG_BYTES], sums[0, LONG_BYTES]
        if elements[e, PARENT] == largest and prose > 0 and prose >= LARGEST_SHARE * whole:
            largest = e
    page[P_READABLE_BEST], page[P_READABLE_SCORE], page[P_LARGEST] = best, highest, largest
    _common_depths(elements, num_elements, best, LCA_READABLE, sums)
    _common_depths(elements, num_elements, largest, LCA_LARGEST, sums)
    _common_depths(elements, num_elements, _find_cards(elements, num_elements, sums, page), LCA_CARDS, sums)


@cached_njit(nogil=True)
def _find_cards(elements, num_elements, sums, page):
    """Fill NUM_CARDS and CARD_BYTES of sums, and P_CARDS of page, which is returned."""
    chosen, highest = 0, 0.0
    for e in range(1, num_elements):
        is_rich = sums[e, PICTURES] + sums[e, HEADINGS] + sums[e, PRICES] > 0 and sums[e, BLOCKS] > 1
        if is_rich and sums[e, BYTES] <= MAX_CARD_BYTES and not elements[e, ELEMENT_FLAGS] & IN_MARGIN:
            parent = elements[e, PARENT]
            sums[parent, NUM_CARDS] += 1
            sums[parent, CARD_BYTES] += sums[e, BYTES]
            if sums[parent, NUM_CARDS] >= MIN_CARDS and sums[parent, CARD_BYTES] > highest:
                chosen, highest = parent, sums[parent, CARD_BYTES]
    page[P_CARDS] = chosen
    return chosen


@cached_njit(nogil=True)
def _common_depths(elements, num_elements, chosen, column, sums):
    for e in range(num_elements):
        sums[e, column] = -1
    e, depth = chosen, elements[chosen, DEPTH]
    while True:
        sums[e, column] = elements[e, DEPTH]
        if e == 0:
            break
        e = elements[e, PARENT]
    for e in range(1, num_elements):
        if sums[e, column] < 0:
            sums[e, column] = sums[elements[e, PARENT], column]
    sums[chosen, column] = depth
