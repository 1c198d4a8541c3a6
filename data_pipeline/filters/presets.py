"""The published filters as tables of thresholds, each with its source. Names of signals: signals/signal_names.py.

Two of them also edit texts (filters/lines.py); their line options are here too. Filters before them in a recipe apply
to the text before the edit, filters after them to the edited text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from gristmill.data_pipeline.filters.pii import PiiConfig, pii_signal
from gristmill.foundation.config import Config
from gristmill.foundation.errors import did_you_mean
from gristmill.foundation.user_code import UserCode, is_reference

# One rule of a filter: a signal, a comparison, a threshold and the source of the threshold.


@dataclass(frozen=True)
class Rule:
    """A document passes if `signal` is at least (">=") or at most ("<=") the threshold; ">" and "<" exclude it.

    filter: the preset the rule belongs to. name: of the threshold in a recipe. source: of its number."""

    filter: str
    name: str
    signal: str
    keep: Literal[">=", "<=", ">", "<"]
    threshold: float
    source: str

    @property
    def label(self) -> str:
        """gopher_quality.min_words: the rule's name in the ledger and the report."""
        return f"{self.filter}.{self.name}"

    def at(self, threshold: float) -> "Rule":
        return replace(self, threshold=threshold)

    def passes(self, values_N: np.ndarray, thresholds_N: np.ndarray | None = None) -> np.ndarray:
        """bool[N]. A missing value (NaN) passes.

        thresholds_N: by document, from its language profile; NaN (the rule is off there) passes too."""
        compare = {">=": np.less, "<=": np.greater, ">": np.less_equal, "<": np.greater_equal}[self.keep]
        return ~compare(values_N.astype(np.float64), self.threshold if thresholds_N is None else thresholds_N)


GOPHER = "Gopher (Rae et al. 2021, arXiv 2112.11446), appendix A.1.1"
GOPHER_REPETITION = "Gopher (Rae et al. 2021, arXiv 2112.11446), table A1"
C4 = "C4 (Raffel et al. 2020, arXiv 1910.10683), section 2.2"
FINEWEB = "FineWeb (Penedo et al. 2024, arXiv 2406.17557), section 3.6; datatrove filters/fineweb_quality_filter.py"
REFINEDWEB = "RefinedWeb (Penedo et al. 2023, arXiv 2306.01116), appendix G.2; DCLM dclm_baseline_refinedweb.yaml"
MT_NLG = "MT-NLG 530B; Megatron-LM tools/openwebtext/cleanup_fix_dataset.py"

GOPHER_QUALITY_RULES = (
    Rule("gopher_quality", "min_words", "num_plain_words", ">=", 50, GOPHER),
    Rule("gopher_quality", "max_words", "num_plain_words", "<=", 100_000, GOPHER),
    Rule("gopher_quality", "min_mean_word_length", "mean_word_length", ">=", 3, GOPHER),
    Rule("gopher_quality", "max_mean_word_length", "mean_word_length", "<=", 10, GOPHER),
    Rule("gopher_quality", "hash_word_ratio", "hash_word_ratio", "<=", 0.1, GOPHER),
    Rule("gopher_quality", "ellipsis_word_ratio", "ellipsis_word_ratio", "<=", 0.1, GOPHER),
    Rule("gopher_quality", "bullet_line_ratio", "bullet_line_ratio", "<=", 0.9, GOPHER),
    Rule("gopher_quality", "ellipsis_line_ratio", "ellipsis_line_ratio", "<=", 0.3, GOPHER),
    Rule("gopher_quality", "alpha_word_ratio", "alpha_plain_word_ratio", ">=", 0.8, GOPHER),
    Rule("gopher_quality", "min_stop_words", "num_stop_words", ">=", 2, GOPHER),
)

