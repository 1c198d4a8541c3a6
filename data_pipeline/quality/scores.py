"""Quality scores of documents as signals: a column for each classifier that the recipe names.

A model is a fastText supervised model (.bin or .ftz), such as DCLM's or one that `fasttext supervised` trained, or a
linear model that `gristmill quality fit` wrote: the score is the probability of one of its labels; fastText's is that
which its `predict` gives for the whole text on one line. Or an n-gram language model of `gristmill quality
language-model`: the score is the mean log2-probability of a token."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from gristmill.data_pipeline.quality import ngram_lm
from gristmill.data_pipeline.quality.config import FITTED_NAME, REPORTS_NAME
from gristmill.data_pipeline.quality.linear_model import (
    FORMAT,
    HEADER_BYTES,
    LinearModel,
    header_keys,
    is_safetensors,
    load_linear_model,
)
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.fasttext_model import FastTextModel
from gristmill.data_pipeline.signals.fasttext_predict import MAX_CHARACTERS, NO_LABEL, label_scores, predict
from gristmill.data_pipeline.signals.language import (
    fasttext_labels,
    fasttext_path,
    file_sha256,
    is_fasttext,
    load_fasttext,
    model_file,
)
from gristmill.foundation.config import Config
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json

PREFIX, LABELS_PREFIX = "quality_", "label_"
NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
LABEL_PREFIX = "__label__"

Kind = Literal["fasttext", "linear", "ngram"]


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


class LabelConfig(Config):
    """model: a supervised fastText file with several labels, as of topics, or hf://OWNER/REPO@COMMIT/FILE."""

    model: str = Field(json_schema_extra={"execution": True})


class DocumentLabel(Config):
    """A classifier of a source whose likeliest label is stored, by the digest of its file."""

    name: str
    digest: str
    path: str = Field(exclude=True)

    def arrow_field(self) -> pa.Field:
        return pa.field(LABELS_PREFIX + self.name, pa.string())


def check_names(names: Iterable[str], field: str = "quality_scores", prefix: str = PREFIX) -> None:
    """Raises ValueError for a name that would be no column."""
    for name in names:
        if not NAME.fullmatch(name) or prefix + name == "quality_score":
            raise ValueError(
                f"{field}: {name!r} becomes the column {prefix}{name}; write small letters, digits and _, a letter "
                "first, and not `score`, which curate.quality writes"
            )


def locked_labels(labels: Mapping[str, LabelConfig]) -> tuple[DocumentLabel, ...]:
    """The classifiers with the digests of their files, by name. Raises RecipeError for a file that is absent or no
    fastText model, InputError for a damaged one."""
    locked = []
    for name, config in sorted(labels.items()):
        path = fasttext_path(config.model, f"curate.labels.{name}.model", "a supervised model")
        fasttext_labels(path)
        locked.append(DocumentLabel(name=name, digest=file_sha256(path), path=str(path)))
    return tuple(locked)


def label_columns(texts: TextBuffer, labels: Sequence[DocumentLabel]) -> list[pa.Array]:
    """The likeliest label of each text without `__label__`; null for a text without words."""
    columns = []
    for classifier in labels:
        model, names = _fasttext_model(classifier.path, classifier.digest)
        likeliest, _ = predict(texts, model, MAX_CHARACTERS, skip_capitals=False)
        places = pa.array(np.where(likeliest == NO_LABEL, len(names), likeliest))
        columns.append(pa.array([*names, None], pa.string()).take(places))
    return columns


def locked_scores(scores: Mapping[str, QualityScoreConfig]) -> tuple[QualityScore, ...]:
    """The models with the digests of their files, by name. Raises RecipeError for a file that is absent or no model,
    and for a label that it lacks; InputError for a damaged one."""
    locked = []
    for name, config in sorted(scores.items()):
        field = f"curate.quality_scores.{name}"
        path = model_file(config.model, f"{field}.model", "a fastText model, or one of `gristmill quality`")
        kind = model_kind(path, f"{field}.model")
        label = _label(config.label, path, kind, f"{field}.label")
        locked.append(QualityScore(name=name, label=label, digest=file_sha256(path), path=str(path), kind=kind))
    return tuple(locked)


def write_model_reports(scores: Mapping[str, QualityScoreConfig], folder: Path) -> None:
    """Writes FOLDER/models.json: column -> labels, AUC and reliability of each linear model that was measured, also of
    one that curation fitted into the folder; nothing if there is none."""
    paths = {score.column: Path(score.path) for score in locked_scores(scores) if score.kind == "linear"}
    if (folder / FITTED_NAME).is_file():
        paths["quality_score"] = folder / FITTED_NAME
    models = {column: load_linear_model(path) for column, path in paths.items()}
    reports = {column: {"labels": model.labels, **model.report} for column, model in models.items() if model.report}
    if reports:
        folder.mkdir(exist_ok=True)
        write_atomic(folder / REPORTS_NAME, canonical_json(reports) + b"\n")


def model_kind(path: Path, field: str) -> Kind:
    """The kind by the file's first bytes. Raises RecipeError for another file."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES + 1)
    if is_fasttext(head):
        return "fasttext"
    kinds: dict[str, Kind] = {FORMAT: "linear", ngram_lm.FORMAT: "ngram"}
    if is_safetensors(head, path.stat().st_size):
        for name in header_keys(path):
            if name in kinds:
                return kinds[name]
    raise RecipeError(
        f"{field}: {path} is no fastText model (.bin or .ftz) and no model of `gristmill quality`; fit or download it "
        "again"
    )


def _label(label: str | None, path: Path, kind: Kind, field: str) -> str:
    """The label that is scored; empty for a language model. Raises RecipeError if the model lacks it."""
    if kind == "ngram":
        if label is not None:
            raise RecipeError(f"{field}: {path} is a language model, which has no labels; leave label out")
        _ngram_model(str(path), file_sha256(path))
        return ""
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
    if score.kind == "ngram":
        return _ngram_model(score.path, score.digest).scores(texts)
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


@lru_cache(maxsize=4)
def _ngram_model(path: str, digest: str) -> ngram_lm.NgramModel:
    """Read once per process."""
    return ngram_lm.load_ngram_model(Path(path))
