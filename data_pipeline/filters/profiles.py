"""Filter profiles by language: thresholds and stop words that replace the published English ones; the rules of a
source, from its filters and the profiles.

A folder has one YAML file per language, LANGUAGE_Script: ours (filters/languages/, from `gristmill profiles fit`) or
FineWeb-2's `configs/*.yml`. und_Script is the fallback for languages of that script, und_Zyyy for all others. English
keeps the published thresholds."""

import hashlib
import math
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field, ValidationError, field_validator, model_validator

from gristmill.data_pipeline.filters.presets import PRESETS, PROFILE_RULES, FilterChoice, Rule
from gristmill.data_pipeline.signals.language import LATIN, NO_LETTERS, LanguageConfig, language_code, script_code
from gristmill.data_pipeline.signals.signal_names import SIGNALS, before
from gristmill.data_pipeline.signals.stop_words import matched_words
from gristmill.foundation.config import Config, read_yaml
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.kernels.kernel_files import kept_json

SHIPPED = "gristmill"
SHIPPED_FOLDER = Path(__file__).with_name("languages")
UNKNOWN = "und"  # ISO 639: undetermined
ENGLISH = "en_Latn"


class Profile(Config):
    """thresholds: filter -> threshold -> number, null if the rule does not apply to the language or its script;
    others keep the preset's threshold. language: the code lid.176 uses. source: what it was derived from.
    stop_words_lowered: whether words are lowercased before the lookup."""

    language: str
    script: str
    source: str
    stop_words: tuple[str, ...] = ()
    stop_words_lowered: bool = True
    thresholds: dict[str, dict[str, float | None]] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.language}_{self.script}"

    @cached_property
    def matched_words(self) -> tuple[str, ...]:
        """The stop words that our word splitting can match; a rule that needs more of them is off."""
        return matched_words(self.stop_words)

    @field_validator("stop_words")
    @classmethod
    def composed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Words in NFC, as curation writes texts: a decomposed word would match none."""
        return tuple(dict.fromkeys(unicodedata.normalize("NFC", word) for word in value))

    @model_validator(mode="after")
    def names_known_rules(self) -> "Profile":
        for preset, thresholds in self.thresholds.items():
            rules = [*PRESETS.get(preset, ()), *PROFILE_RULES.get(preset, ())]
            if preset not in PRESETS and preset != "language":
                raise ValueError(f"no filter {preset!r}; filters are {', '.join(sorted(PRESETS))}")
            names = [rule.name for rule in rules] or ["min_score"]
            for name in thresholds:
                if name not in names:
                    raise ValueError(f"filter {preset} has no threshold {name!r}; it has {', '.join(names)}")
        return self

    def threshold(self, label: str, preset_threshold: float) -> float:
        """Threshold of the rule FILTER.NAME; NaN if the rule is off."""
        preset, _, name = label.partition(".")
        wanted = self.thresholds.get(preset, {}).get(name, preset_threshold)
        if name == "min_language_stop_words" and wanted is not None and wanted > len(self.matched_words):
            return math.nan
        return math.nan if wanted is None else float(wanted)


class ProfilesConfig(Config):
    """In a recipe: `profiles: gristmill` (ours), a folder, or {path: FOLDER, min_score: 0.65}; null: the published
    English thresholds for every language. Languages missing in the folder use ours.

    path is not part of the fingerprint, the profiles in it are. min_score: with a lower score the language of a text
    counts as unknown, and the profile of its script is used."""

    path: str = Field(
        default=SHIPPED,
        description="gristmill (the shipped profiles), or a folder of profiles or of FineWeb-2's configs",
        json_schema_extra={"execution": True},
    )
    min_score: float = Field(default=0.65, ge=0, le=1)


@dataclass(frozen=True)
class Profiles:
    """by_key: LANGUAGE_Script -> profile. min_score: see ProfilesConfig."""

    by_key: Mapping[str, Profile]
    min_score: float

    def choose(self, language: str, score: float, script: str) -> str:
        """The key of the profile of a text. (de, 0.9, Latn) -> de_Latn; (de, 0.3, Latn) -> und_Latn.

        A detected language without a profile in Latin letters keeps its own: a Chinese page with much code is
        (zh, 0.9, Latn) by its letters -> zh_Hani."""
        wanted = f"{language}_{script}"
        if score >= self.min_score:
            if wanted in self.by_key:
                return wanted
            if language in self._other_scripts and script == LATIN:
                return self._other_scripts[language]
        fallback = f"{UNKNOWN}_{script}"
        return fallback if fallback in self.by_key else f"{UNKNOWN}_{NO_LETTERS}"

    @cached_property
    def _other_scripts(self) -> dict[str, str]:
        """Language -> its first profile, of languages that have no profile in Latin letters."""
        by_language: dict[str, list[str]] = {}
        for key, profile in sorted(self.by_key.items()):
            by_language.setdefault(profile.language, []).append(key)
        return {language: keys[0] for language, keys in by_language.items() if f"{language}_{LATIN}" not in keys}

    @property
    def digest(self) -> str:
        return fingerprint([profile.model_dump(mode="json") for profile in self.by_key.values()])


class LockedProfiles(Config):
    """The part of the profiles that determines annotated files: their keys and stop words, without thresholds."""

    digest: str
    min_score: float
    path: str = Field(exclude=True)


def load_profiles(config: ProfilesConfig) -> Profiles:
    """Our profiles, overridden by those of the recipe's folder."""
    profiles = dict(read_folder(SHIPPED_FOLDER))
    if config.path != SHIPPED:
        profiles |= read_folder(Path(config.path))
    return Profiles(dict(sorted(profiles.items())), config.min_score)


