"""Settings of the indexed data in a recipe: how documents become samples, and samples a stream; how a
mix of cells is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError

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


# How often a run sees each source: from token counts, weights and the tokens of the run, before anything is drawn.

# Up to 4 epochs of repeated data change the loss little against as much new data; from there on its value falls
# (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", arXiv:2305.16264, abstract).
MAX_EPOCHS_UNWARNED = 4.0


def blend_weights(weights: Mapping[str, float | None], tokens: Mapping[str, int]) -> dict[str, float]:
    """The weights as they are given, or, where none is, each source's share of the tokens.

    ({"a": None, "b": None}, {"a": 300, "b": 100}) -> {"a": 0.75, "b": 0.25}. Raises ValueError if only some are
    given: whether a missing one means 1, a share of the tokens or what the others leave cannot be told."""
    check_all_or_none(weights)
    total = max(1, sum(tokens.values()))
    return {name: tokens[name] / total if weight is None else weight for name, weight in weights.items()}


def check_all_or_none(weights: Mapping[str, float | None]) -> None:
    given = [name for name, weight in weights.items() if weight is not None]
    missing = [name for name, weight in weights.items() if weight is None]
    if given and missing:
        raise ValueError(
            f"source {given[0]!r} has a weight and source {missing[0]!r} has none; give every source a weight, or "
            "none: then each is drawn in proportion to its tokens"
        )


def tokens_drawn(
    weights: Mapping[str, float], train_tokens: int, phases: Sequence[PhaseConfig] = ()
) -> dict[str, float]:
    """Tokens that a run of `train_tokens` takes from each source; phases replace the weights, as in a run.

    ({"a": 3.0, "b": 1.0}, 400) -> {"a": 300.0, "b": 100.0}."""
    drawn = dict.fromkeys(weights, 0.0)
    stretches: list[tuple[int, Mapping[str, float]]] = [(phase.from_tokens, phase.weights) for phase in phases]
    stretches = stretches or [(0, weights)]
    ends = [start for start, _ in stretches[1:]] + [train_tokens]
    for (start, shares), end in zip(stretches, ends, strict=True):
        present = {name: share for name, share in shares.items() if name in drawn}
        for name, share in present.items():
            drawn[name] += max(0, min(end, train_tokens) - start) * share / sum(present.values())
    return drawn


def epochs_by_source(
    tokens: Mapping[str, int],
    weights: Mapping[str, float | None],
    train_tokens: int,
    phases: Sequence[PhaseConfig] = (),
) -> dict[str, float]:
    """How often a run of `train_tokens` sees the tokens of each source; sources without tokens are left out.

    tokens {"a": 100, "b": 10}, weights 3 and 1, 400 tokens -> {"a": 3.0, "b": 10.0}."""
    drawn = tokens_drawn(blend_weights(weights, tokens), train_tokens, phases)
    return {name: drawn[name] / tokens[name] for name in tokens if tokens[name]}


def repeat_warnings(epochs: Mapping[str, float], tokens: Mapping[str, int], train_tokens: int) -> list[str]:
    """A line for each source that is seen more than 4 times, with the numbers and what to change."""
    return [
        f"warning: source {name!r} has {tokens[name]:,} tokens and is seen {times:.1f} times in a run of "
        f"{train_tokens:,}; text repeated more than {MAX_EPOCHS_UNWARNED:g} times teaches little: give it a share of "
        f"{MAX_EPOCHS_UNWARNED * tokens[name] / train_tokens:.2%} or less, train on fewer tokens, or add text"
        for name, times in epochs.items()
        if times > MAX_EPOCHS_UNWARNED
    ]


# What a run draws from each source, computed without drawing: shares, epochs, caps.


@dataclass(frozen=True)
class Draw:
    """Samples that a run takes from one source. epoch_samples: samples in one pass over it. cap: of the passes."""

    source: str
    samples: int
    epoch_samples: int
    sample_tokens: int
    cap: float | None

    @property
    def tokens(self) -> int:
        return self.samples * self.sample_tokens

    @property
    def epochs(self) -> float:
        """How often the run sees the source."""
        return self.samples / self.epoch_samples


class DrawForecast:
    """Forecasts for a run of `num_samples`, from what a subclass gives as `drawn`."""

    def drawn(self, num_samples: int) -> list[Draw]:
        raise NotImplementedError

    def budget(self, num_samples: int) -> str:
        """The draws of a run in a line: "books 75.0% (12,288 tokens, 0.41 epochs), notes 25.0% (...)"."""
        draws = self.drawn(num_samples)
        whole = max(1, sum(draw.tokens for draw in draws))
        return ", ".join(
            f"{draw.source} {draw.tokens / whole:.1%} ({draw.tokens:,} tokens, {draw.epochs:.2f} epochs)"
            for draw in draws
        )

    def repeat_warnings(self, num_samples: int) -> list[str]:
        """A line for each source that a run of `num_samples` sees more than 4 times."""
        draws = self.drawn(num_samples)
        epochs = {draw.source: draw.epochs for draw in draws}
        tokens = {draw.source: draw.epoch_samples * draw.sample_tokens for draw in draws}
        return repeat_warnings(epochs, tokens, sum(draw.tokens for draw in draws))

    def check_budget(self, num_samples: int) -> None:
        """Raises InputError, before training starts, if a run of `num_samples` would overdraw a capped source."""
        for draw in self.drawn(num_samples):
            if draw.cap is not None and draw.epochs > draw.cap:
                raise InputError(overdrawn(draw.source, draw.epochs, draw.cap))


def cap_of(config: IndexConfig, source: str) -> float | None:
    return config.max_epochs.get(source) if isinstance(config.max_epochs, dict) else config.max_epochs


def overdrawn(source: str, epochs: float, cap: float) -> str:
    return (
        f"source {source!r} would be seen {epochs:.2f} times, its cap is {cap}; train on fewer tokens, lower the "
        "source's weight, give it more text, or raise index.max_epochs"
    )