GOPHER_REPETITION_RULES = (
    Rule("gopher_repetition", "dup_paragraph_ratio", "dup_paragraph_ratio", "<=", 0.30, GOPHER_REPETITION),
    Rule("gopher_repetition", "dup_paragraph_char_ratio", "dup_paragraph_char_ratio", "<=", 0.20, GOPHER_REPETITION),
    Rule("gopher_repetition", "dup_line_ratio", "dup_line_ratio", "<=", 0.30, GOPHER_REPETITION),
    Rule("gopher_repetition", "dup_line_char_ratio", "dup_line_char_ratio", "<=", 0.20, GOPHER_REPETITION),
    Rule("gopher_repetition", "top_2gram_char_ratio", "top_2gram_char_ratio", "<=", 0.20, GOPHER_REPETITION),
    Rule("gopher_repetition", "top_3gram_char_ratio", "top_3gram_char_ratio", "<=", 0.18, GOPHER_REPETITION),
    Rule("gopher_repetition", "top_4gram_char_ratio", "top_4gram_char_ratio", "<=", 0.16, GOPHER_REPETITION),
    Rule("gopher_repetition", "dup_5gram_char_ratio", "dup_5gram_char_ratio", "<=", 0.15, GOPHER_REPETITION),
    Rule("gopher_repetition", "dup_6gram_char_ratio", "dup_6gram_char_ratio", "<=", 0.14, GOPHER_REPETITION),
    Rule("gopher_repetition", "dup_7gram_char_ratio", "dup_7gram_char_ratio", "<=", 0.13, GOPHER_REPETITION),
    Rule("gopher_repetition", "dup_8gram_char_ratio", "dup_8gram_char_ratio", "<=", 0.12, GOPHER_REPETITION),
    Rule("gopher_repetition", "dup_9gram_char_ratio", "dup_9gram_char_ratio", "<=", 0.11, GOPHER_REPETITION),
    Rule("gopher_repetition", "dup_10gram_char_ratio", "dup_10gram_char_ratio", "<=", 0.10, GOPHER_REPETITION),
)

FINEWEB_QUALITY_RULES = (
    Rule("fineweb_quality", "line_punctuation_ratio", "line_punctuation_ratio", ">=", 0.12, FINEWEB),
    Rule("fineweb_quality", "short_line_ratio", "short_line_ratio", "<=", 0.67, FINEWEB),
    Rule("fineweb_quality", "repeated_line_char_ratio", "repeated_line_char_ratio", "<=", 0.01, FINEWEB),
    Rule("fineweb_quality", "newline_word_ratio", "newline_word_ratio", "<=", 0.3, FINEWEB),
)

# The script's first rule (fewer than 512 characters) implies its next two (fewer than 256 characters with "javascript",
# fewer than 512 and not English), so one rule is enough.
MT_NLG_CLEANUP_RULES = (Rule("mt_nlg_cleanup", "min_chars", "num_chars", ">=", 512, MT_NLG),)

C4_RULES = (
    Rule("c4", "min_sentences", "num_sentences", ">=", 5, C4),
    Rule("c4", "lorem_ipsum", "c4_lorem_ipsum", "<=", 0, C4),
    Rule("c4", "curly_brackets", "c4_curly_brackets", "<=", 0, C4),
    Rule("c4", "max_bad_words", "num_bad_words", "<=", 0, C4),  # only if the recipe has lists.badwords
)

# DCLM drops a page if the line rules removed more than 5 % of its words.
REFINEDWEB_RULES = (
    Rule("refinedweb_lines", "removed_word_ratio", "refinedweb_lines_removed_word_ratio", "<=", 0.05, REFINEDWEB),
)

# No published thresholds: drops documents with any address, instead of replacing the addresses.
ADDRESSES = "own choice: no address is allowed"
ADDRESSES_RULES = (
    Rule("addresses", "max_emails", "num_emails", "<=", 0, ADDRESSES),
    Rule("addresses", "max_ip_addresses", "num_ip_addresses", "<=", 0, ADDRESSES),
)

