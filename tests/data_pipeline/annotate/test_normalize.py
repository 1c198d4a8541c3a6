import io
import random
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import ftfy
import orjson
import pytest
import zstandard
from ftfy.badness import is_bad
from hypothesis import example, given
from hypothesis import strategies as st

from gristmill.data_pipeline.annotate.normalize import REPAIRS, NormalizeConfig, normalize_texts, scan_texts
from gristmill.data_pipeline.annotate.scan_tables import BAD, UNCOMPOSED
from gristmill.data_pipeline.signals.bits import TextBuffer

# What the short ways could miss: line ends, controls, marks that compose or must be sorted, Hangul's parts, white space
# of every kind, characters of every alternative of ftfy's expression.
PIECES = (
    "a", "Z", " ", "  ", "\n", "\n\n\n\n", "\r", "\r\n", "\x85", "\u2028", "\t", "\x0b", "\x0c", "\x1c", "\xa0",
    "\u3000", "\x00", "\x1f", "\x80", "\x9d", "\ufeff", "\ufffe", "e\u0301", "\u0301", "\u0323", "\u0344", "\u093c",
    "\u212b", "\u1161", "\u11a8", "가", "Ã", "Â", "Ø", "Ù·", "œ", "â€™", "“", "”", "€", "×", "²", "É°", "®", "В", "Г",
    "ВЂ", "ГўВЂВ", "β€™", "ā€", "√±", "‚Äì", "à²", "中", "ñ", "█", "…", "\U0001f600", "0123456789" * 8,
)  # fmt: skip
ENCODING_ONLY = ftfy.TextFixerConfig(
    unescape_html=False,
    remove_terminal_escapes=False,
    fix_latin_ligatures=False,
    fix_character_width=False,
    uncurl_quotes=False,
    fix_line_breaks=False,
    fix_surrogates=True,
    remove_control_chars=False,
    normalization=None,
    explain=False,
)


def plainly(text: str, ftfy_config: ftfy.TextFixerConfig = ENCODING_ONLY) -> tuple[str, tuple[str, ...]]:
    """The same by Python's regular expressions, ftfy and unicodedata, every step on the whole text."""
    blank_tails = re.compile(r"(?<![^\S\n])[^\S\n]++$", re.MULTILINE)
    steps: dict[str, Callable[[str], str]] = {
        "line_ends": lambda t: re.sub("\r\n|[\r\x85\u2028\u2029]", "\n", t),
        "ftfy": lambda t: fixed_lines(t) if ftfy_config is ENCODING_ONLY else ftfy.fix_text(t, ftfy_config),
        "control_characters": lambda t: re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe]", "", t),
        "nfc": lambda t: unicodedata.normalize("NFC", t),
        "whitespace": lambda t: re.sub(r"\n{4,}", "\n\n\n", blank_tails.sub("", t)).strip("\n"),
    }
    changes = []
    for name, step in steps.items():
        repaired = step(text)
        if repaired != text:
            changes.append(name)
        text = repaired
    return text, tuple(changes)


def suspect(text: str) -> bool:
    return not text.isascii() and bool(is_bad(text) or re.search("[\x80-\x9f]", text))


def fixed_lines(text: str) -> str:
    if not suspect(text):
        return text
    return "\n".join(ftfy.fix_text(line, ENCODING_ONLY) if suspect(line) else line for line in text.split("\n"))


def repaired(texts: list[str], **settings) -> list[tuple[str, tuple[str, ...]]]:
    found, changes = normalize_texts(TextBuffer.of(texts), NormalizeConfig(**settings))
    names = [tuple(name for place, name in enumerate(REPAIRS) if bits >> place & 1) for bits in changes.tolist()]
    return list(zip(found.texts(), names, strict=True))


def fixed(text: str, **settings) -> tuple[str, tuple[str, ...]]:
    return repaired([text], **settings)[0]


def test_mojibake_is_undone_and_what_authors_meant_is_left():
    assert fixed("IÃ¢â‚¬â„¢m here") == ("I’m here", ("ftfy",))
    assert fixed("“quoted” &amp; ﬁne") == ("“quoted” &amp; ﬁne", ())
    assert fixed("“quoted” &amp; ﬁne", ftfy="full")[0] == '"quoted" & fine'
    assert fixed("IÃ¢â‚¬â„¢m", ftfy="off") == ("IÃ¢â‚¬â„¢m", ())


