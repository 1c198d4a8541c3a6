"""Every rule of every preset at its threshold and a step to either side, and choices as recipes write them."""

import math

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from gristmill.data_pipeline.annotate.optional_signals import OPTIONAL_SIGNALS
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.filters.apply import failures
from gristmill.data_pipeline.filters.lines import EDIT_COUNTS
from gristmill.data_pipeline.filters.presets import LINE_OPTIONS, PRESETS, PROFILE_RULES, FilterChoice
from gristmill.data_pipeline.filters.profiles import rules_of
from gristmill.data_pipeline.signals.language import LanguageConfig
from gristmill.data_pipeline.signals.signal_names import SIGNALS

RULES = [rule for rules in PRESETS.values() for rule in rules]
# The published numbers, written down a second time: (rule, threshold, which side is kept).
PUBLISHED = """
gopher_quality.min_words 50 >= | gopher_quality.max_words 100000 <= | gopher_quality.min_mean_word_length 3 >=
gopher_quality.max_mean_word_length 10 <= | gopher_quality.hash_word_ratio 0.1 <=
gopher_quality.ellipsis_word_ratio 0.1 <= | gopher_quality.bullet_line_ratio 0.9 <=
gopher_quality.ellipsis_line_ratio 0.3 <= | gopher_quality.alpha_word_ratio 0.8 >= | gopher_quality.min_stop_words 2 >=
gopher_repetition.dup_line_ratio 0.3 <= | gopher_repetition.dup_paragraph_ratio 0.3 <=
gopher_repetition.dup_line_char_ratio 0.2 <= | gopher_repetition.dup_paragraph_char_ratio 0.2 <=
gopher_repetition.top_2gram_char_ratio 0.2 <= | gopher_repetition.top_3gram_char_ratio 0.18 <=
gopher_repetition.top_4gram_char_ratio 0.16 <= | gopher_repetition.dup_5gram_char_ratio 0.15 <=
gopher_repetition.dup_6gram_char_ratio 0.14 <= | gopher_repetition.dup_7gram_char_ratio 0.13 <=
gopher_repetition.dup_8gram_char_ratio 0.12 <= | gopher_repetition.dup_9gram_char_ratio 0.11 <=
gopher_repetition.dup_10gram_char_ratio 0.1 <= | c4.min_sentences 5 >= | c4.lorem_ipsum 0 <= | c4.curly_brackets 0 <=
c4.max_bad_words 0 <= | badwords.max_bad_words 0 <= | blocked_urls.max_blocked 0 <=
opt_outs.max_opted_out 0 <= | robots.max_disallowed 0 <=
language_stop_words.min_stop_words 2 >= | mixed_languages.min_main_share 0.8 >=
fineweb_quality.line_punctuation_ratio 0.12 >= | fineweb_quality.short_line_ratio 0.67 <=
fineweb_quality.repeated_line_char_ratio 0.01 <= | fineweb_quality.newline_word_ratio 0.3 <=
refinedweb_lines.removed_word_ratio 0.05 <= | addresses.max_emails 0 <= | addresses.max_ip_addresses 0 <=
 mt_nlg_cleanup.min_chars 512 >= | mgpt_zlib.min_zlib_ratio 0.15 >= | mgpt_zlib.max_zlib_ratio 1 <=
"""
# Likewise the English thresholds of the rules of profiles (docs/languages.md), and the options of C4 (Raffel et al.
# 2020, section 2.2; datatrove's c4_filters.py for the 1,000 characters of a word) and of RefinedWeb (appendix G.2).
OF_PROFILES = """
gopher_quality.min_language_stop_words 2 >= | gopher_quality.min_stop_word_ratio 0.06 >=
gopher_quality.repeated_10gram_ratio 0.5 <= | gopher_quality.newline_word_ratio 0.3 <=
gopher_quality.short_line_ratio 0.8 <= | gopher_quality.max_sentence_words 100 <= | gopher_quality.min_word_order 3 >=
"""
OF_LINES = """
c4.line_max_word_length 1000 | c4.line_citations 1 | c4.line_terminal_punctuation 1 | c4.line_min_words 3
c4.line_javascript 1 | c4.line_policy 1 | refinedweb_lines.line_uppercase_ratio 0.5
refinedweb_lines.line_digit_ratio 0.999999 | refinedweb_lines.line_counters 1 | refinedweb_lines.line_min_words 2
refinedweb_lines.line_boilerplate_words 10
"""


def entries_of(table: str) -> list[list[str]]:
    return [entry.split() for line in table.strip().splitlines() for entry in line.split(" | ")]


@pytest.mark.parametrize(
    ("rules", "table"), [(RULES, PUBLISHED), ([rule for each in PROFILE_RULES.values() for rule in each], OF_PROFILES)]
)
def test_the_thresholds_are_the_published_ones(rules, table):
    published = {name: (float(threshold), keep) for name, threshold, keep in entries_of(table)}
    assert {rule.label: (float(rule.threshold), rule.keep) for rule in rules} == published


