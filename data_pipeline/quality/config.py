"""What the recipe says about the quality classifier; apart from it, so that a recipe is read without scikit-learn."""

from typing import Literal

from pydantic import Field

from gristmill.foundation.config import Config

LEAST_DOCUMENTS = 20  # on either side: below that the held-out AUC means nothing


class QualityConfig(Config):
    """positive, negative: sources of the recipe by name. apply_to: the sources judged (none: the negative ones).

    keep: `threshold`, a score of at least `value`; `quantile`, the best `value` of each source's documents; `pareto`,
    a Pareto draw of shape `value` over 1 - score (9: GPT-3; 3: MT-NLG); `all`, the score is only recorded.
    ngram: words of the longest n-gram. most_documents: of each side, those with the lowest text hashes."""

    positive: tuple[str, ...] = Field(min_length=1)
    negative: tuple[str, ...] = Field(min_length=1)
    apply_to: tuple[str, ...] = ()
    keep: Literal["threshold", "quantile", "pareto", "all"] = "pareto"
    value: float = Field(default=9.0, gt=0)
    ngram: int = Field(default=2, ge=1, le=3)
    features: int = Field(default=2**18, ge=2**10, le=2**24)
    most_documents: int = Field(default=20_000, ge=LEAST_DOCUMENTS)
    held_out: float = Field(default=0.1, gt=0, lt=1)

    @property
    def judged(self) -> tuple[str, ...]:
        return self.apply_to or self.negative
