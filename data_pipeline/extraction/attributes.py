"""Attributes of one start tag: class and id tokens as hashes with learned weights, and a few known values."""

import html.entities

import numpy as np

from gristmill.data_pipeline.extraction.tags import TAG_IDS, TAG_KINDS, name_key
from gristmill.data_pipeline.signals.intrinsics import bytes_within, ones, trailing_zeros
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Character references of HTML: lookup table of the named ones, decoding of numeric ones (HTML, 13.2.5.72 to 80).

HASH_BITS = 13  # 2,231 names
MAX_NAME_BYTES = 33  # CounterClockwiseContourIntegral;
FNV_OFFSET, FNV_PRIME, MASK_32 = 2166136261, 16777619, 0xFFFFFFFF
SEMICOLON = 59


def name_hash(name: bytes) -> int:
    """FNV-1a, 32 bits."""
    value = FNV_OFFSET
    for byte in name:
        value = ((value ^ byte) * FNV_PRIME) & MASK_32
    return value


def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slots int64[8192, 4]: hash or -1, start, length of the name, length of the text; names; texts uint8[n, 8])."""
    size = 1 << HASH_BITS
    slots = np.full((size, 4), -1, np.int64)
    names, texts = bytearray(), np.zeros((size, 8), np.uint8)
    for name, text in sorted(html.entities.html5.items()):
        key, plain = name.encode(), text.encode()
        value = name_hash(key)
        at = value & (size - 1)
        while slots[at, 0] >= 0:
            at = (at + 1) & (size - 1)
        slots[at] = value, len(names), len(key), len(plain)
        texts[at, : len(plain)] = list(plain)
        names += key
    return slots, np.frombuffer(bytes(names), np.uint8), texts


SLOTS, NAMES, TEXTS = _tables()
# Numbers 128 to 159 mean the characters of windows-1252.
_CP1252 = np.array(
    [ord(bytes([byte]).decode("cp1252", "ignore") or chr(byte)) for byte in range(128, 160)], dtype=np.int64
)


@cached_njit(nogil=True)
def decode_reference(source, at, end, out, where):
    """Decode the reference at source[at] == '&' into out[where:]. Returns (bytes read, bytes written); (0, 0) if it is
    none: the '&' is text then."""
    if at + 1 >= end:
        return 0, 0
    if source[at + 1] == 35:  # '#'
        return _number(source, at, end, out, where)
    value = np.int64(FNV_OFFSET)
    best, written, k = 0, 0, at + 1
    while k < end and k - at <= MAX_NAME_BYTES:
        byte = np.int64(source[k])
        letter = (65 <= byte <= 90) or (97 <= byte <= 122) or (48 <= byte <= 57)
        if not letter and byte != SEMICOLON:
            break
        value = ((value ^ byte) * FNV_PRIME) & MASK_32
        slot = _find(value, source, at + 1, k + 1 - at - 1)
        if slot >= 0:
            best, written = k + 1 - at, SLOTS[slot, 3]
            for j in range(written):
                out[where + j] = TEXTS[slot, j]
        k += 1
        if byte == SEMICOLON:
            break
    return best, written


@cached_njit(nogil=True)
def _find(value, source, start, length):
    at = value & ((1 << HASH_BITS) - 1)
    while SLOTS[at, 0] >= 0:
        if SLOTS[at, 0] == value and SLOTS[at, 2] == length:
            same = True
            for j in range(length):
                if NAMES[SLOTS[at, 1] + j] != source[start + j]:
                    same = False
                    break
            if same:
                return at
        at = (at + 1) & ((1 << HASH_BITS) - 1)
    return -1


@cached_njit(nogil=True)
def _number(source, at, end, out, where):
    k, code, digits = at + 2, np.int64(0), 0
    is_hex = k < end and (source[k] | 32) == 120
    if is_hex:
        k += 1
    while k < end:
        byte = np.int64(source[k])
        if 48 <= byte <= 57:
            digit = byte - 48
        elif is_hex and 97 <= (byte | 32) <= 102:
            digit = (byte | 32) - 87
        else:
            break
        code = min(code * (16 if is_hex else 10) + digit, 0x110000)
        digits += 1
        k += 1
    if digits == 0:
        return 0, 0
    if k < end and source[k] == SEMICOLON:
        k += 1
    if 128 <= code < 160:
        code = _CP1252[code - 128]
    if code == 0 or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        code = 0xFFFD
    return k - at, put_character(code, out, where)


@cached_njit(nogil=True)
def put_character(code, out, where):
    """Write the character in UTF-8; returns its bytes."""
    if code < 0x80:
        out[where] = code
        return 1
    if code < 0x800:
        out[where], out[where + 1] = 0xC0 | (code >> 6), 0x80 | (code & 63)
        return 2
    if code < 0x10000:
        out[where], out[where + 1], out[where + 2] = 0xE0 | (code >> 12), 0x80 | ((code >> 6) & 63), 0x80 | (code & 63)
        return 3
    out[where], out[where + 1] = 0xF0 | (code >> 18), 0x80 | ((code >> 12) & 63)
    out[where + 2], out[where + 3] = 0x80 | ((code >> 6) & 63), 0x80 | (code & 63)
    return 4


TOKEN_BITS = 14  # of the places of class and id tokens in the table of token weights
WORD_BITS = 15  # of the places of words behind them, of the text of short blocks
NUM_TOKENS = 1 << TOKEN_BITS
TABLE_SIZE = NUM_TOKENS + (1 << WORD_BITS)

# What scan_attributes finds: integers ...
FLAGS, HAS_HREF, SELF_CLOSED, NUM_TOKENS, TOKENS_HASH, HREF_START, HREF_END = range(7)
NUM_FOUND = 7
# ... and weights of the tokens.
MIN_WEIGHT, MAX_WEIGHT, SUM_WEIGHT = range(3)

# Flags that attributes set on an element; elements inherit them (extraction/attributes.py adds those of tags).
(
    IS_MAIN, IS_NAVIGATION, IS_HIDDEN, IS_ARTICLE_BODY, IS_COMMENT, IS_ARTICLE, IS_RENDERED_MATH, IS_TEX,
) = (1 << bit for bit in range(8))  # fmt: skip
IS_LINE_NUMBER = 1 << 27  # behind the flags that are features

CLASS, ID, ROLE, ITEMPROP, ITEMTYPE = map(name_key, ("class", "id", "role", "itemprop", "itemtype"))
HREF, HIDDEN, STYLE, ARIA_HIDDEN, TYPE, ENCODING = map(
    name_key, ("href", "hidden", "style", "aria-hidden", "type", "encoding")
)


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
        "katex-html": IS_RENDERED_MATH, "mathjax_preview": IS_RENDERED_MATH, "mathjax_svg": IS_RENDERED_MATH,
        "mathjax_chtml": IS_RENDERED_MATH, "mjx-chtml": IS_RENDERED_MATH,
        "linenos": IS_LINE_NUMBER, "lineno": IS_LINE_NUMBER, "linenumber": IS_LINE_NUMBER,
        "line-number": IS_LINE_NUMBER,
        "hentry": IS_ARTICLE, "article": IS_ARTICLE, "newsarticle": IS_ARTICLE, "blogposting": IS_ARTICLE,
    }
)  # fmt: skip
ITEM_SEED = 7919  # keeps words of itemprop and role apart from equal ones of class and id
WHOLE_SEED = 104729  # keeps whole tokens apart from the words inside them


@cached_njit(nogil=True)
def scan_attributes(html, at, end, weights, properties, property_weights, seen, pairs, num_pairs, element):
    """Read the attributes from html[at] to behind the tag's '>'; returns (position, number of pairs).

    weights: float32[TABLE_SIZE]. properties, property_weights: see above. seen: bool[TABLE_SIZE], the
    tokens of the page. pairs: int32[N, 2], rows (element, hash) are appended for block-level elements (element >= 0)
    while there is room."""
    properties[:] = 0
    property_weights[:] = 0.0
    while at < end:
        byte = html[at]
        if byte == 62:  # >
            return at + 1, num_pairs
        if byte <= 32 or byte == 47:
            properties[SELF_CLOSED] = 1 if byte == 47 else properties[SELF_CLOSED]
            at += 1
            continue
        properties[SELF_CLOSED] = 0
        key, at = _attribute_name(html, at, end)
        at, first, last = _value_bounds(html, at, end)
        if key in (CLASS, ID, ROLE, ITEMPROP):
            seed = 0 if key in (CLASS, ID) else ITEM_SEED
            num_pairs = _scan_tokens(
                html, first, last, seed, weights, properties, property_weights, seen, pairs, num_pairs, element
            )
        elif key == HREF:
            properties[HAS_HREF], properties[HREF_START], properties[HREF_END] = 1, first, last
        elif key == HIDDEN:
            properties[FLAGS] |= IS_HIDDEN
        elif key == STYLE:
            if _is_display_none(html, first, last):
                properties[FLAGS] |= IS_HIDDEN
        elif key == ARIA_HIDDEN and last - first == 4:
            properties[FLAGS] |= IS_HIDDEN
        elif (key in (TYPE, ENCODING)) and _ends_in_tex(html, first, last):
            properties[FLAGS] |= IS_TEX
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
def _scan_tokens(html, at, end, seed, weights, properties, property_weights, seen, pairs, num_pairs, element):
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
                num_pairs = _add(word, seed, weights, properties, property_weights, seen, pairs, num_pairs, element)
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
            num_pairs = _add(
                whole, seed + WHOLE_SEED, weights, properties, property_weights, seen, pairs, num_pairs, element
            )
            properties[TOKENS_HASH] = (properties[TOKENS_HASH] * 31 + whole) & MASK_32
            tokens += 1
            whole = np.int64(FNV_OFFSET)
        was_lower = letter and not upper
        at += 1
    return num_pairs


@cached_njit(nogil=True)
def _add(word, seed, weights, properties, property_weights, seen, pairs, num_pairs, element):
    at = word & (WORD_SLOTS - 1)
    while WORDS[at] >= 0:
        if WORDS[at] == word:
            properties[FLAGS] |= WORD_FLAGS[at]
            break
        at = (at + 1) & (WORD_SLOTS - 1)
    mixed = ((word ^ seed) * 0x9E3779B1) & MASK_32
    place = mixed >> (32 - TOKEN_BITS)
    weight = weights[place]
    seen[place] = True
    properties[NUM_TOKENS] += 1
    property_weights[MIN_WEIGHT] = min(property_weights[MIN_WEIGHT], weight)
    property_weights[MAX_WEIGHT] = max(property_weights[MAX_WEIGHT], weight)
    property_weights[SUM_WEIGHT] += weight
    if element >= 0 and num_pairs < len(pairs):
        pairs[num_pairs, 0], pairs[num_pairs, 1] = element, place
        return num_pairs + 1
    return num_pairs


@cached_njit(nogil=True)
def holds_tex(html, at, end):
    """Whether the attributes between the positions hold an encoding in TeX."""
    for k in range(at, end - 5):
        if html[k] == 47 and (html[k + 1] | 32) == 120 and html[k + 2] == 45 and _ends_in_tex(html, k + 1, k + 6):
            return True
    return False


@cached_njit(nogil=True)
def _ends_in_tex(html, at, end):
    """Whether the value is math/tex (MathJax, perhaps with a mode) or application/x-tex (MathML)."""
    for k in range(at, min(end, at + 16)):
        if html[k] | 32 == 116 and html[k + 1] | 32 == 101 and html[k + 2] | 32 == 120:
            return k > at and (html[k - 1] == 47 or html[k - 1] == 45) and (k + 3 == end or html[k + 3] == 59)
    return False


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


# Search of a byte, 64 at a time.

PADDING = 64  # zero bytes behind the page, so that looking ahead needs no check


@cached_njit(nogil=True)
def find_byte(source, at, end, byte):
    """The position of the first `byte` from `at` on; `end` if there is none. source: uint8[end + PADDING]."""
    while at < end:
        mask = bytes_within(source, at, np.uint8(byte), np.uint8(1))
        if mask != 0:
            return min(at + np.int64(trailing_zeros(mask)), end)
        at += 64
    return end


@cached_njit(nogil=True)
def count_byte(source, byte):
    """How often the byte stands in source, uint8[N] without padding."""
    size, count, at = len(source), 0, 0
    while at + 64 <= size:
        count += np.int64(ones(bytes_within(source, at, np.uint8(byte), np.uint8(1))))
        at += 64
    for k in range(at, size):
        count += source[k] == byte
    return count


# Columns of the arrays that hold a tokenized page.

# Columns of elements, int32[E, 7]. TAG_START: byte of the page where the start tag begins.
PARENT, TAG, ELEMENT_FLAGS, DEPTH, PATH_HASH, NUM_CHILDREN, TAG_START = range(7)
# Columns of the elements' token weights, float32[E, 6]: of the element, and over it and its ancestors.
OWN_MIN, OWN_MAX, OWN_SUM, PATH_MIN, PATH_MAX, PATH_SUM = range(6)
# Columns of blocks, int32[B, 13]. START, END: bytes of the text buffer. SOURCE: byte of the page where the block ends.
# HTML_START, HTML_END: bytes of the page from the block's first character to behind its last.
ELEMENT, START, END, LINK_BYTES, LINKS, BOLD_BYTES, BREAKS, IMAGES, CONTROLS, INLINE_FLAGS, SOURCE = range(11)
HTML_START, HTML_END = 11, 12
NUM_BLOCK_COLUMNS = 13

# Columns of links, int32[L, 3]: the block the link is in, and the bytes of the page that hold its address; or MARK, and
# the bytes of the text that are a mark (text_blocks.py).
LINK_BLOCK, ADDRESS_START, ADDRESS_END = range(3)
MARK = -1

# Flags of elements beside those of attributes.py: of the element's tag and its ancestors'.
FLAG_TAGS = (
    ("nav", IS_NAVIGATION), ("main", IS_MAIN), ("article", IS_ARTICLE), ("header", 1 << 8), ("footer", 1 << 9),
    ("aside", 1 << 10), ("form", 1 << 11), ("ul", 1 << 12), ("ol", 1 << 12), ("table", 1 << 13), ("li", 1 << 14),
    ("figure", 1 << 15), ("blockquote", 1 << 16), ("section", 1 << 17), ("dl", 1 << 18), ("pre", 1 << 19),
    ("p", 1 << 20), ("button", 1 << 21), ("details", 1 << 22), ("listing", 1 << 19), ("figcaption", 1 << 23),
    ("noscript", 1 << 26), ("h1", 1 << 24), ("h2", 1 << 25), ("h3", 1 << 25), ("h4", 1 << 25), ("h5", 1 << 25),
    ("h6", 1 << 25),
)  # fmt: skip
IN_LIST, IN_TABLE, IN_QUOTE, IN_CODE = 1 << 12, 1 << 13, 1 << 16, 1 << 19
IN_MARGIN = IS_NAVIGATION | 1 << 8 | 1 << 9 | 1 << 10  # <nav>, <header>, <footer>, <aside>
NUM_FLAGS = 27
TAG_FLAGS = np.zeros(len(TAG_KINDS), np.int64)
for _name, _flag in FLAG_TAGS:
    TAG_FLAGS[TAG_IDS[_name]] |= _flag

# State of a page's pass.
(
    OUT, BLOCK_START, SPACE, LINK_FROM, BOLD_FROM, S_LINK_BYTES, S_LINKS, S_BOLD_BYTES, S_BREAKS, S_IMAGES, S_CONTROLS,
    BREAKS_IN_A_ROW, CURRENT, OVERFLOW, NUM_BLOCKS, NUM_ELEMENTS, NUM_PAIRS, TITLE_START, TITLE_END, SEEN_BODY, AT,
    S_INLINE_FLAGS, NUM_LINKS, S_HTML_START, S_HTML_END, HAS_PLAIN_MATH, LINK_HTML_END,
) = range(27)  # fmt: skip
NUM_STATES = 27
# Behind them: what scan_attributes finds of the current tag, and the tags whose end tag is missing.
FOUND_WEIGHTS = NUM_STATES + NUM_FOUND
MISSING = FOUND_WEIGHTS + 2  # three weights of four bytes
STATE_SIZE = MISSING + len(TAG_KINDS)
# White space before the next character: none, spaces, with a line end of the source, one that is no such space, <br>.
NO_SPACE, ONE_SPACE, SOURCE_LINE_END, FIXED_SPACE, LINE_END = range(5)
# Columns of the structure that layout.py finds for each element.
ORDINAL, COUNT, NEAREST, IS_FLOW, IS_ABOVE = range(5)
