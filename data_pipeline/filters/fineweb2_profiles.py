"""Conversion of FineWeb-2's `configs/*.yml` to profiles, by the use of each value in fineweb-2-pipeline.py, step 5.

It runs datatrove's Gopher repetition filter without the rules on paragraphs and on the characters of repeated lines,
its FineWeb filter without the rule on short lines and with 0.1 for repeated lines, and its Gopher quality filter with
the language's word lengths, alphabetic share and stop words. The other thresholds of the three filters are the
published ones."""

import math
from collections.abc import Mapping
from typing import Any

from gristmill.data_pipeline.signals.language_codes import language_code, script_code

_NUMBERS = (
    "dup_line_frac",
    "language_score",
    "line_punct_thr",
    "max_avg_word_length",
    "max_non_alpha_words_ratio",
    "min_avg_word_length",
    "new_line_ratio",
)
_FIELDS = (*_NUMBERS, "stopwords", "dup_n_grams", "top_n_grams")
_TOP, _DUP = (2, 3, 4), (5, 6, 7, 8, 9, 10)
CHAR_DUPLICATES = 0.1  # fineweb-2-pipeline.py


def is_fineweb2(fields: Mapping[str, Any]) -> bool:
    return len(set(fields) & set(_FIELDS)) >= 3


def fineweb2_fields(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Profile. name: of the file, ISO639-3_Script. Raises ValueError for a missing field."""
    language, underscore, script = name.partition("_")
    if not underscore:
        raise ValueError("FineWeb-2 names its files LANGUAGE_Script.yml, as deu_Latn.yml; rename it")
    for field in _FIELDS:
        if field not in fields:
            raise ValueError(f"no field {field!r}, which every file of FineWeb-2's configs has; copy the file again")
    numbers = {field: _number(field, fields[field]) for field in _NUMBERS}
    off = dict.fromkeys(("dup_paragraph_ratio", "dup_paragraph_char_ratio", "dup_line_char_ratio"))
    words = fields["stopwords"]
    if not isinstance(words, list):
        raise ValueError("stopwords is not a list of words; copy the file again")
    return {
        "language": language_code(language),
        "script": script_code(script),
        "source": f"FineWeb-2 configs/{name}.yml",
        "stop_words": [str(word) for word in words],
        "stop_words_lowered": False,
        "thresholds": {
            "language": {"min_score": numbers["language_score"]},
            "gopher_repetition": {
                **off,
                "dup_line_ratio": numbers["dup_line_frac"] or None,  # datatrove: 0 switches a rule off
                **_ngrams("top_n_grams", fields["top_n_grams"], _TOP, "top"),
                **_ngrams("dup_n_grams", fields["dup_n_grams"], _DUP, "dup"),
            },
            "fineweb_quality": {
                "short_line_ratio": None,  # 999 there: no ratio reaches it
                "repeated_line_char_ratio": CHAR_DUPLICATES,
                "line_punctuation_ratio": numbers["line_punct_thr"],
                "newline_word_ratio": numbers["new_line_ratio"],
            },
            "gopher_quality": {
                "min_mean_word_length": numbers["min_avg_word_length"] or None,
                "max_mean_word_length": numbers["max_avg_word_length"] or None,
                "alpha_word_ratio": numbers["max_non_alpha_words_ratio"] or None,
                "min_stop_words": None,  # Gopher's, which are English
                "min_language_stop_words": 2,
                **dict.fromkeys(_OWN_RULES),
            },
        },
    }


# Ours alone: FineWeb-2 has no such rule in its Gopher quality filter.
_OWN_RULES = (
    "min_stop_word_ratio",
    "repeated_10gram_ratio",
    "newline_word_ratio",
    "short_line_ratio",
    "max_sentence_words",
    "min_word_order",
)


def _ngrams(field: str, pairs: Any, sizes: tuple[int, ...], kind: str) -> dict[str, float | None]:
    """[[2, 0.169], ...] as thresholds; a size that is not named is not asked."""
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ValueError(f"{field} is no list of [n, ratio]; copy the file again")
    found: dict[str, float | None] = {f"{kind}_{size}gram_char_ratio": None for size in sizes}
    for size, ratio in pairs:
        if size not in sizes:
            raise ValueError(
                f"{field} names {size}-grams, and only {sizes[0]} to {sizes[-1]} are measured; leave it out"
            )
        found[f"{kind}_{size}gram_char_ratio"] = _number(field, ratio)
    return found


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{field} is {value!r}, and should be a number; copy the file again")
    return float(value)
