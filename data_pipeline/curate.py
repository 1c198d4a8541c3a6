"""What the recipe says about curation."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from gristmill.data_pipeline.config import Config
from gristmill.data_pipeline.dedup.exact import ExactDedupConfig
from gristmill.data_pipeline.dedup.near import NearDedupConfig
from gristmill.data_pipeline.filters.choice import FilterChoice, check_choices, parse_choices
from gristmill.data_pipeline.lists.list_file import ListsConfig
from gristmill.data_pipeline.pii import PiiConfig
from gristmill.data_pipeline.quality_config import QualityConfig
from gristmill.data_pipeline.signals.language import LanguageConfig
from gristmill.data_pipeline.signals.paragraph_languages import ParagraphLanguageConfig
from gristmill.data_pipeline.signals.reference import WordRule
from gristmill.data_pipeline.splits import SplitConfig
from gristmill.data_pipeline.text import NormalizeConfig


class CurateConfig(Config):
    """filters run in their order; the first failed rule is the one that removes, every failed rule is recorded.

    words: what counts as one (signals/reference.py). languages: ISO 639 codes to keep; none named keeps all.
    language_id: null leaves languages undetected, which is by far the slowest of the signals.
    paragraph_languages: {} measures the language of every paragraph too. lists: files of bad words and of blocked
    addresses. exact_dedup, near_dedup: null switches the step off. shard_bytes: text bytes of a file of the corpus."""

    normalize: NormalizeConfig = NormalizeConfig()
    words: WordRule = "unicode"
    languages: tuple[str, ...] = ()
    language_id: LanguageConfig | None = LanguageConfig()
    filters: tuple[FilterChoice, ...] = (FilterChoice(preset="gopher_quality"),)
    quality: QualityConfig | None = None
    exact_dedup: ExactDedupConfig | None = ExactDedupConfig()
    near_dedup: NearDedupConfig | None = NearDedupConfig()
    pii: PiiConfig | None = None
    paragraph_languages: ParagraphLanguageConfig | None = None
    lists: ListsConfig = ListsConfig()
    splits: SplitConfig = SplitConfig()
    shard_bytes: int = Field(default=256_000_000, ge=1)

    @field_validator("filters", mode="before")
    @classmethod
    def short_forms(cls, value: object) -> object:
        return parse_choices(value)

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
