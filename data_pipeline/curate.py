"""What the recipe says about curation."""

from pydantic import Field, field_validator

from gristmill.data_pipeline.config import Config
from gristmill.data_pipeline.dedup.exact import ExactDedupConfig
from gristmill.data_pipeline.dedup.near import NearDedupConfig
from gristmill.data_pipeline.filters.choice import FilterChoice, check_choices, parse_choices
from gristmill.data_pipeline.pii import PiiConfig
from gristmill.data_pipeline.signals.language import LanguageConfig
from gristmill.data_pipeline.signals.reference import WordRule
from gristmill.data_pipeline.splits import SplitConfig
from gristmill.data_pipeline.text import NormalizeConfig


class CurateConfig(Config):
    """filters run in their order; the first failed rule is the one that removes, every failed rule is recorded.

    words: what counts as one (signals/reference.py). languages: ISO 639 codes to keep; none named keeps all.
    exact_dedup, near_dedup: null switches the step off. shard_bytes: text bytes of one file of the corpus."""

    normalize: NormalizeConfig = NormalizeConfig()
    words: WordRule = "unicode"
    languages: tuple[str, ...] = ()
    language_id: LanguageConfig = LanguageConfig()
    filters: tuple[FilterChoice, ...] = (FilterChoice(preset="gopher_quality"),)
    exact_dedup: ExactDedupConfig | None = ExactDedupConfig()
    near_dedup: NearDedupConfig | None = NearDedupConfig()
    pii: PiiConfig | None = None
    splits: SplitConfig = SplitConfig()
    shard_bytes: int = Field(default=256_000_000, ge=1)

    @field_validator("filters", mode="before")
    @classmethod
    def short_forms(cls, value: object) -> object:
        return parse_choices(value)

    @field_validator("filters")
    @classmethod
    def named_once(cls, value: tuple[FilterChoice, ...]) -> tuple[FilterChoice, ...]:
        check_choices(value)
        return value
