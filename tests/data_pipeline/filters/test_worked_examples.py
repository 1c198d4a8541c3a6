"""A text at the threshold of every rule and one a step to either side of it, counted by hand.

Each entry is a rule, then the texts just below, at and just above its number, with their values."""

import numpy as np
import pytest

from gristmill.data_pipeline.annotate.list_file import BadWords, BlockedUrls, RobotsRecord, RobotsRules
from gristmill.data_pipeline.annotate.optional_signals import zlib_ratio
from gristmill.data_pipeline.filters.lines import edit_c4, edit_refinedweb
from gristmill.data_pipeline.filters.presets import PRESETS, FilterChoice, Rule
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.kernel import measure
from gristmill.data_pipeline.signals.language import ParagraphLanguageConfig, paragraph_language_columns
from gristmill.data_pipeline.signals.signal_names import SIGNALS
from gristmill.data_pipeline.signals.stop_words import stop_word_columns
from tests.support.corpora import prose, run_curate, write_jsonl

RULES = {rule.label: rule for rules in PRESETS.values() for rule in rules}
C4 = FilterChoice(preset="c4").line_options()
REFINEDWEB = FilterChoice(preset="refinedweb_lines").line_options()
ENGLISH = "The river runs through the village and drives the old mill wheel.".ljust(70, ".")
GERMAN = "Der Fluss fließt durch das Dorf und treibt das alte Mühlrad an.".ljust(70, ".")


def words(*counted: tuple[str, int]) -> str:
    """("mill", 2), ("#", 1) -> "mill mill #"."""
    return " ".join(word for word, count in counted for _ in range(count))


def lines(*counted: tuple[str, int]) -> str:
    return "\n".join(line for line, count in counted for _ in range(count))


def different(count: int, size: int = 1) -> list[str]:
    """Lines that differ from one another: numbers, filled up to `size` characters."""
    return [str(number).rjust(size, "x") for number in range(count)]


def twice(gram: str, total: int) -> str:
    """An n-gram twice, then one word that fills the text up to so many characters."""
    return f"{gram} {gram} ".ljust(total, "x")


