"""Filters applied to annotated files: thresholds on stored signals, so a new threshold needs no new measurement."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.filters.choice import FilterChoice
from gristmill.data_pipeline.filters.presets import PROFILE_RULES
from gristmill.data_pipeline.filters.profiles import Profiles
from gristmill.data_pipeline.filters.rule import Rule
from gristmill.data_pipeline.signals.language import LanguageConfig
from gristmill.data_pipeline.signals.names import SIGNALS, before
from gristmill.foundation.engine.local import LocalEngine

KEPT, QUARANTINED = -1, -2
EMPTY_RULE = Rule("text", "min_chars", "num_chars", ">=", 1, "empty documents are dropped")
PROFILE = "profile"  # the column of a document's language profile
WANTED_LANGUAGE = "wanted_language_score"  # the language score if the language is one of the recipe's, else 0


@dataclass(frozen=True)
class Rules:
    """The rules of one source in the order they are applied, and the allowed languages (empty: all).

    by_profile: language profile -> the threshold of each rule in it, NaN where it is off; empty: the rules' own
    thresholds apply to every document."""

    rules: tuple[Rule, ...]
    languages: tuple[str, ...]
    by_profile: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The columns of the signals that the rules use."""
        wanted = {rule.signal for rule in self.rules}
        if WANTED_LANGUAGE in wanted:
            wanted = wanted - {WANTED_LANGUAGE} | {"detected_language", "language_score"}
        if self.by_profile:
            wanted = wanted | {PROFILE}
        return sorted(wanted)

    def only(self, index: int) -> "Rules":
        """Only the rule at this index."""
        return self._chosen([index])

    def without(self, index: int) -> "Rules":
        return self._chosen([place for place in range(len(self.rules)) if place != index])

    def _chosen(self, places: Sequence[int]) -> "Rules":
        by_profile = {key: tuple(numbers[place] for place in places) for key, numbers in self.by_profile.items()}
        return Rules(tuple(self.rules[place] for place in places), self.languages, by_profile)

    def thresholds(self, table: pa.Table) -> np.ndarray:
        """float64[rules, rows]: thresholds by document, NaN where a rule is off in its language profile."""
        own_R = np.array([rule.threshold for rule in self.rules], dtype=np.float64)
        if not self.by_profile:
            return np.repeat(own_R[:, None], table.num_rows, axis=1)
        profiles = table.column(PROFILE).combine_chunks().dictionary_encode()
        keys = profiles.dictionary.to_pylist()
        held = [np.array(self.by_profile.get(key, own_R), dtype=np.float64) for key in keys]
        held_PR = np.array(held, dtype=np.float64).reshape(len(keys), len(self.rules))
        return np.ascontiguousarray(held_PR[profiles.indices.to_numpy(zero_copy_only=False)].T)


@dataclass(frozen=True)
class FilterTask:
    path: Path
    rules: Rules


@dataclass(frozen=True)
class FilterResults:
    """Filter results of every row of one annotated file, in order.

    failed_rule: int16[rows], the index of the first failed rule, KEPT or QUARANTINED.
    doc_ids: S32[rows]. bytes: int64[rows], of the repaired text. hashes: uint64[rows], of the same text.
    languages: str[rows], the language profile, or the detected language if no profiles are used."""

    failed_rule: np.ndarray
    doc_ids: np.ndarray
    bytes: np.ndarray
    hashes: np.ndarray
    languages: np.ndarray


