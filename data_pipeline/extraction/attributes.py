"""Attributes of one start tag: class and id tokens as hashes with learned weights, and a few known values."""

import numpy as np

from gristmill.data_pipeline.extraction.entities import FNV_OFFSET, FNV_PRIME, MASK_32, name_hash
from gristmill.data_pipeline.extraction.find_byte import find_byte
from gristmill.data_pipeline.extraction.tags import name_key
from gristmill.foundation.cached_njit import cached_njit

TOKEN_BITS = 14  # of the table of token weights

# What scan_attributes finds: integers ...
FLAGS, HAS_HREF, SELF_CLOSED, NUM_TOKENS, TOKENS_HASH, HREF_START, HREF_END = range(7)
NUM_FOUND = 7
# ... and weights of the tokens.
MIN_WEIGHT, MAX_WEIGHT, SUM_WEIGHT = range(3)

# Flags that attributes set on an element; elements inherit them (page_arrays.py adds those of tags).
IS_MAIN, IS_NAVIGATION, IS_HIDDEN, IS_ARTICLE_BODY, IS_COMMENT, IS_ARTICLE = (1 << bit for bit in range(6))

CLASS, ID, ROLE, ITEMPROP, ITEMTYPE = map(name_key, ("class", "id", "role", "itemprop", "itemtype"))
HREF, HIDDEN, STYLE, ARIA_HIDDEN = map(name_key, ("href", "hidden", "style", "aria-hidden"))


WORD_SLOTS = 256


