"""The tables of all code points agree with Python's str and unicodedata, code point by code point."""

import unicodedata

import numpy as np
import pytest

from gristmill.data_pipeline.dedup.folding import SEPARATOR, VANISHES, folding_table
from gristmill.data_pipeline.signals.characters import (
    ALPHA,
    DIGIT,
    LINE_END,
    NUM_CODE_POINTS,
    SPACE,
    UPPER,
    WORD,
    category_letters,
    character_table,
)

ALL = [chr(code) for code in range(NUM_CODE_POINTS)]


def test_categories_are_those_of_unicodedata():
    assert category_letters().tobytes().decode() == "".join(map(unicodedata.category, ALL))


@pytest.mark.parametrize(
    ("flag", "holds"),
    [
        (SPACE, str.isspace),
        (ALPHA, str.isalpha),
        (DIGIT, str.isdigit),
        (UPPER, str.isupper),
        (LINE_END, lambda character: len(f"a{character}a".splitlines()) == 2),
    ],
)
def test_flags_are_those_of_str(flag, holds):
    expected = np.array([holds(character) for character in ALL])
    assert np.flatnonzero((character_table() & flag > 0) != expected).tolist() == []


def test_word_characters_are_letters_digits_and_marks():
    flags = character_table()
    assert all(flags[ord(character)] & WORD for character in "aé9_\u0301\u200d٣ß")
    assert not any(flags[ord(character)] & WORD for character in " -.€\u4e2d\u200b")


def test_folded_characters_are_lower_case_letters_marks_and_digits():
    def folded(character):
        category = unicodedata.category(character)
        if category == "Cf":
            return SEPARATOR if character == "\u200b" else VANISHES
        return ord(character.lower()[0]) if category[0] in "LMN" or character == "_" else SEPARATOR

    expected = np.array([folded(character) for character in ALL], dtype=np.uint32)
    assert np.flatnonzero(folding_table("character") != expected).tolist() == []


def test_white_space_alone_separates_in_the_fold_of_spaces():
    table = folding_table("space")
    changed = np.flatnonzero(table != np.arange(NUM_CODE_POINTS))
    assert changed.tolist() == [code for code in range(1, NUM_CODE_POINTS) if chr(code).isspace()]
