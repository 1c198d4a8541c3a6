"""Script of a text: the ISO 15924 code of most of its letters."""

import re
from collections import Counter
from functools import lru_cache

import numpy as np
import pyarrow as pa
from babel.core import get_global
from fontTools.unicodedata import Scripts, script

from gristmill.data_pipeline.signals.bits import BLOCK, ZERO, TextBuffer, below, decode, first_bit
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, WORD, character_table
from gristmill.data_pipeline.signals.intrinsics import bytes_within, letters_within, ones, pointer
from gristmill.foundation.errors import nearest_name
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

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
    scripts = Counter(script(c) for c in text[:HEAD_CHARS] if flags[ord(c)] & (WORD | IDEOGRAPH))
    kana = sum(scripts.pop(name, 0) for name in KANA)
    scripts[HAN] += kana
    for name in NO_SCRIPT:
        scripts.pop(name, None)
    best = min(scripts, key=lambda name: (-scripts[name], name))
    if not scripts[best]:
        return NO_LETTERS
    return JAPANESE if best == HAN and kana and kana >= KANA_SHARE * scripts[HAN] else best


@cached_njit(nogil=True)
def _find_scripts(text_array, offsets, scripts, kana, places, found_scripts):
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
        found_scripts[k] = japanese if best == han and is_japanese else best


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


# Language codes: maps ISO 639-3 codes and the labels of models to the codes that lid.176 uses.

# Codes that CLDR keeps apart and lid.176 does not: its `no` is Norwegian without nn, its `als` Alemannic (in ISO 639-3,
# gsw; als there is Tosk Albanian).
_SAME = {"nb": "no", "fil": "tl", "gsw": "als", "lah": "pnb", "pan": "pa"}
# Macrolanguages, which ISO 639-3 cuts into several: the code of the whole and of the standard or largest part, which a
# two-letter code stands for. The other parts are languages of their own.
_STANDARD = {
    "ar": "ara arb", "zh": "zho chi cmn", "ms": "msa may zsm", "sw": "swa swh", "et": "est ekk", "lv": "lav lvs",
    "fa": "fas per pes", "mn": "mon khk", "ne": "nep npi", "or": "ori ory", "sq": "sqi alb als", "uz": "uzb uzn",
    "az": "aze azj", "ku": "kur kmr", "mg": "mlg plt", "yi": "yid ydd", "ps": "pus pbt", "qu": "que quz",
    "gn": "grn gug", "sr": "srp scc", "ay": "aym ayr", "oj": "oji ojg", "om": "orm gaz", "bik": "bik bcl",
    "kok": "kok knn", "za": "zha zyb", "ff": "ful fub", "ak": "aka twi", "kr": "kau knc", "kv": "kom kpv",
    "cr": "cre crk", "ik": "ipk esk", "iu": "iku ike",
}  # fmt: skip


@lru_cache(maxsize=4096)
def language_code(name: str) -> str:
    """The code of a language by its ISO 639-1, -2 or -3 code. deu -> de, cmn -> zh, nob -> no, arz -> arz."""
    lower = name.lower()
    alias = get_global("language_aliases").get(lower, lower).split("_")[0]
    if alias in _STANDARD and lower != alias and lower not in _STANDARD[alias].split():
        return lower
    return _SAME.get(alias, alias if len(alias) == 2 else lower)


def label_code(label: str) -> tuple[str, str]:
    """(language, script) of a model's label. __label__en -> (en, ""), __label__deu_Latn -> (de, Latn).

    A label of two letters, or three without a script, is lid.176's own code and stays as it is."""
    name = label.removeprefix("__label__")
    language, _, script = name.replace("-", "_").partition("_")
    if len(script) == 4 and script.isalpha():
        return language_code(language), script_code(script)
    return language, ""


def script_code(script: str) -> str:
    """Hans and Hant -> Hani, Kore -> Hang: the names that signals/scripts.py uses."""
    return ALIASES.get(script.title(), script.title())


# Language codes of lid.176 (fasttext.cc, "Language identification": its list of 176 ISO codes).

_CODES = """
af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da
de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id
ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn
mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue
sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo
wa war wuu xal xmf yi yo yue zh
"""
LID_176 = frozenset(_CODES.split())
# What other models call a language: ISO 639-3, with the script or without (GlotLID: deu_Latn).
OTHER_MODELS_LABEL = re.compile(r"[a-z]{3}(?:_[A-Z][a-z]{3})?")


def require_language_code(code: str) -> None:
    """Raises ValueError, which suggests the nearest code, for a code that no model gives: `english`, `xx`, `EN`."""
    if code in LID_176 or OTHER_MODELS_LABEL.fullmatch(code):
        return
    near = nearest_name(code.lower()[:2], sorted(LID_176))
    hint = f"did you mean {near!r}? " if near else ""
    raise ValueError(f"no language has the code {code!r}; {hint}codes are those of ISO 639, such as en, de, zh or deu")
