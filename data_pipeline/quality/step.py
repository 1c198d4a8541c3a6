"""The quality step of curation: train a classifier on the recipe's sources, score documents, select which to keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from gristmill.data_pipeline.ledger.ledger import RemovalStep
from gristmill.data_pipeline.ledger.parquet_rows import RowRange, read_rows, row_range_groups
from gristmill.data_pipeline.quality.classifier import (
    FACTS_NAME,
    WEIGHTS_NAME,
    QualityClassifier,
    load_classifier,
    select_documents,
    train_classifier,
)
from gristmill.data_pipeline.quality.config import QualityConfig
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.canonical_json import fingerprint
from gristmill.foundation.checksum_files import is_sealed, seal, sealed_path
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.nearest_name import did_you_mean


class ScoredSource(Protocol):
    """The part of SourceState that this step reads."""

    @property
    def source(self) -> SourceConfig: ...
    @property
    def paths(self) -> tuple[Path, ...]: ...
    @property
    def doc_ids(self) -> np.ndarray: ...
    @property
    def hashes(self) -> np.ndarray: ...
    @property
    def kept(self) -> np.ndarray: ...
    def slices(self, rows: np.ndarray) -> tuple[RowRange, ...]: ...


@dataclass(frozen=True)
class ScoreTask:
    """Score every row of an annotated file into a .npy file beside the classifier."""

    annotated: Path
    classifier: Path
    path: Path
    num_rows: int


def score_quality(
    sources: Sequence[ScoredSource], config: QualityConfig, cache: Path, folder: Path, engine: LocalEngine
) -> tuple[RemovalStep, dict[Path, Path]]:
    """Return (the removal step, annotated file -> file of its scores); save the classifier in `folder`.

    It is trained on the documents that the filters kept. Raises RecipeError for a source that is not in the recipe."""
    by_name = {one.source.name: one for one in sources}
    for name in (*config.positive, *config.negative, *config.apply_to):
        _check_name(name, list(by_name))
    work = cache / fingerprint(_identity(sources, config))
    if not all(is_sealed(work / name) for name in (WEIGHTS_NAME, FACTS_NAME)):
        _train(by_name, config).save(work)
        for name in (WEIGHTS_NAME, FACTS_NAME):
            seal(work / name)
    load_classifier(work).save(folder)
    scored_sources = [by_name[name] for name in config.scored]
    tasks = [
        ScoreTask(path, work, work / f"{path.stem}.npy", rows)
        for one in scored_sources
        for path, rows in zip(one.paths, _rows(one), strict=True)
    ]
    engine.map(score, tasks, "quality", [float(task.annotated.stat().st_size) for task in tasks], "B")
    scores = {task.annotated: task.path for task in tasks}
    return _taken(scored_sources, scores, config), scores


def score(task: ScoreTask) -> None:
    """Write the task's scores, unless the file exists."""
    if task.path.exists():
        return
    classifier = load_classifier(task.classifier)
    cut = RowRange(task.annotated, np.arange(task.num_rows))
    found = [classifier.scores(table.column("text").to_pylist()) for table in row_range_groups(cut, ["text"])]
    with sealed_path(task.path) as temporary, temporary.open("wb") as file:
        np.save(file, np.concatenate([np.empty(0), *found]))


def _taken(scored_sources: Sequence[ScoredSource], scores: dict[Path, Path], config: QualityConfig) -> RemovalStep:
    taken, values, thresholds = [], [], []
    for one in scored_sources:
        found = np.concatenate([np.empty(0), *(np.load(scores[path]) for path in one.paths)])[one.kept]
        doc_ids = one.doc_ids[one.kept]
        kept_mask, min_scores = select_documents(found, doc_ids, config)
        taken.append(doc_ids[~kept_mask])
        values.append(found[~kept_mask])
        thresholds.append(min_scores[~kept_mask])
    doc_ids = np.concatenate([np.empty(0, "S32"), *taken])
    order = np.argsort(doc_ids, kind="stable")
    no_duplicate = np.full(len(doc_ids), b"", dtype="S32")
    return RemovalStep(
        "quality",
        config.value,
        doc_ids[order],
        no_duplicate,
        np.concatenate([np.empty(0), *values])[order],
        np.concatenate([np.empty(0), *thresholds])[order],
    )


def _train(by_name: dict[str, ScoredSource], config: QualityConfig) -> QualityClassifier:
    sides = [
        [text for name in names for text in _texts(by_name[name], config)]
        for names in (config.positive, config.negative)
    ]
    inputs = [path.name for one in by_name.values() for path in one.paths]
    return train_classifier(sides[0], sides[1], config, inputs)


def _texts(one: ScoredSource, config: QualityConfig) -> list[str]:
    """The source's kept texts with the lowest hashes, at most max_documents, in the order of their hashes."""
    rows = np.flatnonzero(one.kept)
    chosen = rows[np.lexsort((one.doc_ids[rows], one.hashes[rows]))[: config.max_documents]]
    read = [text for cut in one.slices(np.sort(chosen)) for text in read_rows(cut, ["text"]).column("text").to_pylist()]
    place = np.searchsorted(np.sort(chosen), chosen)
    return [read[at] for at in place]


def _rows(one: ScoredSource) -> list[int]:
    """Rows of each annotated file."""
    counts = dict.fromkeys(one.paths, 0)
    for cut in one.slices(np.arange(len(one.doc_ids))):
        counts[cut.path] = len(cut.rows)
    return list(counts.values())


def _identity(sources: Sequence[ScoredSource], config: QualityConfig) -> list:
    """Identity of the training data and settings: annotated files, their kept rows, the relevant config fields."""
    names = {*config.positive, *config.negative, *config.scored}
    files = [
        [path.name for path in one.paths] + [np.packbits(one.kept).tobytes().hex()]
        for one in sources
        if one.source.name in names
    ]
    return [files, config.model_dump(mode="json", exclude={"keep", "value"})]


def _check_name(name: str, known: list[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known, otherwise=f"sources are {', '.join(known)}")
        raise RecipeError(f"curate.quality names {name!r}, but there is no source of this name; {hint}")
