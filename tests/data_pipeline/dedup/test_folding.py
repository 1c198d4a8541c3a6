"""Folding against its rules, spelled out a second time in plain Python."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.dedup.folding import STANDS_ALONE, Fold, fold_text, fold_texts

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\t.,-'aZ9_é中か\u00ad\u200b\u200d"))


def plainly_folded(text: str, fold: Fold) -> str:
    words = ""
    for character in text:
        category = unicodedata.category(character)
        if category == "Cf" and character != "\u200b":
            continue
        lower = character.lower()[0]
        if category[0] not in "LMN" and character != "_":
            words += " "
        elif fold == "word" and any(first <= ord(character) <= last for first, last in STANDS_ALONE):
            words += f" {lower} "
        else:
            words += lower
    return " ".join(words.split())


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("Don't  PANIC!", "don t panic"),
        ("snake_case x2", "snake_case x2"),
        ("co\u00adoperate zero\u200bwidth", "cooperate zero width"),
        ("“Quoted”—dash", "quoted dash"),
        ("Ÿ Ⱥ İ ǅ", "ÿ ⱥ i ǆ"),
        ("我们是 Rust用户", "我 们 是 rust 用 户"),
        ("हिन्दी में", "हिन्दी में"),  # vowel signs belong to their word
        ("한국어 문서", "한국어 문서"),  # written with spaces
        ("", ""),
        (" \n\t", ""),
    ],
)
def test_worked_examples(text: str, folded: str):
    assert fold_text(text) == folded


@given(TEXTS, st.sampled_from(["word", "character"]))
def test_agrees_with_the_rules_in_python(text: str, fold: Fold):
    assert fold_text(text, fold) == plainly_folded(text, fold)


@given(TEXTS)
def test_folding_again_changes_nothing(text: str):
    assert fold_text(fold_text(text)) == fold_text(text)


@given(st.lists(TEXTS, max_size=5))
def test_texts_in_one_buffer_do_not_touch(texts: list[str]):
    raw = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, raw)]).astype(np.int64)
    folded, ends = fold_texts(np.frombuffer(b"".join(raw) or b" ", np.uint8), offsets)
    pieces = [bytes(folded[ends[i] : ends[i + 1]]).decode() for i in range(len(texts))]
    assert pieces == [fold_text(text) + " " if fold_text(text) else "" for text in texts]


def test_every_character_fits_the_space_set_aside():
    for block in ("Ⱥ" * 1000, "中" * 1000, "ｱ" * 1000, "𠀀" * 1000, "a " * 1000):
        assert fold_text(block) == plainly_folded(block, "word")


@given(TEXTS)
def test_space_folding_is_split_and_join(text: str):
    assert fold_text(text, "space") == " ".join(text.replace("\0", " ").split())