def test_composition_controls_line_ends_and_white_space():
    assert fixed("e\u0301") == ("é", ("nfc",))
    assert fixed("a\x00b\ufeffc\td") == ("abc\td", ("control_characters",))
    assert fixed("a\r\nb\rc\u2028d") == ("a\nb\nc\nd", ("line_ends",))
    assert fixed("\n\na  \n\n\n\n\nb\t\n") == ("a\n\n\nb", ("whitespace",))
    assert fixed("  indented\n", whitespace="keep") == ("  indented\n", ())


def test_every_change_is_named_in_its_order():
    assert fixed("e\u0301 \r\n\x01")[1] == ("line_ends", "control_characters", "nfc", "whitespace")


def test_what_a_repair_brings_together_is_composed():
    assert fixed("e\x01\u0301") == ("é", ("control_characters", "nfc"))


def test_steps_can_be_switched_off_one_by_one():
    text = "e\u0301 \r\n\x01"
    assert fixed(text, nfc=False, control_characters=False) == ("e\u0301\n\x01", ("line_ends", "whitespace"))
    assert fixed(text, line_ends=False, whitespace="keep") == ("é \n", ("control_characters", "nfc"))
    assert fixed("", ftfy="full") == ("", ())


@example(["\nÂ "])  # ftfy looks at each line by itself
@given(st.lists(st.text(st.sampled_from("aé\x80\x93Ãâ€™©Â\n ñ“”ï»¿œ\xa0中"), max_size=40), max_size=3))
def test_the_short_way_past_ftfy_leaves_nothing_out(texts):
    found = repaired(texts, nfc=False, control_characters=False, line_ends=False, whitespace="keep")
    # line by line without the line ends: ftfy takes the line end of "€™¿\\n" for the last byte of a character
    expected = ["\n".join(ftfy.fix_text(line, ENCODING_ONLY) for line in text.split("\n")) for text in texts]
    assert [text for text, _ in found] == expected


@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), max_size=4))
def test_texts_and_changes_are_those_of_the_plain_steps(texts):
    assert repaired(texts) == [plainly(text) for text in texts]


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.characters(codec="utf-8")), max_size=12).map("".join))
def test_the_scan_says_what_ftfy_and_unicode_say(text):
    (flags,) = scan_texts(TextBuffer.of([text])).tolist()
    assert bool(flags & BAD) == suspect(text)
    assert flags & UNCOMPOSED or unicodedata.is_normalized("NFC", text)


def test_the_automaton_knows_every_character_of_the_expression():
    """Every character before, between and behind those that the expression has in its alternatives."""
    every = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    for frame in (
        "{}",
        "a{}",
        "É{}",
        "{}¢",
        "Ã{}",
        "{}°",
        "œ{}",
        "é“{}",
        "à{}",
        "√{}",
        "Ø·Ø{}",
        "В{}В",
        "β€{}",
        "z {} ",
    ):
        texts = [frame.format(character) for character in every]
        bad = (scan_texts(TextBuffer.of(texts)) & BAD) > 0
        assert bad.tolist() == [suspect(text) for text in texts], frame


def shared_texts(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        for line in io.BytesIO(zstandard.ZstdDecompressor().stream_reader(file).read()):
            yield orjson.loads(line)[field]


def varied(text: str, rng: random.Random) -> Iterator[str]:
    """The text, it read in a wrong encoding, and it with pieces put into its beginning."""
    yield text
    yield text[:1000].encode().decode(rng.choice(["cp1252", "latin-1", "cp1251", "mac-roman", "cp1253"]), "ignore")
    start = list(text[:500])
    for _ in range(rng.randint(1, 10)):
        start.insert(rng.randint(0, len(start)), rng.choice(PIECES))
    yield "".join(start)


def agree(texts: list[str]) -> None:
    found = repaired(texts)
    for text, ours in zip(texts, found, strict=True):
        assert ours == plainly(text), repr(text[:200])


def test_declarations_in_five_hundred_languages_are_repaired_as_by_the_plain_steps(shared_data):
    rng = random.Random(0)
    texts = list(shared_texts(shared_data("corpora/udhr.jsonl.zst"), "text"))[::12]
    agree([one for text in texts for one in varied(text[:3000], rng)])


@pytest.mark.slow  # ftfy's regular expression reads 5 MB a second
@pytest.mark.parametrize(
    "name", ["udhr text", "tldr text", "books_xhtml html", "kubernetes_community text", "rust_book text"]
)
def test_all_shared_texts_are_repaired_as_by_the_plain_steps(name, shared_data):
    rng = random.Random(1)
    file, field = name.split()
    agree([one for text in shared_texts(shared_data(f"corpora/{file}.jsonl.zst"), field) for one in varied(text, rng)])
