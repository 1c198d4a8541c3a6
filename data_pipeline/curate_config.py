"""The `curate` section of a recipe, and the optional signals that it turns on."""

from collections.abc import Sequence
from typing import Self

from pydantic import Field, field_validator, model_validator

from gristmill.data_pipeline.annotate.list_file import ListsConfig
from gristmill.data_pipeline.annotate.normalize import NormalizeConfig
from gristmill.data_pipeline.annotate.optional_signals import (
    OPTIONAL_SIGNALS,
    OptionalSignals,
    OriginFields,
    OwnSignal,
    check_own_signals,
    locked_list,
    locked_robots,
)
from gristmill.data_pipeline.corpus.splits import SplitConfig
from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.dedup.exact import ExactDedupConfig
from gristmill.data_pipeline.dedup.near import NearDedupConfig
from gristmill.data_pipeline.dedup.spans import SpanDedupConfig
from gristmill.data_pipeline.dedup.substrings import SubstringDedupConfig
from gristmill.data_pipeline.extraction.blocks_config import PageKind
from gristmill.data_pipeline.filters.pii import PiiConfig
from gristmill.data_pipeline.filters.presets import (
    FilterChoice,
    check_choices,
    page_kind_rules,
    parse_choices,
    pii_rules,
)
from gristmill.data_pipeline.filters.profiles import ProfilesConfig, Rules, load_profiles, locked_profiles, rules_of
from gristmill.data_pipeline.quality.config import QualityConfig
from gristmill.data_pipeline.quality.scores import (
    LABELS_PREFIX,
    PREFIX,
    LabelConfig,
    QualityScoreConfig,
    check_names,
    locked_labels,
    locked_scores,
)
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.signals.language import (
    BUNDLED,
    LanguageConfig,
    ParagraphLanguageConfig,
    language_code,
    model_languages,
    require_language_code,
)
from gristmill.data_pipeline.signals.reference import WordRule
from gristmill.data_pipeline.signals.signal_names import SIGNALS
from gristmill.foundation.config import Config
from gristmill.foundation.errors import RecipeError, nearest_names
from gristmill.foundation.user_code import UserCode


