"""Function words by language: counted by hand, against plain Python on any text, and lists against jusText's."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gristmill.data_pipeline.signals.bits import TextBuffer, lowered
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, WORD, character_table
from gristmill.data_pipeline.signals.reference import split_words
from gristmill.data_pipeline.signals.stop_words import stop_word_columns, stop_words

JUSTEXT_NAMES = {
    "ar": "Arabic", "bg": "Bulgarian", "ca": "Catalan", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek",
    "en": "English", "es": "Spanish", "fa": "Persian", "fi": "Finnish", "fr": "French", "he": "Hebrew", "hi": "Hindi",
    "hr": "Croatian", "hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ko": "Korean", "nl": "Dutch",
    "no": "Norwegian_Bokmal", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sk": "Slovak",
    "sv": "Swedish", "tr": "Turkish", "uk": "Ukrainian", "vi": "Vietnamese",
}  # fmt: skip


def counted(text: str, language: str) -> tuple[int | None, float | None]:
    different, ratio = stop_word_columns(TextBuffer.of([text]), [language])
    return different[0].as_py(), ratio[0].as_py()


@pytest.mark.parametrize(
    ("language", "text", "different", "ratio"),
    [
        ("en", "The mill and the river.", 2, 3 / 5),
        ("de", "Die Mühle und der Fluss", 3, 3 / 5),
        ("fr", "Le moulin, la rivière", 2, 2 / 4),
        ("hi", "नदी और चक्की", 1, 1 / 3),
        ("zh", "我的书", 2, 2 / 3),
        ("en", "THE", 1, 1.0),
        ("en", "wheel", 0, 0.0),
        ("en", "", 0, None),
        ("xx", "the and of", None, None),
        ("", "the and of", None, None),
    ],
)
def test_worked_examples(language, text, different, ratio):
    assert counted(text, language) == (different, pytest.approx(ratio) if ratio is not None else None)


PIECES = ["the", " and of", "don't", "à la", "的了", "-", "-the", "@of"]


@given(st.lists(st.tuples(st.text() | st.sampled_from(PIECES), st.sampled_from(["en", "fr", "zh", "xx"])), max_size=6))
@example([("the\u200ddog's the's of/and", "en"), ("İ la", "fr"), ("@A --the -of me@a", "en")])
@example([("a" * k + " -the --of @the well-of the - the", "en") for k in range(48, 66)])  # across blocks of 64 bytes
def test_the_kernel_equals_plain_python(pairs):
    texts, languages = [text for text, _ in pairs], [language for _, language in pairs]
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    found = [column.to_pylist() for column in stop_word_columns(TextBuffer.of(texts), languages)]
    assert [list(row) for row in zip(*found, strict=True)] == [
        list(by_hand(text, language)) for text, language in zip(texts, languages, strict=True)
    ]


def by_hand(text: str, language: str) -> tuple[int | None, float | None]:
    if language not in stop_words():
        return None, None
    wanted, flags = stop_words()[language], character_table()
    found = split_words(text.lower(), "unicode")
    words = [word for word in found if any(flags[ord(character)] & (WORD | IDEOGRAPH) for character in word)]  # as -0
    among = [word for word in words if word in wanted]
    return len(set(among)), len(among) / len(words) if words else None


def test_the_lists_are_what_they_say():
    justext = pytest.importorskip("justext", reason="jusText comes with trafilatura")
    for language, words in stop_words().items():
        assert 15 <= len(words) == len(set(words)) <= 64, language
        assert all(word == word.lower() and split_words(word, "unicode") == [word] for word in words), language
        if language in JUSTEXT_NAMES:
            known = {word.lower() for word in justext.get_stoplist(JUSTEXT_NAMES[language])}
            assert set(words) <= known, language
    assert set(stop_words()) - set(JUSTEXT_NAMES) == {"ja", "zh"}


# Lower case against str.lower.

text = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("ABCXYZ@[`{ÀİΣςßȺᏰⰀꙀ𐐀ǅ"))


@given(st.lists(st.tuples(text, st.booleans()), max_size=5))
@example([("ΟΔΥΣΣΕΥΣ. " * 9, True), ("A" * 63 + "É", True), ("B" * 64 + "ÀA" * 60, True), ("C" * 130, False)])
@example([("Ⱥ" * 200, True)])
def test_every_text_is_that_of_python(pairs):
    wanted = [one.lower() if want else "" for one, want in pairs]
    found = lowered(TextBuffer.of([one for one, _ in pairs]), np.array([want for _, want in pairs], bool))
    assert found.texts() == wanted


def test_every_code_point_is_that_of_python():
    codes = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    texts = ["".join(codes[start : start + 999]) for start in range(0, len(codes), 999)]
    assert lowered(TextBuffer.of(texts), np.ones(len(texts), bool)).texts() == [text.lower() for text in texts]
