"""All code points as numpy arrays, with the properties that Python's `unicodedata` gives them."""

import unicodedata
from functools import cache

import numpy as np

NUM_CODE_POINTS = 0x110000
# Nothing is assigned in between but private use: planes 4 to 13 are empty, 14 has tags and variation selectors.
_ASSIGNED = (range(0x40000), range(0xE0000, 0xE1000))
_UNASSIGNED, _PRIVATE = b"Cn", b"Co"
_PRIVATE_PLANES = (0xF0000, 0x100000)


def first_code_points(count: int) -> np.ndarray:
    """U1[count]: the first code points, each as a string of one character; numpy takes U+0000 for an empty one."""
    return np.arange(count, dtype=np.uint32).view("U1")


@cache
def category_letters() -> np.ndarray:
    """uint8[0x110000, 2]: the two letters of every code point's general category: of "A" b"Lu". Takes 0.03 s, once a
    process."""
    letters_C2 = np.empty((NUM_CODE_POINTS, 2), dtype=np.uint8)
    letters_C2[:] = np.frombuffer(_UNASSIGNED, dtype=np.uint8)
    for first in _PRIVATE_PLANES:  # their last two code points are not characters
        letters_C2[first : first + 0xFFFE] = np.frombuffer(_PRIVATE, dtype=np.uint8)
    for codes in _ASSIGNED:
        names = "".join(map(unicodedata.category, map(chr, codes))).encode()
        letters_C2[codes.start : codes.stop] = np.frombuffer(names, dtype=np.uint8).reshape(-1, 2)
    return letters_C2
