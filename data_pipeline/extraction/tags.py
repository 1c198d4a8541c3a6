"""HTML element names the tokenizer knows: ids, kinds and the lookup table of its kernel.

Source: WHATWG, HTML, 13.1.2 (void and raw text elements) and 15.3 (default display). Unknown names are inline."""

import numpy as np

# Kinds, one bit each.
BLOCK = 1  # starts a text block and an element of the tree
VOID = 2  # has no end tag
RAW = 4  # text up to its end tag is not markup and no content; without an end tag, the rest of the page is dropped
SKIPPED = 8  # content up to its end tag is dropped; without an end tag only the tag is
LINK = 16
BOLD = 32
BREAK = 64  # br
IMAGE = 128
CELL = 256  # td, th: joined with a tab where tables keep their rows
CODE = 512  # white space is kept
ITEM = 1024  # li, dt, dd: closed by the next one
HEADING = 2048
CONTROL = 4096  # input, select, textarea: counted as form controls
READING = 8192  # rt, rp: the pronunciation above ruby text; skipped up to the next tag of the ruby
MATH = 16384  # its TeX is kept, if it has any

# In the order of their ids, from 1; id 0 is any other name. Trees split on the id, so similar elements stand together.
TAGS: dict[str, int] = {
    "html": BLOCK, "body": BLOCK, "main": BLOCK, "article": BLOCK, "section": BLOCK, "div": BLOCK, "center": BLOCK,
    "p": BLOCK, "blockquote": BLOCK, "pre": BLOCK | CODE, "listing": BLOCK | CODE, "xmp": RAW,
    "h1": BLOCK | HEADING, "h2": BLOCK | HEADING, "h3": BLOCK | HEADING, "h4": BLOCK | HEADING,
    "h5": BLOCK | HEADING, "h6": BLOCK | HEADING, "hgroup": BLOCK,
    "dl": BLOCK, "dt": BLOCK | ITEM, "dd": BLOCK | ITEM, "ul": BLOCK, "ol": BLOCK, "menu": BLOCK, "dir": BLOCK,
    "li": BLOCK | ITEM, "table": BLOCK, "thead": BLOCK, "tbody": BLOCK, "tfoot": BLOCK, "caption": BLOCK,
    "colgroup": BLOCK, "tr": BLOCK, "th": BLOCK | CELL, "td": BLOCK | CELL,
    "figure": BLOCK, "figcaption": BLOCK, "picture": 0, "details": BLOCK, "summary": BLOCK, "address": BLOCK,
    "header": BLOCK, "hr": BLOCK | VOID, "form": BLOCK, "fieldset": BLOCK, "legend": BLOCK, "label": 0,
    "button": BLOCK, "dialog": BLOCK, "search": BLOCK, "aside": BLOCK, "nav": BLOCK, "footer": BLOCK,
    "a": LINK, "b": BOLD, "strong": BOLD, "i": 0, "em": 0, "u": 0, "span": 0, "font": 0, "code": 0, "time": 0,
    "br": VOID | BREAK, "img": VOID | IMAGE, "input": VOID | CONTROL, "wbr": VOID, "area": VOID, "base": VOID,
    "col": VOID, "embed": VOID, "link": VOID, "meta": VOID, "param": VOID, "source": VOID, "track": VOID,
    "script": RAW, "style": RAW, "title": RAW, "textarea": RAW | CONTROL, "iframe": RAW, "noembed": RAW,
    "noframes": RAW, "plaintext": 0, "head": 0, "noscript": BLOCK, "svg": SKIPPED, "math": MATH,
    "template": SKIPPED, "select": SKIPPED | CONTROL, "datalist": SKIPPED, "canvas": SKIPPED, "object": 0,
    "video": SKIPPED, "audio": SKIPPED, "map": SKIPPED, "option": 0,
    "rt": READING, "rp": READING, "rb": 0, "ruby": 0, "annotation": 0,
}  # fmt: skip
TAG_IDS = {name: place for place, name in enumerate(TAGS, 1)}
TAG_KINDS = np.array([0, *TAGS.values()], np.int64)

LOOKUP_BITS = 10


def name_key(name: str) -> int:
    """The name's letters and digits in base 40, as the kernel computes it."""
    key = 0
    for byte in name.encode():
        key = (key * 40 + (byte & 31 if byte >= 64 else byte - 21)) & 0xFFFFFFFFFFFFFFFF
    return key


def lookup_table() -> tuple[np.ndarray, np.ndarray]:
    """(keys int64[1024], ids int64[1024]): open addressing from key * 0x9E3779B1 >> 22 in 32 bits."""
    keys, ids = np.full(1 << LOOKUP_BITS, -1, np.int64), np.zeros(1 << LOOKUP_BITS, np.int64)
    for name, tag in TAG_IDS.items():
        at = lookup_place(name_key(name))
        while keys[at] >= 0:
            at = (at + 1) & ((1 << LOOKUP_BITS) - 1)
        keys[at], ids[at] = name_key(name), tag
    return keys, ids


def lookup_place(key: int) -> int:
    return (((key ^ (key >> 17)) * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - LOOKUP_BITS)


TAG_KEYS, TAG_VALUES = lookup_table()
