"""What a recipe says about the indexed data: how documents become samples, and samples a stream."""

from typing import Literal, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config


class PhaseConfig(Config):
    """From `from_tokens` tokens on, sources are drawn with these weights; a source that is not named is not drawn."""

    from_tokens: int = Field(ge=0)
    weights: dict[str, float]

    @model_validator(mode="after")
    def weights_are_shares(self) -> Self:
        check_weights(self.weights)
        return self


class LanguageSampling(Config):
    """Sampling by language. A language's share p of the tokens becomes p**alpha, normalised (XLM-R, arXiv 1911.02116,
    section 3.1): 1 keeps the shares, and the smaller alpha is, the more equal they are. Then min_share raises small
    languages, and max_epochs lowers those that the run would repeat more often; the others share the rest.

    Languages of a source with fewer than min_tokens training tokens are sampled together as `other`."""

    alpha: float = Field(1.0, gt=0, le=1, description="exponent of a language's share of the tokens")
    min_share: float = Field(0.0, ge=0, lt=1, description="of the training tokens, of every language")
    max_epochs: float | None = Field(None, gt=0, lt=1e9, description="how often a run may see a language")
    min_tokens: int = Field(10_000, ge=1, description="training tokens below which a language is part of `other`")


class IndexConfig(Config):
    """packing: concat cuts the stream of documents every `sequence_length` tokens; best_fit keeps whole what fits.

    phases change the weights at given token counts; without any, the weights of the sources hold throughout.
    rehydrate: cluster size -> how often the kept document of a cluster of at least so many duplicates is written, as
    FineWeb-2 does; {2: 2, 10: 4, 1000: 1} reads: twice from 2 on, four times from 10 on, once from 1,000 on.
    Only `sentences`, `languages` and `rehydrate` change the .bin and .idx files, the others the samples that are drawn
    from them."""

    sentences: bool = Field(False, description="every sentence is a sequence of its own, for objectives on sentences")
    languages: LanguageSampling | None = Field(
        None, description="sample by language: every language of a source is a source of its own, SOURCE.LANGUAGE"
    )
    rehydrate: dict[int, int] = Field({}, description="times to write a document, by the size of its cluster")
    packing: Literal["concat", "best_fit"] = "concat"
    mask_documents: bool = Field(False, description="positions restart and attention stays inside each document")
    block_samples: int = Field(1024, ge=1, description="each source has its exact share in every so many samples")
    phases: tuple[PhaseConfig, ...] = ()
    max_epochs: float | dict[str, float] | None = Field(
        None, description="how often a source may be seen, at most: one number for all, or one a source"
    )
    fim_rate: float = Field(0.0, ge=0.0, le=1.0, description="share of documents turned to fill-in-the-middle")
    fim_suffix_first: float = Field(0.5, ge=0.0, le=1.0, description="share of those with the suffix before the prefix")
    fim_sources: tuple[str, ...] = Field((), description="sources it applies to; none named means all")

    @model_validator(mode="after")
    def phases_rise_from_zero(self) -> Self:
        starts = [phase.from_tokens for phase in self.phases]
        if starts and (starts[0] != 0 or starts != sorted(set(starts))):
            raise ValueError(f"phases start at {starts} tokens; the first starts at 0 and each later one after it")
        return self

    @model_validator(mode="after")
    def documents_are_repeated_a_few_times(self) -> Self:
        for size, times in self.rehydrate.items():
            if size < 2 or not 1 <= times <= 100:
                raise ValueError(f"rehydrate: {{{size}: {times}}}; sizes are 2 or more, and times 1 to 100")
        return self

    @model_validator(mode="after")
    def caps_are_positive(self) -> Self:
        caps = self.max_epochs.values() if isinstance(self.max_epochs, dict) else [self.max_epochs]
        if any(cap is not None and not 0 < cap < float("inf") for cap in caps):
            raise ValueError(f"max_epochs={self.max_epochs}: a cap is a number above 0; drop it for no cap")
        return self


def check_weights(weights: dict[str, float]) -> None:
    """Raises ValueError on a weight that is no share: zero, negative, NaN or infinite, or if there is none."""
    if not weights:
        raise ValueError("no weights; name at least one source with a weight above 0")
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise ValueError(
                f"weight of source {name!r} is {weight}; a weight is a finite number above 0: "
                "leave out a source that is not to be drawn"
            )
