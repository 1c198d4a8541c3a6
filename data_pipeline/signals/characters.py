"""All code points as numpy arrays, with the properties that Python's `unicodedata` gives them."""

import unicodedata
from functools import cache

import numpy as np

from gristmill.foundation.runtime.kernels.kernel_files import cached_array

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


# Table of flags of every code point (space, word character, digit ...), from the properties of Unicode.

SPACE = 1  # str.isspace: what str.split separates words at
LINE_END = 2  # what str.splitlines ends a line at
WORD = 4  # letters, digits, marks, "_" and the joiners U+200C, U+200D: what a word is made of
IDEOGRAPH = 8  # of a script written without spaces: each is a word by itself
JOINER = 16  # between two word characters it does not end the word: don't, 3.14, a/b, me@home, 12:30
ALPHA = 32  # str.isalpha
DIGIT = 64  # str.isdigit
UPPER = 128  # str.isupper
PUNCTUATION = 256  # a word of nothing else is no plain word
TERMINAL = 512  # ends a sentence, before white space
STOP = 1024  # ends a sentence wherever it stands

JOINERS = "'’.:/@"

# Unicode 15's Sentence_Terminal (UAX 29), with Khmer U+17D6, U+17D9 and U+17DA; datatrove 0.10 decides by the same set.
_TERMINAL = """
    21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368 166E 1735-1736
    17D4-17D6 17D9-17DA 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F
    203C-203D 2047-2049 2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F
    A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59
    10F86-10F89 11047-11048 110BE-110C1 11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239
    1123B-1123C 112A9 1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 1173C-1173E 11944 11946
    11A42-11A43 11A9B-11A9C 11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5 16B37-16B38 16B44
    16E98 1BC9F 1DA88
"""

# Terminals of the scripts that write no space behind a sentence: 。 ！ ？ ｡ and their small and vertical forms.
_STOPS = "3002 FE12 FE15-FE16 FE52 FE56-FE57 FF01 FF1F FF61"

# Beside the terminals, the controls and all of ASCII's punctuation. datatrove 0.10 decides by the same set, U+FF11
# (a full-width digit one) among them.
_PUNCTUATION = """
    0-8 B-1F 7F-9F AB B4 BB 2013-2014 2019 201C-201E 2026 2236 2501 25BA 3001 3008-300D 3010-3011
    FF05 FF08-FF09 FF0C FF11 FF1A-FF1B FF5E
"""

# Han, Hiragana, Katakana, Bopomofo, Thai, Lao, Myanmar, Khmer. Their marks count as word characters.
_WITHOUT_SPACES = """
    E01-E30 E32-E33 E40-E46 E81-EB0 EB2-EB3 EC0-EC6 1000-102A 1780-17B3 3005-3007 3021-3029 3041-3096 309D-309F
    30A1-30FA 30FC-30FF 3105-312F 31F0-31FF 3400-4DBF 4E00-9FFF F900-FAFF FF66-FF9D 20000-323AF
"""

# Above it nothing is assigned but tags, variation selectors and private use; no line end is among them.
_LAST_ASSIGNED = 0x323AF


@cached_array
def character_table() -> np.ndarray:
    """uint16[0x110000]: the flags of every code point. Takes 0.05 s, once per machine."""
    table_C = _properties()
    table_C[_codes(_TERMINAL)] |= TERMINAL | PUNCTUATION
    table_C[_codes(_STOPS)] |= STOP
    table_C[_codes(_PUNCTUATION)] |= PUNCTUATION
    table_C[[ord(c) for c in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"]] |= PUNCTUATION
    table_C[[ord(c) for c in JOINERS]] |= JOINER
    ideographs = _codes(_WITHOUT_SPACES)
    table_C[ideographs] = table_C[ideographs] & ~np.uint16(WORD) | IDEOGRAPH
    return table_C


def _properties() -> np.ndarray:
    """uint16[0x110000]: the flags that Python's str and unicodedata define. Private use has none."""
    table_C = np.zeros(NUM_CODE_POINTS, dtype=np.uint16)
    table_C[category_letters()[:, 0] == ord("M")] = WORD
    table_C[[ord("_"), 0x200C, 0x200D]] = WORD
    assigned = first_code_points(_LAST_ASSIGNED + 1)
    flags_A = table_C[: len(assigned)]
    for flag, holds in (
        (SPACE, np.strings.isspace),
        (WORD, np.strings.isalnum),
        (ALPHA, np.strings.isalpha),
        (DIGIT, np.strings.isdigit),
        (UPPER, np.strings.isupper),
    ):
        flags_A[holds(assigned)] |= flag
    text = "".join(map(chr, range(len(assigned))))
    flags_A[[ord(line[-1]) for line in text.splitlines(keepends=True)[:-1]]] |= LINE_END
    return table_C


def _codes(ranges: str) -> list[int]:
    """ "41-43 7A" -> [0x41, 0x42, 0x43, 0x7A]."""
    codes: list[int] = []
    for piece in ranges.split():
        first, _, last = piece.partition("-")
        codes.extend(range(int(first, 16), int(last or first, 16) + 1))
    return codes
