"""What the recipe says about curation."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from gristmill.data_pipeline.config import Config
from gristmill.data_pipeline.dedup.exact import ExactDedupConfig
from gristmill.data_pipeline.dedup.near import NearDedupConfig
from gristmill.data_pipeline.filters.choice import FilterChoice, parse_choices
from gristmill.data_pipeline.text import NormalizeConfig


class SplitConfig(Config):
    """Shares of the documents held out. Which ones is decided by a hash of the text, so a document stays on its side
    when sources grow, move or are reordered, and equal texts are never on two sides."""

    validation: float = Field(default=0.01, ge=0, lt=1)
    test: float = Field(default=0.01, ge=0, lt=1)

    @model_validator(mode="after")
    def leaves_training(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(f"validation={self.validation} and test={self.test} leave no training text; lower them")
        return self


class CurateConfig(Config):
    """filters run in their order; the first failed rule is the one that removes, every failed rule is recorded.

    exact_dedup, near_dedup: null switches the step off. shard_bytes: text bytes of one file of the corpus."""

    normalize: NormalizeConfig = NormalizeConfig()
    filters: tuple[FilterChoice, ...] = (FilterChoice(preset="gopher_quality"),)
    exact_dedup: ExactDedupConfig | None = ExactDedupConfig()
    near_dedup: NearDedupConfig | None = NearDedupConfig()
    splits: SplitConfig = SplitConfig()
    shard_bytes: int = Field(default=256_000_000, ge=1)

    @field_validator("filters", mode="before")
    @classmethod
    def short_forms(cls, value: object) -> object:
        return parse_choices(value)
