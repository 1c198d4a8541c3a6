"""Quality scores of documents as signals: a column for each classifier that the recipe names.

A model is a fastText supervised model (.bin or .ftz), such as DCLM's or one that `fasttext supervised` trained, or a
linear model that `gristmill quality fit` wrote. The score is the probability of one of its labels; fastText's is that
which its `predict` gives for the whole text on one line."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from gristmill.data_pipeline.quality.linear_model import HEADER_BYTES, LinearModel, is_safetensors, load_linear_model
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.fasttext_model import FastTextModel
from gristmill.data_pipeline.signals.fasttext_predict import label_scores
from gristmill.data_pipeline.signals.language import (
    fasttext_labels,
    file_sha256,
    is_fasttext,
    load_fasttext,
    model_file,
)
from gristmill.foundation.config import Config
from gristmill.foundation.errors import RecipeError

PREFIX = "quality_"
NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
LABEL_PREFIX = "__label__"

Kind = Literal["fasttext", "linear"]


class QualityScoreConfig(Config):
    """model: a fastText file, a file of `gristmill quality fit`, or hf://OWNER/REPO@COMMIT/FILE; the fingerprint has
    its digest, not its path. label: the one whose probability is the score, with or without `__label__`; by
    default a linear model's positive one."""

    model: str = Field(json_schema_extra={"execution": True})
    label: str | None = Field(default=None, min_length=1)


class QualityScore(Config):
    """A model of a source, by the digest of its file. path: of the file, not part of the fingerprint."""

    name: str
    label: str
    digest: str
    path: str = Field(exclude=True)
    kind: Kind = Field(exclude=True)

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
    """The models with the digests of their files, by name. Raises RecipeError for a file that is absent or no model,
    and for a label that it lacks; InputError for a damaged one."""
    pinned = []
    for name, config in sorted(scores.items()):
        field = f"curate.quality_scores.{name}"
        path = model_file(config.model, f"{field}.model", "a fastText model, or one of `gristmill quality fit`")
        kind = model_kind(path, f"{field}.model")
        label = _label(config.label, path, kind, f"{field}.label")
        pinned.append(QualityScore(name=name, label=label, digest=file_sha256(path), path=str(path), kind=kind))
    return tuple(pinned)


def model_kind(path: Path, field: str) -> Kind:
    """The kind by the file's first bytes. Raises RecipeError for another file."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES + 1)
    if is_fasttext(head):
        return "fasttext"
    if is_safetensors(head, path.stat().st_size):
        return "linear"
    raise RecipeError(
        f"{field}: {path} is no fastText model (.bin or .ftz) and no model of `gristmill quality fit`; fit or download "
        "it again"
    )


def _label(label: str | None, path: Path, kind: Kind, field: str) -> str:
    """The label that is scored. Raises RecipeError if the model lacks it."""
    labels = fasttext_labels(path) if kind == "fasttext" else _linear_model(str(path), file_sha256(path)).labels
    if label is None and kind == "linear":
        return labels[0]
    wanted = (label or "").removeprefix(LABEL_PREFIX)
    if wanted not in labels:
        said = "write the label that is scored" if label is None else f"{path} has no label {label!r}"
        raise RecipeError(f"{field}: {said}; its labels are {', '.join(labels)}")
    return wanted


def score_columns(texts: TextBuffer, scores: Sequence[QualityScore]) -> list[pa.Array]:
    return [pa.array(_values(texts, score), pa.float64(), from_pandas=True) for score in scores]


def _values(texts: TextBuffer, score: QualityScore) -> np.ndarray:
    """float64[N]; NaN where there is nothing to score."""
    if score.kind == "linear":
        return _linear_model(score.path, score.digest).label_scores(texts, score.label)
    model, labels = _fasttext_model(score.path, score.digest)
    return label_scores(texts, model, labels.index(score.label))


@lru_cache(maxsize=4)
def _fasttext_model(path: str, digest: str) -> tuple[FastTextModel, tuple[str, ...]]:
    """Read once per process."""
    return load_fasttext(path)


@lru_cache(maxsize=4)
def _linear_model(path: str, digest: str) -> LinearModel:
    """Read once per process."""
    return load_linear_model(Path(path))