def rules_of(
    filters: Sequence[FilterChoice],
    languages: Sequence[str],
    language_id: LanguageConfig | None,
    unmeasured: Collection[str] = (),
    last: Sequence[Rule] = (),
    profiles: Profiles | None = None,
) -> Rules:
    """The rules of a source: non-empty text, the language rule if languages are set, each filter's rules, then `last`.

    Rules on unmeasured signals are omitted. profiles: thresholds by language, for rules whose threshold the recipe does
    not set. A rule applies to the text after the edits of the filters before its own."""
    edits = [choice.preset for choice in filters if choice.line_options() is not None]
    rules = [_at_stage(EMPTY_RULE, 0, edits)]
    fixed: set[str] = set()
    if languages and language_id is not None:
        source = "FineWeb, RefinedWeb: lid.176 at 0.65"
        rules.append(Rule("language", "min_score", WANTED_LANGUAGE, ">=", language_id.threshold, source))
    stage = 0
    for choice in filters:
        stage += choice.line_options() is not None
        own = (*choice.rules(), *(choice.profile_rules() if profiles is not None else ()))
        applied = [rule for rule in own if rule.signal not in unmeasured]
        fixed.update(rule.label for rule in applied if choice.is_fixed(rule))
        rules.extend(_at_stage(rule, stage, edits) for rule in applied)
    if edits:
        rules.append(EMPTY_RULE)
    found = Rules((*rules, *last), tuple(languages))
    return found if profiles is None else replace(found, by_profile=_by_profile(found.rules, fixed, profiles))


def _by_profile(rules: Sequence[Rule], fixed: Collection[str], profiles: Profiles) -> dict[str, tuple[float, ...]]:
    """Profile -> thresholds. A threshold set in the recipe holds in every profile; PROFILE_RULES are off unless set."""
    switched = {rule.label for group in PROFILE_RULES.values() for rule in group}
    own = [rule.threshold if rule.label in fixed or rule.label not in switched else math.nan for rule in rules]
    return {
        key: tuple(
            number if rule.label in fixed else profile.threshold(rule.label, number)
            for rule, number in zip(rules, own, strict=True)
        )
        for key, profile in profiles.by_key.items()
    }


def _at_stage(rule: Rule, stage: int, edits: Sequence[str]) -> Rule:
    """The rule with the column of its signal at that stage: before the first edit (0), after it (1), and so on."""
    if rule.signal not in SIGNALS or stage == len(edits):
        return rule
    return replace(rule, signal=before(edits[stage], rule.signal))


def apply_filters_to_files(tasks: Sequence[FilterTask], engine: LocalEngine) -> list[FilterResults]:
    sizes = [float(task.path.stat().st_size) for task in tasks]
    return engine.map(apply_filters, tasks, "decide", sizes, "B")


def apply_filters(task: FilterTask) -> FilterResults:
    language = PROFILE if task.rules.by_profile else "detected_language"
    columns = ["doc_id", "unreadable", "num_bytes", "text_hash", language, *task.rules.columns]
    table = pq.read_table(task.path, columns=list(dict.fromkeys(columns)))
    failed_RN = failures(table, task.rules)
    first = np.where(failed_RN.any(axis=0), failed_RN.argmax(axis=0), KEPT)
    readable = pc.is_null(table.column("unreadable")).to_numpy(zero_copy_only=False)
    return FilterResults(
        failed_rule=np.where(readable, first, QUARANTINED).astype(np.int16),
        doc_ids=np.array(table.column("doc_id").to_pylist(), dtype="S32"),
        bytes=table.column("num_bytes").to_numpy(),
        hashes=table.column("text_hash").to_numpy(),
        languages=np.array(table.column(language).to_pylist(), dtype=np.str_),
    )


def failures(table: pa.Table, rules: Rules) -> np.ndarray:
    """bool[rules, rows]: which document fails which rule, each rule evaluated independently."""
    thresholds_RN = rules.thresholds(table)
    failed = [
        ~rule.passes(signal_values(table, rule.signal, rules.languages), thresholds_N)
        for rule, thresholds_N in zip(rules.rules, thresholds_RN, strict=True)
    ]
    return np.array(failed, dtype=bool).reshape(len(rules.rules), table.num_rows)


def signal_values(table: pa.Table, signal: str, languages: Sequence[str]) -> np.ndarray:
    """float64[rows] of one signal."""
    if signal == WANTED_LANGUAGE:
        wanted = pc.is_in(table.column("detected_language"), pa.array(languages, pa.string()))
        return np.where(wanted.to_numpy(zero_copy_only=False), table.column("language_score").to_numpy(), 0.0)
    return table.column(signal).to_numpy().astype(np.float64)