# mGPT drops documents of extreme zlib ratio; the numbers are our own choice. Many texts of less than 100 bytes are
# above the upper bound: zlib adds 11 bytes to what does not compress.
MGPT = "mGPT (arXiv 2204.07580); own choice of the numbers"
MGPT_ZLIB_RULES = (
    Rule("mgpt_zlib", "min_zlib_ratio", "zlib_ratio", ">=", 0.15, MGPT),
    Rule("mgpt_zlib", "max_zlib_ratio", "zlib_ratio", "<=", 1.0, MGPT),
)

# These need signals that are measured only if the recipe sets lists.badwords, lists.blocked_urls, lists.opt_outs,
# lists.robots, language_id, paragraph_languages.
BADWORDS_RULES = (Rule("badwords", "max_bad_words", "num_bad_words", "<=", 0, C4),)
BLOCKED = "RefinedWeb (Penedo et al. 2023, arXiv 2306.01116), appendix G.1: pages on the blocklist are dropped"
BLOCKED_URLS_RULES = (Rule("blocked_urls", "max_blocked", "blocked_url", "<=", 0, BLOCKED),)
APERTUS = "Apertus (arXiv 2509.14233), section 3: robots.txt and opt-outs of today hold for older crawls too"
OPT_OUTS_RULES = (Rule("opt_outs", "max_opted_out", "opted_out", "<=", 0, APERTUS),)
ROBOTS_RULES = (Rule("robots", "max_disallowed", "robots_disallowed", "<=", 0, APERTUS),)
FINEWEB2 = "FineWeb2 (Penedo et al. 2025, arXiv 2506.20920): Gopher's two stop words, from a list of the language"
LANGUAGE_STOP_WORDS_RULES = (
    Rule("language_stop_words", "min_stop_words", "num_language_stop_words", ">=", 2, FINEWEB2),
)
MIXED = "own choice: four fifths of the text in one language"
MIXED_LANGUAGES_RULES = (Rule("mixed_languages", "min_main_share", "main_language_share", ">=", 0.8, MIXED),)

# Rules that only a language profile enables (filters/profiles.py), for cases that the published rules handle by other
# filters or by English word lists. The numbers are the English thresholds to which profiles are matched.
ANCHOR = "own choice: fails shuffled words, menus, lists and repeated sentences of 446 languages, passes running text"
PROFILE_RULES: dict[str, tuple[Rule, ...]] = {
    "gopher_quality": (
        Rule("gopher_quality", "min_language_stop_words", "num_language_stop_words", ">=", 2, FINEWEB2),
        Rule("gopher_quality", "min_stop_word_ratio", "language_stop_word_ratio", ">=", 0.06, ANCHOR),
        Rule("gopher_quality", "repeated_10gram_ratio", "dup_10gram_char_ratio", "<=", 0.5, ANCHOR),
        Rule("gopher_quality", "newline_word_ratio", "newline_word_ratio", "<=", 0.3, FINEWEB),
        Rule("gopher_quality", "short_line_ratio", "short_line_ratio", "<=", 0.8, ANCHOR),
        Rule("gopher_quality", "max_sentence_words", "mean_sentence_words", "<=", 100, ANCHOR),
        Rule("gopher_quality", "min_word_order", "word_order", ">=", 3, ANCHOR),
    ),
}

PRESETS: dict[str, tuple[Rule, ...]] = {
    "addresses": ADDRESSES_RULES,
    "badwords": BADWORDS_RULES,
    "blocked_urls": BLOCKED_URLS_RULES,
    "opt_outs": OPT_OUTS_RULES,
    "robots": ROBOTS_RULES,
    "language_stop_words": LANGUAGE_STOP_WORDS_RULES,
    "mixed_languages": MIXED_LANGUAGES_RULES,
    "c4": C4_RULES,
    "refinedweb_lines": REFINEDWEB_RULES,
    "gopher_quality": GOPHER_QUALITY_RULES,
    "gopher_repetition": GOPHER_REPETITION_RULES,
    "fineweb_quality": FINEWEB_QUALITY_RULES,
    "mt_nlg_cleanup": MT_NLG_CLEANUP_RULES,
    "mgpt_zlib": MGPT_ZLIB_RULES,
}