class CurateConfig(Config):
    """filters run in their order; the first failed rule is the one that removes, every failed rule is recorded.

    word_tokenizer: what counts as a word (signals/reference.py). languages: ISO 639 codes to keep; none keeps all.
    language_id: null leaves languages undetected, which is by far the slowest of the signals.
    profiles: thresholds by the document's language (filters/profiles.py); null: the published English ones for all.
    paragraph_languages: {} measures the language of every paragraph too. lists: files of bad words, blocked addresses.
    exact_dedup, near_dedup: null switches the step off. span_dedup (paragraphs, lines or both), substring_dedup and
    decontaminate rewrite texts, in this order, and are off unless they are named. shard_bytes: text bytes of one
    file of the corpus."""

    normalize: NormalizeConfig = NormalizeConfig()
    word_tokenizer: WordRule = "unicode"
    languages: tuple[str, ...] = ()
    language_id: LanguageConfig | None = LanguageConfig()
    profiles: ProfilesConfig | None = ProfilesConfig()
    filters: tuple[FilterChoice, ...] = (FilterChoice(preset="gopher_quality"),)
    signals: tuple[UserCode, ...] = Field(
        default=(),
        description="functions of your own that measure documents, such as my_rules.py:capitals",
        json_schema_extra={"omit_default": True},
        exclude_if=lambda codes: not codes,
    )
    quality_scores: dict[str, QualityScoreConfig] = Field(
        default_factory=dict,
        description="classifiers by name; each scores every document, in the column quality_NAME",
        json_schema_extra={"omit_default": True},
        exclude_if=lambda scores: not scores,
    )
    labels: dict[str, LabelConfig] = Field(
        default_factory=dict,
        description="classifiers by name, such as of topics; the likeliest label is in the column label_NAME",
        json_schema_extra={"omit_default": True},
        exclude_if=lambda labels: not labels,
    )
    quality: QualityConfig | None = None
    exact_dedup: ExactDedupConfig | None = ExactDedupConfig()
    near_dedup: NearDedupConfig | None = NearDedupConfig()
    span_dedup: tuple[SpanDedupConfig, ...] = ()
    substring_dedup: SubstringDedupConfig | None = None
    decontaminate: DecontaminateConfig | None = None
    pii: PiiConfig | None = None
    paragraph_languages: ParagraphLanguageConfig | None = None
    lists: ListsConfig = ListsConfig()
    splits: SplitConfig = SplitConfig()
    shard_bytes: int = Field(default=256_000_000, ge=1)

    @field_validator("quality_scores")
    @classmethod
    def scores_are_columns(cls, value: dict[str, QualityScoreConfig]) -> dict[str, QualityScoreConfig]:
        check_names(value)
        return value

    @field_validator("labels")
    @classmethod
    def labels_are_columns(cls, value: dict[str, LabelConfig]) -> dict[str, LabelConfig]:
        check_names(value, "labels", LABELS_PREFIX)
        return value

    @field_validator("languages")
    @classmethod
    def languages_exist(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for code in value:
            require_language_code(code)
        return value

    @field_validator("filters", mode="before")
    @classmethod
    def short_forms(cls, value: object) -> object:
        return parse_choices(value)

    @field_validator("profiles", mode="before")
    @classmethod
    def folder_alone(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("span_dedup", mode="before")
    @classmethod
    def one_or_several(cls, value: object) -> object:
        return [] if value is None else [value] if isinstance(value, dict | SpanDedupConfig) else value

    @field_validator("span_dedup")
    @classmethod
    def each_unit_once(cls, value: tuple[SpanDedupConfig, ...]) -> tuple[SpanDedupConfig, ...]:
        units = [config.unit for config in value]
        if len(units) != len(set(units)):
            raise ValueError(f"span_dedup names {units[0]!r} twice; give `paragraph` and `line` once each")
        return value

    @model_validator(mode="after")
    def wanted_languages_are_detected(self) -> Self:
        if self.languages and self.language_id is None:
            raise ValueError("languages are named and language_id is null; leave language_id out to have them detected")
        return self

    @field_validator("filters")
    @classmethod
    def named_once(cls, value: tuple[FilterChoice, ...]) -> tuple[FilterChoice, ...]:
        check_choices(value)
        return value


# Filter whose rules all need an optional signal -> how to turn that signal on.
_HOW_TO_MEASURE = {
    "badwords": "name files of words in curate.lists.badwords",
    "blocked_urls": "name files of hosts and addresses in curate.lists.blocked_urls",
    "opt_outs": "name files of hosts and addresses in curate.lists.opt_outs",
    "robots": "name robots.txt files in curate.lists.robots",
    "mixed_languages": "set curate.paragraph_languages, {} for its defaults",
    "language_stop_words": "leave curate.language_id out, so that languages are detected",
}


def optional_signals(
    config: CurateConfig,
    filters: Sequence[FilterChoice],
    page_kinds: tuple[PageKind, ...] = (),
    origin: OriginFields | None = None,
) -> OptionalSignals:
    """The optional signals that the recipe turns on; its lists are identified by the digests of their files. filters,
    page_kinds and origin: of the source."""
    return OptionalSignals(
        stop_words=config.language_id is not None and config.profiles is None,
        profiles=None if (profiles := used_profiles(config)) is None else locked_profiles(profiles),
        paragraph_languages=config.paragraph_languages,
        pii=() if config.pii is None else config.pii.dropped,
        badwords=locked_list(config.lists.badwords),
        blocked_urls=locked_list(config.lists.blocked_urls),
        zlib=any(choice.preset == "mgpt_zlib" for choice in filters),
        quality=locked_scores(config.quality_scores),
        labels=locked_labels(config.labels),
        page_kinds=page_kinds,
        origin=origin,
        opt_outs=locked_list(config.lists.opt_outs),
        robots=locked_robots(config.lists),
        own=own_signals(config, filters),
    )


def own_signals(config: CurateConfig, filters: Sequence[FilterChoice]) -> tuple[OwnSignal, ...]:
    """The functions of the user that the filters and `curate.signals` name, each once; filters: of the source."""
    in_filters = [
        OwnSignal(code=choice.code, is_rule=not choice.thresholds) for choice in filters if choice.code is not None
    ]
    labels = {signal.code.label for signal in in_filters}
    return (*in_filters, *(OwnSignal(code=code) for code in config.signals if code.label not in labels))


def used_profiles(config: CurateConfig) -> ProfilesConfig | None:
    """The profiles in use; None if the recipe turns them off, or detects no language to select one by."""
    return config.profiles if config.language_id is not None else None


def unmeasured_signals(config: CurateConfig) -> frozenset[str]:
    """The optional signals that the recipe does not turn on; rules on them are not applied."""
    measured = {
        "num_language_stop_words": config.language_id is not None,
        "main_language_share": config.paragraph_languages is not None,
        "num_bad_words": bool(config.lists.badwords),
        "blocked_url": bool(config.lists.blocked_urls),
        "opted_out": bool(config.lists.opt_outs),
        "robots_disallowed": bool(config.lists.robots),
        "zlib_ratio": True,  # where a filter of the source has a rule on it, and only there
    }
    return frozenset(name for name in OPTIONAL_SIGNALS if not measured[name])


def check_languages(languages: Sequence[str], config: CurateConfig, field: str = "curate.languages") -> None:
    """Raises RecipeError for a language that the bundled model never predicts, since nothing would be kept, and for any
    if languages are not detected. field: where the recipe names them."""
    if languages and config.language_id is None:
        raise RecipeError(f"{field}: curate.language_id is null; leave it out to have languages detected")
    if config.language_id is None or not languages or config.language_id.model != BUNDLED:
        return
    known = model_languages(BUNDLED)
    for name in languages:
        if name not in known:
            near = [language_code(name)] if language_code(name) in known else nearest_names(name, known)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "its codes have two or three letters"
            raise RecipeError(
                f"{field} names {name!r}, which {BUNDLED} does not know; {hint} Another model may: "
                f"curate.language_id.model"
            )


def check_filters(filters: Sequence[FilterChoice], config: CurateConfig) -> None:
    """Raises RecipeError for a filter none of whose signals is measured, and says how to measure them."""
    check_own_signals(own_signals(config, filters), (*SIGNALS, *OPTIONAL_SIGNALS))
    missing = unmeasured_signals(config)
    scores = [PREFIX + name for name in config.quality_scores]
    for choice in filters:
        if choice.code is None and choice.preset.startswith(PREFIX) and choice.preset not in scores:
            raise RecipeError(
                f"filter {choice.preset}: curate.quality_scores has no {choice.preset.removeprefix(PREFIX)!r}; "
                f"it has {', '.join(config.quality_scores) or 'none'}"
            )
        rules = choice.rules()
        if choice.preset in _HOW_TO_MEASURE and rules and all(rule.signal in missing for rule in rules):
            raise RecipeError(f"filter {choice.preset}: nothing is measured for it; {_HOW_TO_MEASURE[choice.preset]}")


def source_filters(source: SourceConfig, config: CurateConfig) -> tuple[FilterChoice, ...]:
    """The source's own filters if it has any, else the recipe's."""
    return config.filters if source.filters is None else source.filters


def rules_by_source(sources: Sequence[SourceConfig], config: CurateConfig) -> list[Rules]:
    """The rules of each source; sources of equal settings share one value."""
    by_settings: dict[str, Rules] = {}
    rules = []
    for source in sources:
        settings = repr((source.filters, source.languages, source.keep_page_kinds))
        if settings not in by_settings:
            by_settings[settings] = source_rules(source, config)
        rules.append(by_settings[settings])
    return rules


def source_rules(source: SourceConfig, config: CurateConfig) -> Rules:
    used = used_profiles(config)
    profiles = None if used is None else load_profiles(used)
    unmeasured, last = unmeasured_signals(config), (*page_kind_rules(source.keep_page_kinds), *pii_rules(config.pii))
    languages = config.languages if source.languages is None else source.languages
    return rules_of(source_filters(source, config), languages, config.language_id, unmeasured, last, profiles)
