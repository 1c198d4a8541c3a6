"""Quality scores of documents as signals: a column for each classifier that the recipe names.

A classifier is a fastText supervised model (.bin or .ftz), such as DCLM's or one that `fasttext supervised` trained.
The score is the probability of one of its labels, as fastText's `predict` gives it for the whole text on one line."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import pyarrow as pa
from pydantic import Field

from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.fasttext_model import FastTextModel
from gristmill.data_pipeline.signals.fasttext_predict import label_scores
from gristmill.data_pipeline.signals.language import fasttext_labels, fasttext_path, file_sha256, load_fasttext
from gristmill.foundation.config import Config
from gristmill.foundation.errors import RecipeError

PREFIX = "quality_"
NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
LABEL_PREFIX = "__label__"


class QualityScoreConfig(Config):
    """model: a fastText file, or hf://OWNER/REPO@COMMIT/FILE; the fingerprint has its digest, not its path. label: the
    one whose probability is the score, with or without `__label__`."""

    model: str = Field(json_schema_extra={"execution": True})
    label: str = Field(min_length=1)


class QualityScore(Config):
    """A classifier of a source, by the digest of its file. path: of the file, not part of the fingerprint."""

    name: str
    label: str
    digest: str
    path: str = Field(exclude=True)

    @property
    def column(self) -> str:
        return PREFIX + self.name

    def arrow_field(self) -> pa.Field:
        return pa.field(self.column, pa.float64())


def check_names(scores: Mapping[str, QualityScoreConfig]) -> None:
    """Raises ValueError for a name that would be no column."""
    for name in scores:
        if not NAME.fullmatch(name) or name == "score":
            raise ValueError(
                f"quality_scores: {name!r} becomes the column {PREFIX}{name}; write small letters, digits and _, a "
                "letter first, and not `score`, which curate.quality writes"
            )


def pinned_scores(scores: Mapping[str, QualityScoreConfig]) -> tuple[QualityScore, ...]:
    """The classifiers with the digests of their files, by name. Raises RecipeError for a file that is absent or no
    fastText model, and for a label that it lacks; InputError for a damaged one."""
    pinned = []
    for name, config in sorted(scores.items()):
        field = f"curate.quality_scores.{name}"
        path = fasttext_path(config.model, f"{field}.model")
        labels = fasttext_labels(path)
        label = config.label.removeprefix(LABEL_PREFIX)
        if label not in labels:
            raise RecipeError(
                f"{field}.label: {path} has no label {config.label!r}; its labels are {', '.join(labels)}"
            )
        pinned.append(QualityScore(name=name, label=label, digest=file_sha256(path), path=str(path)))
    return tuple(pinned)


def score_columns(texts: TextBuffer, scores: Sequence[QualityScore]) -> list[pa.Array]:
    columns = []
    for score in scores:
        model, labels = _loaded(score.path, score.digest)
        values = label_scores(texts, model, labels.index(score.label))
        columns.append(pa.array(values, pa.float64(), from_pandas=True))
    return columns


@lru_cache(maxsize=4)
def _loaded(path: str, digest: str) -> tuple[FastTextModel, tuple[str, ...]]:
    """Read once per process."""
    return load_fasttext(path)