EXAMPLES = {
    "gopher_quality.min_words": [(words(("mill", n)), n) for n in (49, 50, 51)],
    "gopher_quality.max_words": [(words(("a", n)), n) for n in (99_999, 100_000, 100_001)],
    "gopher_quality.min_mean_word_length": [
        (words(("abc", 9), (last, 1)), mean) for last, mean in (("ab", 2.9), ("abc", 3), ("abcd", 3.1))
    ],
    "gopher_quality.max_mean_word_length": [
        (words(("abcdefghij", 9), ("k" * size, 1)), mean) for size, mean in ((9, 9.9), (10, 10), (11, 10.1))
    ],
    "gopher_quality.hash_word_ratio": [
        (words(("mill", 10 - n), ("#", n)), n / 10) for n in (0, 1, 2)
    ],
    "gopher_quality.ellipsis_word_ratio": [(words(("mill", 10 - n), ("…", n)), n / 10) for n in (0, 1, 2)],
    "gopher_quality.bullet_line_ratio": [(lines(("- a", n), ("b", 10 - n)), n / 10) for n in (8, 9, 10)],
    "gopher_quality.ellipsis_line_ratio": [(lines(("a...", n), ("b", 10 - n)), n / 10) for n in (2, 3, 4)],
    "gopher_quality.alpha_word_ratio": [(words(("mill", n), ("42", 10 - n)), n / 10) for n in (7, 8, 9)],
    "gopher_quality.min_stop_words": [("the mill", 1), ("the mill and the", 2), ("the mill and that", 3)],
    "gopher_repetition.dup_paragraph_ratio": [
        ("\n\n".join([*different(10 - n), *["0"] * n]), n / 10) for n in (2, 3, 4)
    ],
    "gopher_repetition.dup_paragraph_char_ratio": [
        ("aaaa\n\naaaa\n\n" + "b" * (total - 12), 4 / total) for total in (21, 20, 19)
    ],
    "gopher_repetition.dup_line_ratio": [("\n".join([*different(10 - n), *["0"] * n]), n / 10) for n in (2, 3, 4)],
    "gopher_repetition.dup_line_char_ratio": [
        ("aaaa\naaaa\n" + "b" * (total - 10), 4 / total) for total in (21, 20, 19)
    ],
    "gopher_repetition.top_2gram_char_ratio": [(twice("ab cd", n), 10 / n) for n in (51, 50, 49)],
    "gopher_repetition.top_3gram_char_ratio": [(twice("abc def g", n), 18 / n) for n in (101, 100, 99)],
    "gopher_repetition.top_4gram_char_ratio": [(twice("a b c de", n), 16 / n) for n in (101, 100, 99)],
    **{
        f"gopher_repetition.dup_{n}gram_char_ratio": [
            (twice(" ".join(different(n, size)), total), n * size / total) for total in (at + 1, at, at - 1)
        ]
        for n, size, at in ((5, 3, 100), (6, 7, 300), (7, 13, 700), (8, 3, 200), (9, 11, 900), (10, 2, 200))
    },
    "c4.min_sentences": [("Mill. " * n, n) for n in (4, 5, 6)],
    "c4.lorem_ipsum": [("Three words here.", 0), ("Some lorem ipsum here.", 1)],
    "c4.curly_brackets": [("Three words here.", 0), ("Three {words} here.", 1)],
    "c4.max_bad_words": [("a mill", 0), ("a darn mill", 1)],
    "badwords.max_bad_words": [("a mill", 0), ("a darn mill", 1)],
    "blocked_urls.max_blocked": [("http://mill.org", 0), ("http://www.spam.example", 1)],
    "opt_outs.max_opted_out": [("http://mill.org", 0), ("http://www.spam.example", 1)],
    "robots.max_disallowed": [("http://mill.org/a", 0), ("http://mill.org/private/a", 1)],
    "language_stop_words.min_stop_words": [("the mill", 1), ("the mill and the", 2), ("the mill and that", 3)],
    "mixed_languages.min_main_share": [
        ("\n\n".join([*[ENGLISH] * n, GERMAN]), n / (n + 1)) for n in (3, 4, 5)
    ],
    "fineweb_quality.line_punctuation_ratio": [(lines(("a.", n), ("b", 25 - n)), n / 25) for n in (2, 3, 4)],
    "fineweb_quality.short_line_ratio": [
        (lines(("s" * 30, n), ("l" * 31, 100 - n)), n / 100) for n in (66, 67, 68)
    ],
    "fineweb_quality.repeated_line_char_ratio": [
        ("a\na\n" + "b" * (total - 2), 1 / total) for total in (101, 100, 99)
    ],
    "fineweb_quality.newline_word_ratio": [
        ("a" + "\n" * n + words(("a", 9)), n / 10) for n in (2, 3, 4)
    ],
    "refinedweb_lines.removed_word_ratio": [
        (f"{words(('mill', n))}\nword", 1 / (n + 1)) for n in (20, 19, 18)
    ],
    "mt_nlg_cleanup.min_chars": [("é" * n, n) for n in (511, 512, 513)],
    # so many letters a are 11 or 12 bytes in zlib
    "mgpt_zlib.min_zlib_ratio": [("a" * n, 12 / n) for n in (81, 80, 79)],
    "mgpt_zlib.max_zlib_ratio": [("a" * n, 11 / n) for n in (12, 11, 10)],
    "addresses.max_emails": [("a mill", 0), ("a@mill.org", 1)],
    "addresses.max_ip_addresses": [("a mill", 0), ("1.2.3.4", 1)],
}  # fmt: skip


def value_of(rule: Rule, text: str) -> float:
    """The rule's signal of a text (of an address, for blocked ones)."""
    signal = rule.signal
    if signal in SIGNALS:
        return measure([text], "unicode").column(signal)[0].as_py()
    if signal.startswith("c4_"):
        return edit_c4(text, C4).counts[signal.removeprefix("c4_")]
    if signal == "refinedweb_lines_removed_word_ratio":
        before, after = len(text.split()), len(edit_refinedweb(text, REFINEDWEB).text.split())
        return (before - after) / before
    if signal == "num_bad_words":
        return BadWords(["darn"]).count(text)
    if signal == "zlib_ratio":
        return zlib_ratio(text.encode())
    if signal == "robots_disallowed":
        record = RobotsRecord("mill.org", "2025-01-31", 200, "User-agent: GPTBot\nDisallow: /private/")
        return RobotsRules([record], ["GPTBot"]).disallows(text)
    if signal in ("blocked_url", "opted_out"):
        return BlockedUrls(["spam.example"]).blocks(text)
    if signal == "num_language_stop_words":
        return stop_word_columns(TextBuffer.of([text]), ["en"])[0][0].as_py()
    return paragraph_language_columns([text], ParagraphLanguageConfig())[1][0].as_py()


