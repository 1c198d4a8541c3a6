"""The codes of languages that a recipe may name."""

import pytest

from gristmill.data_pipeline.signals.language import LID_176, LanguageConfig, detect, require_language_code

HELLO = [
    "Guten Morgen, wie geht es dir?",
    "Bonjour, comment allez-vous ?",
    "Доброе утро, как дела?",
    "おはようございます",
]


def test_176_languages_hold_what_the_model_says():
    assert len(LID_176) == 176
    found = detect(HELLO, LanguageConfig()).column("detected_language").to_pylist()
    assert found == ["de", "fr", "ru", "ja"]
    assert set(found) <= LID_176


@pytest.mark.parametrize("code", ["english", "xx", "EN", "en-US", "", "eng_latn"])
def test_no_code_of_a_language(code):
    with pytest.raises(ValueError, match="no language has the code"):
        require_language_code(code)


@pytest.mark.parametrize("code", ["en", "yue", "deu", "deu_Latn"])
def test_codes_of_languages(code):
    require_language_code(code)
