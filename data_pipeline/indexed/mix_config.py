"""Settings of a mix in a recipe: cells of documents by quality, topic and copies, and how often each cell is read."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config


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