def page_kind_rules(kinds: Sequence[str]) -> tuple[Rule, ...]:
    """The rule of a source's keep_page_kinds: documents without a kind pass."""
    source = f"the recipe's keep_page_kinds: {', '.join(kinds)}"
    return (Rule("page_kinds", "keep_page_kinds", "page_kind_kept", ">=", 1, source),) if kinds else ()


def pii_rules(config: PiiConfig | None) -> tuple[Rule, ...]:
    """One rule for each kind that the recipe drops documents for."""
    kinds = () if config is None else config.dropped
    return tuple(Rule("pii", kind, pii_signal(kind), "<=", 0, f"the recipe: pii.{kind} is drop") for kind in kinds)


# Options that choose what a rule measures. count_punctuation: 1 counts runs of punctuation as words, as datatrove's
# filters/gopher_quality_filter.py and the published corpora made with it do; the default does not, because tables, code
# and quotes in clean text are rich in punctuation (docs/curation.md, "Words and punctuation").
OPTIONS: dict[str, tuple[str, ...]] = {"gopher_quality": ("count_punctuation",)}

# Line options of the filters that edit. 1 enables a rule without a number; null in a recipe disables a rule.
LINE_OPTIONS: dict[str, dict[str, float]] = {
    "c4": {
        "line_max_word_length": 1000,
        "line_citations": 1,
        "line_terminal_punctuation": 1,  # FineWeb sets it to null
        "line_min_words": 3,
        "line_javascript": 1,
        "line_policy": 1,
    },
    "refinedweb_lines": {
        "line_uppercase_ratio": 0.5,
        "line_digit_ratio": 0.999999,
        "line_counters": 1,
        "line_min_words": 2,
        "line_boilerplate_words": 10,
    },
}

# Thresholds of a signal of the user's, and names that rules of gristmill begin with.
OWN_THRESHOLDS: dict[str, Literal[">=", "<="]] = {"min": ">=", "max": "<="}
SCORE_PREFIX = "quality_"  # of filters on scores, which curate.quality_scores names
RESERVED = {"text", "language", "pii", "page_kinds", *PRESETS}


# Config of one filter in a recipe: a preset and the thresholds that the recipe overrides.


