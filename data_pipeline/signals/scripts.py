"""Script of a text: the ISO 15924 code of most of its letters."""

from collections import Counter
from functools import lru_cache

import numpy as np
import pyarrow as pa
from fontTools.unicodedata import Scripts, script

from gristmill.data_pipeline.signals.bits import BLOCK, ZERO, below, decode, first_bit
from gristmill.data_pipeline.signals.buffer import TextBuffer
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, WORD, character_table
from gristmill.data_pipeline.signals.intrinsics import bytes_within, letters_within, ones, pointer
from gristmill.foundation.cached_njit import cached_njit

SCRIPT_FIELD = pa.field("script", pa.string())
HEAD_CHARS = 2000  # looked at, from the text's start
NO_SCRIPT = ("Zyyy", "Zinh", "Zzzz")  # common, inherited and unknown characters
NO_LETTERS = "Zyyy"
KANA = ("Hira", "Kana", "Hrkt")
JAPANESE, HAN, LATIN = "Jpan", "Hani", "Latn"
KANA_SHARE = 0.05  # of Han and kana; Chinese has next to none, Japanese has more kana than Han
# What other tables call the same: Korean writes Hangul alone today, and Han stands for both ways of writing Chinese.
ALIASES = {"Kore": "Hang", "Hans": "Hani", "Hant": "Hani", "Hrkt": "Jpan", "Hira": "Jpan", "Kana": "Jpan"}


@lru_cache(maxsize=1)
def script_table() -> tuple[np.ndarray, tuple[str, ...]]:
    """Return (uint8[0x110000], names): the index in names of every code point's script; 0 for no particular script."""
    names = (NO_LETTERS, *sorted(set(Scripts.VALUES) - set(NO_SCRIPT)))
    places = {name: place for place, name in enumerate(names)}
    table_C = np.zeros(0x110000, dtype=np.uint8)
    for first, end, name in zip(Scripts.RANGES, [*Scripts.RANGES[1:], 0x110000], Scripts.VALUES, strict=True):
        table_C[first:end] = places.get(name, 0)
    table_C[(character_table() & (WORD | IDEOGRAPH)) == 0] = 0
    return table_C, names


def text_scripts(texts: TextBuffer) -> list[str]:
    """The script of each text. "Мельница mill" -> Cyrl; "水車と川" -> Jpan; "3.14" -> Zyyy."""
    scripts_C, names = script_table()
    kana = np.array([name in KANA for name in names])
    places = (names.index(LATIN), names.index(HAN), len(names))
    found_N, all_names = np.empty(len(texts), np.int64), (*names, JAPANESE)
    _find_scripts(texts.text, texts.offsets, scripts_C, kana, places, found_N)
    return [all_names[place] for place in found_N.tolist()]


def text_script(text: str) -> str:
    """text_scripts in plain Python, of one text."""
    flags = character_table()
    found = Counter(script(c) for c in text[:HEAD_CHARS] if flags[ord(c)] & (WORD | IDEOGRAPH))
    kana = sum(found.pop(name, 0) for name in KANA)
    found[HAN] += kana
    for name in NO_SCRIPT:
        found.pop(name, None)
    best = min(found, key=lambda name: (-found[name], name))
    if not found[best]:
        return NO_LETTERS
    return JAPANESE if best == HAN and kana and kana >= KANA_SHARE * found[HAN] else best


@cached_njit(nogil=True)
def _find_scripts(text_array, offsets, scripts, kana, places, found):
    """Fills found int64[N] with the place of each text's script. kana: bool[scripts]; places: of Latin, Han and
    Japanese."""
    text = pointer(text_array, 0)
    latin, han, japanese = places
    counts = np.zeros(len(kana), np.int64)
    for k in range(len(offsets) - 1):
        counts[:] = 0
        _count_scripts(text, offsets[k], offsets[k + 1] - 1, scripts, latin, counts)
        counts[0] = 0
        num_kana = 0
        for place in range(len(kana)):
            if kana[place]:
                num_kana += counts[place]
                counts[place] = 0
        is_japanese = num_kana > 0 and num_kana >= KANA_SHARE * (num_kana + counts[han])
        counts[han] += num_kana
        best = counts.argmax()
        found[k] = japanese if best == han and is_japanese else best


@cached_njit(nogil=True)
def _count_scripts(text, at, end, scripts, latin, counts):
    """Adds to counts int64[scripts], of the text's first HEAD_CHARS characters."""
    read = 0
    while at < end and read < HEAD_CHARS:
        beyond = bytes_within(text, at, 0x80, 0x80)
        size = min(BLOCK if beyond == ZERO else first_bit(beyond), end - at, HEAD_CHARS - read)
        counts[latin] += np.int64(ones(letters_within(text, at, 0x61, 26) & below(size)))
        at += size
        read += size
        while at < end and read < HEAD_CHARS and text[at] >= 0x80:
            code, size = decode(text, at)
            counts[scripts[code]] += 1
            at += size
            read += 1
