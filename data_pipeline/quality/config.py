"""Config of the quality model that curation fits to sources, in a file of its own so that reading a recipe does not
import safetensors."""

from typing import Literal

from pydantic import Field, field_validator

from gristmill.foundation.config import Config

QUALITY_FOLDER = "quality"  # of a corpus, with these files:
FITTED_NAME, REPORTS_NAME = "quality.safetensors", "models.json"
MIN_DOCUMENTS = 20  # per class: with fewer the held-out AUC is meaningless


class QualityConfig(Config):
    """positive, negative: sources of the recipe by name. apply_to: the sources to score (empty: the negative ones).

    keep: `threshold`, a score of at least `value`; `quantile`, the best `value` of each source's documents; `pareto`,
    a Pareto draw of shape `value` over 1 - score (9: GPT-3; 3: MT-NLG); `all`, nothing is removed.
    ngram: tokens of the longest n-gram. features: slots that n-grams are hashed to, a power of 2. max_documents: per
    class, those with the lowest text hashes are used."""

    positive: tuple[str, ...] = Field(min_length=1)
    negative: tuple[str, ...] = Field(min_length=1)
    apply_to: tuple[str, ...] = ()
    keep: Literal["threshold", "quantile", "pareto", "all"] = "pareto"
    value: float = Field(default=9.0, gt=0)
    ngram: int = Field(default=2, ge=1, le=3)
    features: int = Field(default=2**18, ge=2**10, le=2**24)
    max_documents: int = Field(default=20_000, ge=MIN_DOCUMENTS)
    held_out: float = Field(default=0.1, gt=0, le=1 / 3)

    @field_validator("features")
    @classmethod
    def features_are_a_power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"features: {value} is no power of 2; write {1 << value.bit_length()}")
        return value

    @property
    def scored(self) -> tuple[str, ...]:
        return self.apply_to or self.negative
