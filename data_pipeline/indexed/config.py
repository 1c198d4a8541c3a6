"""Settings of the indexed data in a recipe: how documents become samples, and samples a stream; how a mix is read."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config

# Settings of a mix in a recipe: cells of documents by quality, topic and copies, and how often each cell is read.


class MixConfig(Config):
    """Documents of a source are ranked by `score` within their language and cut into `buckets` of equally many tokens,
    0 the worst. With `topic` each label has its own cells, and with `copies` each class of cluster sizes.

    A cell is read in proportion to (rank - drop)**power, where the rank is the middle of its bucket from 0 to 1 (0
    below `drop`), times topics[label], times the entry of `copies`; or to the entry of `repeats` that matches its name.
    The numbers of times are scaled so that together they are the source's share of train.tokens, none above max_epochs.
    `score`, `buckets`, `topic`, `sources` and the sizes in `copies` decide the .bin and .idx files, the rest the
    samples that are drawn from them."""

    score: str = Field(min_length=1, description="a stored number of every document, such as quality_NAME")
    buckets: int = Field(20, ge=2, le=100, description="classes of quality of each source")
    topic: str | None = Field(None, description="a stored label of every document, such as label_NAME")
    sources: tuple[str, ...] = Field((), description="sources that are cut into cells; none named means all")
    power: float = Field(1.0, ge=0, le=20, description="0: all buckets alike; the larger, the more the best are read")
    drop: float = Field(0.0, ge=0, lt=1, description="share of the tokens, of the lowest scores, that is not read")
    topics: dict[str, float] = Field({}, description="factor of a topic; 1 for those that are not named")
    copies: dict[int, float] = Field(
        {}, description="factor by cluster size: of documents with at least so many duplicates; 1 below"
    )
    repeats: dict[str, float] = Field(
        {}, description="factors by name of the cell, web.q19 or web.q1?; what no pattern matches is not read"
    )
    max_epochs: float = Field(4.0, gt=0, lt=1e6, description="how often a cell is read, at most")

    def cells(self) -> dict[str, Any]:
        """The settings that decide which document is in which cell."""
        return {
            "score": self.score,
            "buckets": self.buckets,
            "topic": self.topic,
            "sources": sorted(self.sources),
            "copies": sorted(self.copies),
        }

    @model_validator(mode="after")
    def factors_are_positive(self) -> Self:
        tables: dict[str, Mapping[Any, float]] = {"topics": self.topics, "copies": self.copies, "repeats": self.repeats}
        for name, table in tables.items():
            for key, factor in table.items():
                if not 0 <= factor < 1e6:
                    raise ValueError(f"mix.{name}: {key}: {factor}; a factor is 0 or more")
        if self.topics and self.topic is None:
            raise ValueError("mix.topics: no mix.topic names the column of the labels")
        if any(size < 2 for size in self.copies):
            raise ValueError(f"mix.copies: sizes {sorted(self.copies)}; a cluster has at least 2 documents")
        if self.repeats and (self.topics or self.drop or "power" in self.model_fields_set):
            raise ValueError("mix.repeats: factors by cell replace power, drop and topics; leave those out")
        return self


class PhaseConfig(Config):
    """From `from_tokens` tokens on, sources are drawn with these weights; a source that is not named is not drawn."""

    from_tokens: int = Field(ge=0)
    weights: dict[str, float]

    @model_validator(mode="after")
    def weights_are_shares(self) -> Self:
        check_weights(self.weights)
        return self


class LanguageSampling(Config):
    """Sampling by language. A language's share p of the tokens becomes p**alpha, normalized (XLM-R, arXiv 1911.02116,
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
    Only `sentences`, `languages`, `rehydrate` and the cells of `mix` change the .bin and .idx files, the others the
    samples that are drawn from them."""

    sentences: bool = Field(False, description="every sentence is a sequence of its own, for objectives on sentences")
    languages: LanguageSampling | None = Field(
        None, description="sample by language: every language of a source is a source of its own, SOURCE.LANGUAGE"
    )
    mix: MixConfig | None = Field(
        None,
        description="read documents by quality, topic and copies: cells of a source, each so often",
        json_schema_extra={"omit_default": True},
        exclude_if=lambda mix: mix is None,
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
    def a_mix_decides_alone(self) -> Self:
        others = ("sentences", "languages", "rehydrate", "phases")
        if self.mix is not None and (named := [name for name in others if getattr(self, name)]):
            raise ValueError(
                f"index.mix and index.{named[0]} both say how often documents are read; leave one out"
                + ("; index.mix.copies has factors by cluster size" if named[0] == "rehydrate" else "")
            )
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