@lru_cache(maxsize=8)  # every source of a recipe asks
def locked_profiles(config: ProfilesConfig) -> LockedProfiles:
    words = [[key, p.stop_words, p.stop_words_lowered] for key, p in load_profiles(config).by_key.items()]
    return LockedProfiles(digest=fingerprint(words), min_score=config.min_score, path=config.path)


@lru_cache(maxsize=8)
def read_folder(folder: Path) -> Mapping[str, Profile]:
    """Key -> profile of every .yaml and .yml file of the folder.

    Raises RecipeError for a folder that is missing or has no profiles, and for a file that is not a profile."""
    if not folder.is_dir():
        raise RecipeError(
            f"curate.profiles: no folder {folder}; name a folder of profiles (FineWeb-2's configs, or what `gristmill "
            f"profiles fit` wrote), or {SHIPPED!r} for ours"
        )
    paths = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    if not paths:
        raise RecipeError(f"curate.profiles: {folder} contains no .yaml or .yml file; name a folder of profiles")
    profiles: dict[str, Profile] = {}
    for path, profile in zip(paths, _read_profiles(paths), strict=True):
        if profile.key in profiles:
            raise RecipeError(f"{path}: a second profile of {profile.key} in this folder; keep one of the two files")
        profiles[profile.key] = profile
    return profiles


def _read_profiles(paths: Sequence[Path]) -> list[Profile]:
    """read_profile of each. The YAML of the same files is parsed and their stop words are split once per machine; both
    take 0.15 s for ours."""
    digest = hashlib.sha256(b"".join(hashlib.sha256(_content(path)).digest() for path in paths)).hexdigest()
    names = [path.name for path in paths]
    kept = kept_json(lambda: [_kept_profile(path) for path in paths], read_profile, f"{names} {digest}")
    profiles = []
    for fields, matched in kept:
        profiles.append(Profile.model_validate(fields))
        vars(profiles[-1])["matched_words"] = tuple(matched)  # as cached_property does
    return profiles


def _kept_profile(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    profile = read_profile(path)
    return profile.model_dump(mode="json"), profile.matched_words


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); fix or remove the file") from error


def read_profile(path: Path) -> Profile:
    """One file. Raises RecipeError that names the file, the field and the fix."""
    fields = read_yaml(_content(path), str(path)).value
    if not isinstance(fields, dict):
        raise RecipeError(f"{path}: a profile is a mapping of fields, and this is {type(fields).__name__}; see docs")
    try:
        return Profile.model_validate(fineweb2_fields(path.stem, fields) if is_fineweb2(fields) else fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "profile"
        raise RecipeError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}; fix the file") from error
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from error


# Conversion of FineWeb-2's `configs/*.yml` to profiles, by the use of each value in fineweb-2-pipeline.py, step 5.
#
# It runs datatrove's Gopher repetition filter without the rules on paragraphs and on the characters of repeated
# lines, its FineWeb filter without the rule on short lines and with 0.1 for repeated lines, and its Gopher quality
# filter with the language's word lengths, alphabetic share and stop words. The other thresholds of the three filters
# are the published ones.

_NUMBERS = (
    "dup_line_frac",
    "language_score",
    "line_punct_thr",
    "max_avg_word_length",
    "max_non_alpha_words_ratio",
    "min_avg_word_length",
    "new_line_ratio",
)
_FIELDS = (*_NUMBERS, "stopwords", "dup_n_grams", "top_n_grams")
_TOP, _DUP = (2, 3, 4), (5, 6, 7, 8, 9, 10)
CHAR_DUPLICATES = 0.1  # fineweb-2-pipeline.py