def test_every_rule_has_its_examples():
    assert set(EXAMPLES) == set(RULES)


@pytest.mark.parametrize("label", EXAMPLES)
def test_texts_at_the_threshold_and_a_step_to_either_side(label):
    rule, examples = RULES[label], EXAMPLES[label]
    values = [value_of(rule, text) for text, _ in examples]
    assert values == pytest.approx([value for _, value in examples], abs=1e-12)
    at = 0 if len(examples) == 2 else 1  # nothing is below 0
    assert examples[at][1] == pytest.approx(rule.threshold)
    low, high = values[:at], values[at + 1 :]
    assert all(value < rule.threshold for value in low) and all(value > rule.threshold for value in high)
    assert rule.passes(np.array(values)).tolist() == (
        [rule.keep == "<="] * len(low) + [True] + [rule.keep == ">="] * len(high)
    )


@pytest.mark.parametrize("label", ["c4.min_sentences", "gopher_quality.min_words", "fineweb_quality.short_line_ratio"])
def test_one_number_in_the_recipe_moves_the_rule(label):
    """The text at the published number fails when the recipe asks for a step more."""
    preset, name = label.split(".")
    rule = RULES[label]
    text, value = EXAMPLES[label][1]
    stricter = value * 1.01 if rule.keep == ">=" else value * 0.99
    [moved] = [one for one in FilterChoice(preset=preset, thresholds={name: stricter}).rules() if one.name == name]
    assert moved.threshold == stricter and moved.source == rule.source
    value_1 = np.array([value_of(rule, text)])
    assert rule.passes(value_1)[0] and not moved.passes(value_1)[0]


@pytest.mark.parametrize(
    ("edit", "options", "name", "at", "beyond"),
    [
        (edit_c4, C4, "removed_long_word", f"It is {'x' * 999}.", f"It is {'x' * 1000}."),
        (edit_c4, C4, "removed_few_words", "Three words here.", "Two words."),
        (edit_c4, C4, "removed_no_terminal", "Three words here.", "Three words here"),
        (edit_refinedweb, REFINEDWEB, "removed_uppercase", "AB cd", "ABC d"),
        (edit_refinedweb, REFINEDWEB, "removed_uppercase", "ABCd efg", "ABCDE fg"),
        (edit_refinedweb, REFINEDWEB, "removed_digits", "2024 10", "202410"),
        (edit_refinedweb, REFINEDWEB, "removed_few_words", "two words", "one"),
        (edit_refinedweb, REFINEDWEB, "removed_counter", "12 mills", "12 likes"),
        (edit_refinedweb, REFINEDWEB, "removed_boilerplate", f"{'a ' * 9}Read more...", f"{'a ' * 8}Read more..."),
    ],
)  # fmt: skip
def test_lines_that_stay_and_lines_a_step_beyond(edit, options, name, at, beyond):
    assert edit(at, options).counts[name] == 0
    assert edit(beyond, options).counts[name] == 1


def test_a_document_that_loses_one_word_of_twenty_stays(tmp_path):
    texts = [f"{words(('mill', n))}\nword" for n in (19, 18)] + [prose(k) for k in range(6)]
    write_jsonl(tmp_path / "s.jsonl", [{"text": text} for text in texts])
    source = SourceConfig(name="s", format="jsonl", paths=(str(tmp_path / "s.jsonl"),))
    counts = run_curate([source], tmp_path, filters=["refinedweb_lines"], near_dedup=None)["sources"]["s"]
    assert {rule: gone["documents"] for rule, gone in counts["removed"].items()} == {
        "refinedweb_lines.removed_word_ratio": 1
    }
