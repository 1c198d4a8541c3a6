"""The quality step of curation: train a classifier on the recipe's sources, score documents, select which to keep."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.ledger.document_file import packed_ids
from gristmill.data_pipeline.ledger.parquet_rows import RowRange, read_rows
from gristmill.data_pipeline.ledger.removal_step import RemovalStep
from gristmill.data_pipeline.quality.classifier import (
    METADATA_NAME,
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
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.nearest_name import did_you_mean

SCORED_ROWS = 1024  # texts of a batch, in memory as Python strings
LOWEST = np.dtype([("hash", np.uint64), ("id", np.uint64, 2), ("file", np.int64), ("row", np.int64)])


class ScoredSource(Protocol):
    """The part of SourceState that this step reads."""

    @property
    def source(self) -> SourceConfig: ...
    @property
    def paths(self) -> tuple[Path, ...]: ...
    @property
    def files(self) -> range: ...
    def kept_masks(self) -> Iterator[np.ndarray]: ...


@dataclass(frozen=True)
class ScoreTask:
    """Score every row of an annotated file into a .npy file beside the classifier."""

    annotated: Path
    classifier: Path
    path: Path


def score_quality(
    sources: Sequence[ScoredSource], config: QualityConfig, cache: Path, folder: Path, engine: Engine
) -> tuple[RemovalStep, dict[Path, Path]]:
    """Return (the removal step, annotated file -> file of its scores); save the classifier in `folder`.

    It is trained on the documents that the filters kept. Raises RecipeError for a source that is not in the recipe."""
    by_name = {one.source.name: one for one in sources}
    for name in (*config.positive, *config.negative, *config.apply_to):
        _check_name(name, list(by_name))
    work = cache / fingerprint(_identity(sources, config))
    if not all(is_sealed(work / name) for name in (WEIGHTS_NAME, METADATA_NAME)):
        _train(by_name, config).save(work)
        for name in (WEIGHTS_NAME, METADATA_NAME):
            seal(work / name)
    load_classifier(work).save(folder)
    scored_sources = [by_name[name] for name in config.scored]
    tasks = [ScoreTask(path, work, work / f"{path.stem}.npy") for one in scored_sources for path in one.paths]
    engine.map(score, tasks, "quality", [float(task.annotated.stat().st_size) for task in tasks], "B")
    scores = {task.annotated: task.path for task in tasks}
    return _removed(scored_sources, scores, config), scores


def score(task: ScoreTask) -> None:
    """Write the task's scores, unless the file exists."""
    if task.path.exists():
        return
    classifier = load_classifier(task.classifier)
    with pq.ParquetFile(task.annotated) as file:
        batches = file.iter_batches(SCORED_ROWS, columns=["text"])
        found = [classifier.scores(batch.column("text").to_pylist()) for batch in batches]
    with sealed_path(task.path) as temporary, temporary.open("wb") as file:
        np.save(file, np.concatenate([np.empty(0), *found]))


def _removed(scored_sources: Sequence[ScoredSource], scores: dict[Path, Path], config: QualityConfig) -> RemovalStep:
    """The documents of these sources with too low a score."""
    removed: dict[str, list[np.ndarray]] = {
        "files": [np.empty(0, np.int32)],
        "rows": [np.empty(0, np.int64)],
        "values": [np.empty(0)],
        "thresholds": [np.empty(0)],
    }
    for one in scored_sources:
        kept_rows = [np.flatnonzero(mask) for mask in one.kept_masks()]
        file_of = np.repeat(np.array(one.files, np.int32), [len(kept) for kept in kept_rows])
        row_of = np.concatenate([np.empty(0, np.int64), *kept_rows])
        pairs = zip(one.paths, kept_rows, strict=True)
        found = np.concatenate([np.empty(0), *(np.load(scores[path])[kept] for path, kept in pairs)])
        ids = _ids(one) if config.keep == "pareto" else np.empty((0, 2), np.uint64)
        kept_mask, min_scores = select_documents(found, ids, config)
        for name, of_document in (("files", file_of), ("rows", row_of), ("values", found), ("thresholds", min_scores)):
            removed[name].append(of_document[~kept_mask])
    columns = {name: np.concatenate(column) for name, column in removed.items()}
    files, rows, values = columns["files"], columns["rows"], columns["values"]
    return RemovalStep("quality", config.value, files, rows, values, thresholds=columns["thresholds"]).sorted()


def _ids(one: ScoredSource) -> np.ndarray:
    """uint64[N, 2]: the packed ids of the source's kept documents."""
    found = [np.empty((0, 2), np.uint64)]
    for path, mask in zip(one.paths, one.kept_masks(), strict=True):
        found.append(packed_ids(pq.read_table(path, columns=["doc_id"]).column("doc_id"), path)[mask])
    return np.concatenate(found)


def _train(by_name: dict[str, ScoredSource], config: QualityConfig) -> QualityClassifier:
    sides = [
        [text for name in names for text in _texts(by_name[name], config)]
        for names in (config.positive, config.negative)
    ]
    inputs = [path.name for one in by_name.values() for path in one.paths]
    return train_classifier(sides[0], sides[1], config, inputs)


def _texts(one: ScoredSource, config: QualityConfig) -> list[str]:
    """The source's kept texts with the lowest hashes, at most max_documents, in the order of their hashes.

    Memory: 40 bytes for each of max_documents and for each document of a file."""
    chosen = np.empty(0, LOWEST)
    for number, (path, mask) in enumerate(zip(one.paths, one.kept_masks(), strict=True)):
        table = pq.read_table(path, columns=["text_hash", "doc_id"]).filter(pa.array(mask))
        mine = np.empty(len(table), LOWEST)
        mine["hash"], mine["file"], mine["row"] = table.column("text_hash").to_numpy(), number, np.flatnonzero(mask)
        mine["id"] = packed_ids(table.column("doc_id"), path)
        chosen = np.concatenate([chosen, mine])
        chosen = chosen[np.lexsort((chosen["id"][:, 1], chosen["id"][:, 0], chosen["hash"]))[: config.max_documents]]
    texts = np.empty(len(chosen), object)
    for number, path in enumerate(one.paths):
        places = np.flatnonzero(chosen["file"] == number)
        places = places[np.argsort(chosen["row"][places])]
        if len(places):
            read = read_rows(RowRange.of_rows(path, chosen["row"][places]), ["text"])
            texts[places] = read.column("text").to_pylist()
    return texts.tolist()


def _identity(sources: Sequence[ScoredSource], config: QualityConfig) -> list:
    """Identity of the training data and settings: annotated files, their kept rows, the relevant config fields."""
    names = {*config.positive, *config.negative, *config.scored}
    files = [
        [path.name for path in one.paths]
        + [hashlib.sha256(np.packbits(mask).tobytes()).hexdigest() for mask in one.kept_masks()]
        for one in sources
        if one.source.name in names
    ]
    return [files, config.model_dump(mode="json", exclude={"keep", "value"})]


def _check_name(name: str, known: list[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known, otherwise=f"sources are {', '.join(known)}")
        raise RecipeError(f"curate.quality names {name!r}, but there is no source of this name; {hint}")
