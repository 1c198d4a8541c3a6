import pyarrow as pa
import pytest

from gristmill.data_pipeline.signals.paragraph_languages import (
    PARAGRAPH_LANGUAGE_FIELDS,
    ParagraphLanguageConfig,
    paragraph_language_columns,
    split_paragraphs,
)

ENGLISH = "The river runs through the village and drives the old mill wheel."
GERMAN = "Der Fluss fließt durch das Dorf und treibt das alte Mühlrad an."
FRENCH = "La rivière traverse le village et fait tourner la vieille roue."


def identified(text: str, **settings) -> dict:
    columns = paragraph_language_columns([text], ParagraphLanguageConfig(**settings))
    return pa.table(columns, schema=pa.schema(PARAGRAPH_LANGUAGE_FIELDS)).to_pylist()[0]


def test_paragraphs_end_at_blank_lines_or_are_lines_where_there_is_none():
    assert split_paragraphs("a\nb\n \n\nc\n") == ["a\nb", "c"]
    assert split_paragraphs("a\nb\n\t\n") == ["a", "b"]
    assert split_paragraphs(" \n\n ") == []


def test_shares_are_of_characters():
    found = identified("\n\n".join([ENGLISH, GERMAN, ENGLISH, FRENCH]))
    chars = 2 * len(ENGLISH) + len(GERMAN) + len(FRENCH)
    assert (found["main_language"], found["num_languages"], found["identified_char_ratio"]) == ("en", 3, 1.0)
    assert found["main_language_share"] == pytest.approx(2 * len(ENGLISH) / chars)


def test_what_is_too_short_is_not_identified():
    found = identified(f"Home\nKontakt\n{GERMAN}")
    assert (found["main_language"], found["main_language_share"]) == ("de", 1.0)
    assert found["identified_char_ratio"] == pytest.approx(len(GERMAN) / (len(GERMAN) + len("HomeKontakt")))
    nothing = {"main_language": None, "main_language_share": None, "num_languages": 0}
    assert identified("Home") == {**nothing, "identified_char_ratio": 0.0}
    assert identified("") == {**nothing, "identified_char_ratio": None}
    assert identified("1 2 3 4 5 6 7 8 9 " * 5) == {**nothing, "identified_char_ratio": 0.0}  # no language scores 0.5


def test_only_the_first_paragraphs_are_looked_at():
    text = "\n\n".join([ENGLISH, *[GERMAN] * 5])
    assert identified(text, paragraphs=1)["main_language"] == "en" and identified(text)["main_language"] == "de"


def test_a_tie_goes_to_the_first_in_the_alphabet():
    same = GERMAN.ljust(70, "."), FRENCH.ljust(70, ".")
    assert [identified("\n\n".join(pair))["main_language"] for pair in (same, same[::-1])] == ["de", "de"]