def is_fineweb2(fields: Mapping[str, Any]) -> bool:
    return len(set(fields) & set(_FIELDS)) >= 3


def fineweb2_fields(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Profile. name: of the file, ISO639-3_Script. Raises ValueError for a missing field."""
    language, underscore, script = name.partition("_")
    if not underscore:
        raise ValueError("FineWeb-2 names its files LANGUAGE_Script.yml, as deu_Latn.yml; rename it")
    for required in _FIELDS:
        if required not in fields:
            raise ValueError(f"no field {required!r}, which every file of FineWeb-2's configs has; copy the file again")
    numbers = {field: _number(field, fields[field]) for field in _NUMBERS}
    off = dict.fromkeys(("dup_paragraph_ratio", "dup_paragraph_char_ratio", "dup_line_char_ratio"))
    words = fields["stopwords"]
    if not isinstance(words, list):
        raise ValueError("stopwords is not a list of words; copy the file again")
    return {
        "language": language_code(language),
        "script": script_code(script),
        "source": f"FineWeb-2 configs/{name}.yml",
        "stop_words": [str(word) for word in words],
        "stop_words_lowered": False,
        "thresholds": {
            "language": {"min_score": numbers["language_score"]},
            "gopher_repetition": {
                **off,
                "dup_line_ratio": numbers["dup_line_frac"] or None,  # datatrove: 0 switches a rule off
                **_ngrams("top_n_grams", fields["top_n_grams"], _TOP, "top"),
                **_ngrams("dup_n_grams", fields["dup_n_grams"], _DUP, "dup"),
            },
            "fineweb_quality": {
                "short_line_ratio": None,  # 999 there: no ratio reaches it
                "repeated_line_char_ratio": CHAR_DUPLICATES,
                "line_punctuation_ratio": numbers["line_punct_thr"],
                "newline_word_ratio": numbers["new_line_ratio"],
            },
            "gopher_quality": {
                "min_mean_word_length": numbers["min_avg_word_length"] or None,
                "max_mean_word_length": numbers["max_avg_word_length"] or None,
                "alpha_word_ratio": numbers["max_non_alpha_words_ratio"] or None,
                "min_stop_words": None,  # Gopher's, which are English
                "min_language_stop_words": 2,
                **dict.fromkeys(_OWN_RULES),
            },
        },
    }


# Ours alone: FineWeb-2 has no such rule in its Gopher quality filter.
_OWN_RULES = (
    "min_stop_word_ratio",
    "repeated_10gram_ratio",
    "newline_word_ratio",
    "short_line_ratio",
    "max_sentence_words",
    "min_word_order",
)


def _ngrams(field: str, pairs: Any, sizes: tuple[int, ...], kind: str) -> dict[str, float | None]:
    """[[2, 0.169], ...] as thresholds; a size that is not named is not asked."""
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ValueError(f"{field} is no list of [n, ratio]; copy the file again")
    thresholds: dict[str, float | None] = {f"{kind}_{size}gram_char_ratio": None for size in sizes}
    for size, ratio in pairs:
        if size not in sizes:
            raise ValueError(
                f"{field} names {size}-grams, and only {sizes[0]} to {sizes[-1]} are measured; leave it out"
            )
        thresholds[f"{kind}_{size}gram_char_ratio"] = _number(field, ratio)
    return thresholds


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{field} is {value!r}, and should be a number; copy the file again")
    return float(value)


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

    @cached_property
    def columns(self) -> list[str]:
        """The columns of the signals that the rules use."""
        wanted = {rule.signal for rule in self.rules}
        if WANTED_LANGUAGE in wanted:
            wanted = wanted - {WANTED_LANGUAGE} | {"detected_language", "language_score"}
        if self.by_profile:
            wanted = wanted | {PROFILE}
        return sorted(wanted)

    @cached_property
    def description(self) -> str:
        """Text that is equal for equal rules."""
        thresholds = [(name, [repr(number) for number in numbers]) for name, numbers in sorted(self.by_profile.items())]
        return repr(([repr(rule) for rule in self.rules], self.languages, thresholds))

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
        columns = [np.array(self.by_profile.get(key, own_R), dtype=np.float64) for key in keys]
        held_PR = np.array(columns, dtype=np.float64).reshape(len(keys), len(self.rules))
        return np.ascontiguousarray(held_PR[profiles.indices.to_numpy(zero_copy_only=False)].T)


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
    all_rules = Rules((*rules, *last), tuple(languages))
    return (
        all_rules if profiles is None else replace(all_rules, by_profile=_by_profile(all_rules.rules, fixed, profiles))
    )


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