class FilterChoice(Config):
    """In a recipe: `gopher_quality`, or `{gopher_quality: {min_words: 20, min_stop_words: null}}`; null disables the
    rule. A function of the user's file is a rule, `my_rules.py:no_lorem`, or a signal with thresholds,
    `{my_rules.py:capitals: {max: 0.3}}`; preset is then my_rules.no_lorem.

    code: of a function, with the text of its file; recipes are read with it."""

    preset: str
    thresholds: dict[str, float | None] = Field(default_factory=dict)
    code: UserCode | None = Field(
        default=None, exclude_if=lambda code: code is None, json_schema_extra={"omit_default": True}
    )

    @model_validator(mode="after")
    def is_known(self) -> Self:
        if self.code is not None:
            for name in self.thresholds.keys() - OWN_THRESHOLDS.keys():
                raise ValueError(f"{self.preset} has no threshold {name!r}; its value has `min` and `max`")
            if self.preset.partition(".")[0] in RESERVED:
                raise ValueError(f"{self.preset}: rules of gristmill have this name; rename the file")
            return self
        if self.is_score:
            for name in self.thresholds.keys() - OWN_THRESHOLDS.keys():
                raise ValueError(f"{self.preset} has no threshold {name!r}; a score has `min` and `max`")
            if all(threshold is None for threshold in self.thresholds.values()):
                raise ValueError(f"{self.preset} has no threshold; write {{{self.preset}: {{min: 0.5}}}}")
            return self
        if self.preset not in PRESETS:
            hint = "its name is that of a function in the file" if is_reference(self.preset) else ""
            raise ValueError(f"no filter {self.preset!r}; {hint or _hint(self.preset, PRESETS)}")
        known = [*PRESETS[self.preset], *PROFILE_RULES.get(self.preset, ())]
        options = [*OPTIONS.get(self.preset, ()), *LINE_OPTIONS.get(self.preset, ())]
        names = [rule.name for rule in known] + options
        for name in self.thresholds:
            if name not in names:
                raise ValueError(f"filter {self.preset} has no threshold {name!r}; {_hint(name, names)}")
        return self

    @property
    def is_score(self) -> bool:
        """Whether the filter is on a score of curate.quality_scores, quality_NAME."""
        return self.code is None and self.preset.startswith(SCORE_PREFIX)

    def rules(self) -> tuple[Rule, ...]:
        """The preset's rules in their published order, with the recipe's thresholds; of a function, its own."""
        if self.code is not None:
            return self._own_rules(self.code)
        if self.is_score:
            return self._value_rules(self.preset, f"curate.quality_scores.{self.preset.removeprefix(SCORE_PREFIX)}")
        chosen = []
        for rule in PRESETS[self.preset]:
            threshold = self.thresholds.get(rule.name, rule.threshold)
            if rule.signal == "alpha_plain_word_ratio" and self.thresholds.get("count_punctuation"):
                rule = replace(rule, signal="alpha_word_ratio")
            if threshold is not None:
                chosen.append(rule.at(threshold))
        return tuple(chosen)

    def _own_rules(self, code: UserCode) -> tuple[Rule, ...]:
        """my_rules.no_lorem; or my_rules.capitals.min and my_rules.capitals.max."""
        signal, source = self.preset.replace(".", "_"), f"the user's {code.label}, sha256 {code.sha256[:12]}"
        if not self.thresholds:
            filter_name, _, name = self.preset.partition(".")
            return (Rule(filter_name, name, signal, "<=", 0, source),)
        return self._value_rules(signal, source)

    def _value_rules(self, signal: str, source: str) -> tuple[Rule, ...]:
        return tuple(
            Rule(self.preset, name, signal, OWN_THRESHOLDS[name], threshold, source)
            for name, threshold in self.thresholds.items()
            if threshold is not None
        )

    def profile_rules(self) -> tuple[Rule, ...]:
        """The rules that only a language profile or the recipe enables.

        The recipe's min_stop_words applies to the stop words of every language."""
        overrides = dict(self.thresholds)
        if "min_stop_words" in overrides:
            overrides.setdefault("min_language_stop_words", overrides["min_stop_words"])
        rules = PROFILE_RULES.get(self.preset, ())
        wanted = [(rule, overrides.get(rule.name, rule.threshold)) for rule in rules]
        return tuple(rule.at(threshold) for rule, threshold in wanted if threshold is not None)

    def is_fixed(self, rule: Rule) -> bool:
        """Whether the recipe sets the rule's threshold, which then applies to every language."""
        twin = rule.name == "min_language_stop_words" and "min_stop_words" in self.thresholds
        return rule.name in self.thresholds or twin

    def line_options(self) -> dict[str, float | None] | None:
        """Options of the filter's line edits; None if it edits nothing."""
        if self.preset not in LINE_OPTIONS:
            return None
        return {name: self.thresholds.get(name, value) for name, value in LINE_OPTIONS[self.preset].items()}


def parse_choices(value: object) -> object:
    """Expand the recipe's short forms to FilterChoice fields; other values are passed to pydantic's validation."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(_parse(item) for item in value)


def _parse(item: object) -> Any:
    if isinstance(item, str):
        return {"preset": item}
    if isinstance(item, dict) and len(item) == 1 and "preset" not in item:
        [(preset, thresholds)] = item.items()
        return {"preset": preset, "thresholds": thresholds or {}}
    return item


def _hint(word: str, known: Iterable[str]) -> str:
    return did_you_mean(word, known, otherwise=f"known names are {', '.join(sorted(known))}")


def check_choices(choices: Sequence[FilterChoice]) -> None:
    """Raises ValueError if a filter is named twice: its columns and rules would have duplicate names."""
    names = [choice.preset for choice in choices]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"filter {doubled[0]!r} is named twice; merge its thresholds into one entry")
