"""Columns of the arrays that hold a tokenized page."""

import numpy as np

from gristmill.data_pipeline.extraction.attributes import IS_ARTICLE, IS_MAIN, IS_NAVIGATION
from gristmill.data_pipeline.extraction.tags import TAG_IDS, TAG_KINDS

# Columns of elements, int32[E, 6].
PARENT, TAG, ELEMENT_FLAGS, DEPTH, PATH_HASH, NUM_CHILDREN = range(6)
# Columns of the elements' token weights, float32[E, 6]: of the element, and over it and its ancestors.
OWN_MIN, OWN_MAX, OWN_SUM, PATH_MIN, PATH_MAX, PATH_SUM = range(6)
# Columns of blocks, int32[B, 11]. START, END: bytes of the text buffer. SOURCE: byte of the page where the block ends.
ELEMENT, START, END, LINK_BYTES, LINKS, BOLD_BYTES, BREAKS, IMAGES, CONTROLS, INLINE_FLAGS, SOURCE = range(11)

# Columns of links, int32[L, 3]: the block the link is in, and the bytes of the page that hold its address.
LINK_BLOCK, ADDRESS_START, ADDRESS_END = range(3)

# Flags of elements beside those of attributes.py: of the element's tag and its ancestors'.
FLAG_BIT = 8
FLAG_TAGS = (
    ("nav", IS_NAVIGATION), ("main", IS_MAIN), ("article", IS_ARTICLE), ("header", 1 << 8), ("footer", 1 << 9),
    ("aside", 1 << 10), ("form", 1 << 11), ("ul", 1 << 12), ("ol", 1 << 12), ("table", 1 << 13), ("li", 1 << 14),
    ("figure", 1 << 15), ("blockquote", 1 << 16), ("section", 1 << 17), ("dl", 1 << 18), ("pre", 1 << 19),
    ("p", 1 << 20), ("button", 1 << 21), ("details", 1 << 22), ("listing", 1 << 19), ("figcaption", 1 << 23),
    ("h1", 1 << 24), ("h2", 1 << 25), ("h3", 1 << 25), ("h4", 1 << 25), ("h5", 1 << 25), ("h6", 1 << 25),
)  # fmt: skip
IN_LIST, IN_TABLE, IN_CODE = 1 << 12, 1 << 13, 1 << 19
NUM_FLAGS = 26
TAG_FLAGS = np.zeros(len(TAG_KINDS), np.int64)
for _name, _flag in FLAG_TAGS:
    TAG_FLAGS[TAG_IDS[_name]] |= _flag

# State of a page's pass.
(
    OUT, BLOCK_START, SPACE, LINK_FROM, BOLD_FROM, S_LINK_BYTES, S_LINKS, S_BOLD_BYTES, S_BREAKS, S_IMAGES, S_CONTROLS,
    BREAKS_IN_A_ROW, CURRENT, OVERFLOW, NUM_BLOCKS, NUM_ELEMENTS, NUM_PAIRS, TITLE_START, TITLE_END, SEEN_BODY, AT,
    S_INLINE_FLAGS, NUM_LINKS,
) = range(23)  # fmt: skip
NUM_STATES = 23
NO_SPACE, ONE_SPACE, LINE_END = 0, 1, 2
