"""Script of a text: the ISO 15924 code of most of its letters."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
from fontTools.unicodedata import Scripts, script

from gristmill.data_pipeline.signals.bits import decode
from gristmill.data_pipeline.signals.buffer import joined
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, WORD, character_table
from gristmill.foundation.cached_njit import cached_njit

SCRIPT_FIELD = pa.field("script", pa.string())
HEAD_CHARS = 2000  # looked at, from the text's start
NO_SCRIPT = ("Zyyy", "Zinh", "Zzzz")  # common, inherited and unknown characters
NO_LETTERS = "Zyyy"
KANA = ("Hira", "Kana", "Hrkt")
JAPANESE, HAN = "Jpan", "Hani"
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


def text_scripts(texts: Sequence[str]) -> list[str]:
    """The script of each text. "Мельница mill" -> Cyrl; "水車と川" -> Jpan; "3.14" -> Zyyy."""
    scripts_C, names = script_table()
    text, offsets = joined([text[:HEAD_CHARS].encode() for text in texts])
    counts_NS = np.zeros((len(texts), len(names)), dtype=np.int64)
    _count(text, offsets, scripts_C, counts_NS)
    kana = [names.index(name) for name in KANA if name in names]
    han, kana_N = names.index(HAN), counts_NS[:, kana].sum(axis=1)
    japanese_N = (kana_N > 0) & (kana_N >= KANA_SHARE * (kana_N + counts_NS[:, han]))
    counts_NS[:, kana] = 0
    counts_NS[:, han] += kana_N
    best_N = counts_NS.argmax(axis=1)
    return [JAPANESE if best == han and kana else names[best] for best, kana in zip(best_N, japanese_N, strict=True)]


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
def _count(text, offsets, scripts, counts):
    """Fills counts int64[N, scripts]."""
    for k in range(len(offsets) - 1):
        at, end = offsets[k], offsets[k + 1] - 1
        while at < end:
            code, size = decode(text, at)
            counts[k, scripts[code]] += 1
            at += size
        counts[k, 0] = 0