def test_the_options_of_lines_are_the_published_ones():
    options = {f"{preset}.{name}": value for preset, values in LINE_OPTIONS.items() for name, value in values.items()}
    assert options == {name: float(value) for name, value in entries_of(OF_LINES)}


@pytest.mark.parametrize(("thresholds", "signal"), [({}, "plain_"), ({"count_punctuation": 1}, "")])
def test_punctuation_counts_as_words_where_the_recipe_says_so(thresholds, signal):
    rules = {rule.name: rule.signal for rule in FilterChoice(preset="gopher_quality", thresholds=thresholds).rules()}
    assert rules.pop("alpha_word_ratio") == f"alpha_{signal}word_ratio"
    default = {rule.name: rule.signal for rule in PRESETS["gopher_quality"]}
    assert rules == {name: default[name] for name in rules}


def test_a_threshold_of_the_recipe_applies_to_every_language():
    rules = {rule.name: rule for rule in PROFILE_RULES["gopher_quality"]}
    default = FilterChoice(preset="gopher_quality")
    assert not any(default.is_fixed(rule) for rule in rules.values())
    choice = FilterChoice(preset="gopher_quality", thresholds={"min_stop_words": 1, "min_word_order": 2})
    fixed = {name for name, rule in rules.items() if choice.is_fixed(rule)}
    assert fixed == {"min_language_stop_words", "min_word_order"}
    assert {rule.name: rule.threshold for rule in choice.profile_rules() if rule.name in fixed} == {
        "min_language_stop_words": 1,
        "min_word_order": 2,
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.label)
def test_a_rule_at_its_threshold_and_a_step_to_either_side(rule):
    below, at, above = (
        math.nextafter(rule.threshold, -math.inf),
        rule.threshold,
        math.nextafter(rule.threshold, math.inf),
    )
    expected = [False, True, True] if rule.keep == ">=" else [True, True, False]
    assert rule.passes(np.array([below, at, above])).tolist() == expected
    assert rule.passes(np.array([math.nan])).tolist() == [True]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.label)
def test_every_rule_names_its_source_and_a_signal_that_is_measured(rule):
    of_edits = {f"{edit}_{name}" for edit, names in EDIT_COUNTS.items() for name in (*names, "removed_word_ratio")}
    assert rule.source and rule.signal in {*SIGNALS, *of_edits, *OPTIONAL_SIGNALS}


def test_every_failed_rule_is_found_not_only_the_first():
    rules = rules_of([FilterChoice(preset="fineweb_quality")], [], LanguageConfig())
    table = pa.table(
        {
            "num_chars": [10, 0],
            "line_punctuation_ratio": [0.1, 0.5],
            "short_line_ratio": [0.5, 0.5],
            "repeated_line_char_ratio": [0.0, 0.0],
            "newline_word_ratio": [0.31, 0.3],
        }
    )
    failed = failures(table, rules)
    labels = [rule.label for rule in rules.rules]
    assert [labels[i] for i in np.flatnonzero(failed[:, 0])] == [
        "fineweb_quality.line_punctuation_ratio",
        "fineweb_quality.newline_word_ratio",
    ]
    assert [labels[i] for i in np.flatnonzero(failed[:, 1])] == ["text.min_chars"]


def test_a_wanted_language_needs_its_score():
    rules = rules_of([], ["en", "de"], LanguageConfig(threshold=0.65))
    table = pa.table(
        {
            "num_chars": [1] * 4,
            "detected_language": ["en", "en", "de", "fr"],
            "language_score": [0.65, 0.64, 0.9, 0.99],
        }
    )
    assert failures(table, rules)[1].tolist() == [False, True, False, True]


def test_filters_before_an_edit_look_at_the_text_before_it():
    choices = CurateConfig(filters=["gopher_quality", "c4", {"fineweb_quality": {"short_line_ratio": 0.7}}]).filters
    signals = {rule.label: rule.signal for rule in rules_of(choices, [], LanguageConfig()).rules}
    assert signals["gopher_quality.min_words"] == "before_c4_num_plain_words"
    assert signals["c4.min_sentences"] == "num_sentences" and signals["c4.lorem_ipsum"] == "c4_lorem_ipsum"
    assert signals["fineweb_quality.short_line_ratio"] == "short_line_ratio"


def test_choices_as_recipes_write_them():
    config = CurateConfig(filters=["c4", {"gopher_quality": {"min_words": 20, "min_stop_words": None}}])
    assert CurateConfig(**config.model_dump(mode="json")) == config
    names = [rule.name for rule in config.filters[1].rules()]
    assert "min_stop_words" not in names and config.filters[1].rules()[0].threshold == 20
    with pytest.raises(ValidationError, match="did you mean 'gopher_quality'"):
        CurateConfig(filters=["gopher_qualty"])
    with pytest.raises(ValidationError, match="did you mean 'short_line_ratio'"):
        CurateConfig(filters=[{"fineweb_quality": {"short_lines_ratio": 0.5}}])
    with pytest.raises(ValidationError, match="'c4' is named twice"):
        CurateConfig(filters=["c4", "c4"])