def _values(table: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """(hashes or -1, flags), int64[256]: open addressing by the last bits of the hash."""
    hashes, flags = np.full(WORD_SLOTS, -1, np.int64), np.zeros(WORD_SLOTS, np.int64)
    for word, flag in table.items():
        at = name_hash(word.encode()) & (WORD_SLOTS - 1)
        while hashes[at] >= 0:
            at = (at + 1) & (WORD_SLOTS - 1)
        hashes[at], flags[at] = name_hash(word.encode()), flag
    return hashes, flags


# Of class, id, role and itemprop: whole words, in lower case.
WORDS, WORD_FLAGS = _values(
    {
        "main": IS_MAIN, "navigation": IS_NAVIGATION, "articlebody": IS_ARTICLE_BODY, "hidden": IS_HIDDEN,
        "comment": IS_COMMENT, "comments": IS_COMMENT, "commentlist": IS_COMMENT, "disqus": IS_COMMENT,
        "commentaires": IS_COMMENT, "kommentare": IS_COMMENT, "comentarios": IS_COMMENT, "respond": IS_COMMENT,
        "hentry": IS_ARTICLE, "article": IS_ARTICLE, "newsarticle": IS_ARTICLE, "blogposting": IS_ARTICLE,
    }
)  # fmt: skip
ITEM_SEED = 7919  # keeps words of itemprop and role apart from equal ones of class and id
WHOLE_SEED = 104729  # keeps whole tokens apart from the words inside them


@cached_njit(nogil=True)
def scan_attributes(html, at, end, weights, found, found_weights, pairs, num_pairs, element):
    """Read the attributes from html[at] to behind the tag's '>'; returns (position, number of pairs).

    weights: float32[2 ** TOKEN_BITS]. found, found_weights: see above. pairs: int32[N, 2], rows (element, hash) are
    appended for block-level elements (element >= 0) while there is room."""
    found[:] = 0
    found_weights[:] = 0.0
    while at < end:
        byte = html[at]
        if byte == 62:  # >
            return at + 1, num_pairs
        if byte <= 32 or byte == 47:
            found[SELF_CLOSED] = 1 if byte == 47 else found[SELF_CLOSED]
            at += 1
            continue
        found[SELF_CLOSED] = 0
        key, at = _attribute_name(html, at, end)
        at, first, last = _value_bounds(html, at, end)
        if key in (CLASS, ID, ROLE, ITEMPROP):
            seed = 0 if key in (CLASS, ID) else ITEM_SEED
            num_pairs = _scan_tokens(html, first, last, seed, weights, found, found_weights, pairs, num_pairs, element)
        elif key == HREF:
            found[HAS_HREF], found[HREF_START], found[HREF_END] = 1, first, last
        elif key == HIDDEN:
            found[FLAGS] |= IS_HIDDEN
        elif key == STYLE:
            if _is_display_none(html, first, last):
                found[FLAGS] |= IS_HIDDEN
        elif key == ARIA_HIDDEN and last - first == 4:
            found[FLAGS] |= IS_HIDDEN
    return end, num_pairs


@cached_njit(nogil=True)
def skip_attributes(html, at, end):
    """The position behind the '>' of a tag whose attributes are not needed."""
    while at < end:
        byte = html[at]
        if byte == 62:
            return at + 1
        if byte == 61:
            at, _, _ = _value_bounds(html, at, end)
        else:
            at += 1
    return end


@cached_njit(nogil=True, forceinline=True)
def _attribute_name(html, at, end):
    key, start = np.int64(0), at
    while at < end:
        byte = np.int64(html[at])
        if byte <= 32 or byte == 61 or byte == 62 or byte == 47:
            if byte == 61 and at == start:  # a name may begin with '='
                at += 1
                continue
            break
        key = key * 40 + (byte & 31 if byte >= 64 else max(byte - 21, 0)) if at - start < 11 else np.int64(-1)
        at += 1
    return key, at


@cached_njit(nogil=True, forceinline=True)
def _value_bounds(html, at, end):
    """(position behind the value, its start, its end) of `= value` at html[at]; an empty value if there is no '='."""
    while at < end and html[at] <= 32:
        at += 1
    if at >= end or html[at] != 61:
        return at, at, at
    at += 1
    while at < end and html[at] <= 32:
        at += 1
    if at >= end:
        return at, at, at
    quote = html[at]
    if quote == 34 or quote == 39:
        start = at + 1
        at = find_byte(html, start, end, quote)
        return min(at + 1, end), start, at
    start = at
    while at < end and html[at] > 32 and html[at] != 62:
        at += 1
    return at, start, at


@cached_njit(nogil=True)
def _scan_tokens(html, at, end, seed, weights, found, found_weights, pairs, num_pairs, element):
    """Tokens of a value: those between spaces, and the words inside them ("entryContent-main": entry, content, main).
    Digits are dropped: post-1234 is post."""
    whole = word = np.int64(FNV_OFFSET)
    length, was_lower, tokens = 0, False, 0
    while at <= end and tokens < 64:
        byte = np.int64(html[at]) if at < end else 32
        upper = 65 <= byte <= 90
        letter = upper or 97 <= byte <= 122 or byte >= 128
        if length > 0 and (not letter or (upper and was_lower)):
            if length > 1:
                num_pairs = _add(word, seed, weights, found, found_weights, pairs, num_pairs, element)
                tokens += 1
            word, length = np.int64(FNV_OFFSET), 0
        if letter:
            small = byte | 32 if byte < 128 else byte
            word = ((word ^ small) * FNV_PRIME) & MASK_32
            whole = ((whole ^ small) * FNV_PRIME) & MASK_32
            length += 1
        elif byte > 32:
            if not 48 <= byte <= 57:
                whole = ((whole ^ byte) * FNV_PRIME) & MASK_32
        elif whole != FNV_OFFSET:
            num_pairs = _add(whole, seed + WHOLE_SEED, weights, found, found_weights, pairs, num_pairs, element)
            found[TOKENS_HASH] = (found[TOKENS_HASH] * 31 + whole) & MASK_32
            tokens += 1
            whole = np.int64(FNV_OFFSET)
        was_lower = letter and not upper
        at += 1
    return num_pairs


@cached_njit(nogil=True)
def _add(word, seed, weights, found, found_weights, pairs, num_pairs, element):
    at = word & (WORD_SLOTS - 1)
    while WORDS[at] >= 0:
        if WORDS[at] == word:
            found[FLAGS] |= WORD_FLAGS[at]
            break
        at = (at + 1) & (WORD_SLOTS - 1)
    mixed = ((word ^ seed) * 0x9E3779B1) & MASK_32
    place = mixed >> (32 - TOKEN_BITS)
    weight = weights[place]
    found[NUM_TOKENS] += 1
    found_weights[MIN_WEIGHT] = min(found_weights[MIN_WEIGHT], weight)
    found_weights[MAX_WEIGHT] = max(found_weights[MAX_WEIGHT], weight)
    found_weights[SUM_WEIGHT] += weight
    if element >= 0 and num_pairs < len(pairs):
        pairs[num_pairs, 0], pairs[num_pairs, 1] = element, place
        return num_pairs + 1
    return num_pairs


@cached_njit(nogil=True)
def _is_display_none(html, at, end):
    """Whether the style holds display:none."""
    for k in range(at, end - 11):
        if html[k] | 32 == 100 and html[k + 7] == 58 and html[k + 1] | 32 == 105 and html[k + 6] | 32 == 121:
            j = k + 8
            while j < end and html[j] == 32:
                j += 1
            if j + 4 <= end and html[j] | 32 == 110 and html[j + 3] | 32 == 101:
                return True
    return False
