"""The quality step of curation: train a classifier on the recipe's sources, score documents, select which to keep."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.ledger.document_file import Mask, RowRange, packed_ids, read_rows
from gristmill.data_pipeline.ledger.removal_step import StoredRemovals, removed_dtype, write_removed
from gristmill.data_pipeline.quality.config import FITTED_NAME, QualityConfig
from gristmill.data_pipeline.quality.linear_model import FitSettings, fit_linear_model, load_linear_model
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.foundation.checksums import checksummed_path, matches_checksum, write_checksum
from gristmill.foundation.errors import InputError, RecipeError, did_you_mean
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, fetch

FIT_VERSION = 3  # raised whenever the code changes what is fitted
SCORED_ROWS = 1024  # texts of a batch, in memory as Python strings
COUNT = np.dtype([("score", "<u4"), ("times", "<i8")])  # score: in SCORE_STEPS
LOWEST = np.dtype([("hash", np.uint64), ("id", np.uint64, 2), ("file", np.int64), ("row", np.int64)])


class ScoredSource(Protocol):
    """The part of SourceState that this step reads."""

    @property
    def source(self) -> SourceConfig: ...
    @property
    def paths(self) -> Sequence[Path]: ...
    @property
    def files(self) -> range: ...
    def kept(self) -> Sequence[Mask]: ...
    def kept_masks(self) -> Iterator[np.ndarray]: ...


@dataclass(frozen=True)
class QualityFolders:
    """cache: takes models and scores. corpus: takes the model that is used. work: takes intermediate files."""

    cache: Path
    corpus: Path
    work: Path


@dataclass(frozen=True)
class ScoreTask:
    """Score every row of an annotated file into a .npy file beside the model."""

    annotated: Path
    model: Path
    path: Path


def score_quality(
    sources: Sequence[ScoredSource], config: QualityConfig, folders: QualityFolders, engine: Engine
) -> tuple[StoredRemovals, dict[str, Sequence[Path]]]:
    """Return (the removal step, source -> the file of scores of each of its annotated files).

    The model is fitted to the documents that the filters kept. This process holds 40 bytes of each document that the
    model is fitted to, and no text. Raises RecipeError for a source that is not in the recipe."""
    by_name = {source.source.name: source for source in sources}
    for name in (*config.positive, *config.negative, *config.apply_to):
        _check_name(name, list(by_name))
    work = folders.cache / fingerprint(_identity(sources, config))
    if not matches_checksum(work / FITTED_NAME):
        classes = [
            [_chosen_texts(by_name[name], config, folders.work / "chosen", engine) for name in names]
            for names in (config.positive, config.negative)
        ]
        engine.map(_fit, [FitTask(classes, config, work / FITTED_NAME)], "quality: fit")
    load_linear_model(fetch(work / FITTED_NAME)).save(folders.corpus / FITTED_NAME)
    scored_sources = [by_name[name] for name in config.scored]
    paths = [path for source in scored_sources for path in source.paths]
    tasks = LazySequence(
        lambda number: ScoreTask(paths[number], work / FITTED_NAME, _scores_path(work, paths[number])),
        range(len(paths)),
    )
    engine.map(score, tasks, "quality: score", [float(path.stat().st_size) for path in paths], "B")
    scores = {source.source.name: _scores_of(source, work) for source in scored_sources}
    return _remove_documents(scored_sources, scores, config, folders.work, engine), scores


def _scores_of(source: ScoredSource, work: Path) -> Sequence[Path]:
    return LazySequence(lambda file: _scores_path(work, source.paths[file]), range(len(source.paths)))


def _scores_path(work: Path, annotated: Path) -> Path:
    return work / f"{annotated.stem}.npy"


def score(task: ScoreTask) -> None:
    """Write the task's scores, unless the file exists. A text without tokens has the score 0."""
    if task.path.exists():
        return
    model = load_linear_model(fetch(task.model))
    with pq.ParquetFile(task.annotated) as file:
        batches = file.iter_batches(SCORED_ROWS, columns=["text"])
        scores = [np.nan_to_num(model.scores(TextBuffer.of(batch.column("text").to_pylist()))) for batch in batches]
    with checksummed_path(task.path) as temporary, temporary.open("wb") as file:
        np.save(file, np.concatenate([np.empty(0), *scores]))


@dataclass(frozen=True)
class SelectTask:
    """Choose the documents of an annotated file that are removed. scores: its file of scores. min_score: see
    `select_documents`. number: of the file among those of all sources; removed, counts: take its part."""

    annotated: Path
    scores: Path
    kept: Mask
    config: QualityConfig
    min_score: float
    number: int
    removed: PartitionedFiles
    counts: PartitionedFiles

    def kept_scores(self) -> tuple[np.ndarray, np.ndarray]:
        """(int64[kept documents] rows, float64[kept documents] scores)."""
        rows = np.flatnonzero(self.kept.mask())
        return rows, np.load(self.scores)[rows]


def _remove_documents(
    sources: Sequence[ScoredSource],
    scores: Mapping[str, Sequence[Path]],
    config: QualityConfig,
    folder: Path,
    engine: Engine,
) -> StoredRemovals:
    """Removes the documents of these sources with too low a score. Memory of this process: 8 MB, for the counts of the
    scores of one source."""
    num_files = max((source.files.stop for source in sources), default=0)
    removed = PartitionedFiles(folder / "removed", removed_dtype("row", "value", "threshold"), num_files, 1)
    counts = PartitionedFiles(folder / "counts", COUNT, num_files, 1)

    def task(source: ScoredSource, file: int, min_score: float = 0.0) -> SelectTask:
        path, of_source = source.paths[file], scores[source.source.name]
        return SelectTask(
            path, of_source[file], source.kept()[file], config, min_score, source.files[file], removed, counts
        )

    files: list[tuple[ScoredSource, int, float]] = []
    for source in sources:
        min_score = 0.0
        if config.keep == "quantile":
            tasks = LazySequence(partial(task, source), range(len(source.paths)))
            engine.map(_count_scores, tasks, "quality: count scores", unit="files")
            min_score = lowest_of_best(_summed(counts, source.files), config.value)
        files += [(source, file, min_score) for file in range(len(source.paths))]
    tasks = LazySequence(lambda number: task(*files[number]), range(len(files)))
    engine.map(_select, tasks, "quality: apply threshold", unit="files")
    return StoredRemovals("quality", config.value, removed, is_by_part=True)


def _count_scores(task: SelectTask) -> None:
    values, times = np.unique(np.rint(task.kept_scores()[1] * SCORE_STEPS).astype(np.uint32), return_counts=True)
    records = np.empty(len(values), COUNT)
    records["score"], records["times"] = values, times
    task.counts.write(task.number, records, np.array([0, len(records)]))


def _summed(counts: PartitionedFiles, numbers: Sequence[int]) -> np.ndarray:
    """int64[SCORE_STEPS + 1]: how many documents of these files have each score."""
    histogram = np.zeros(SCORE_STEPS + 1, np.int64)
    for number in numbers:
        records = counts.map_output(number)[1]
        histogram[records["score"]] += records["times"]
    return histogram


def _select(task: SelectTask) -> None:
    rows, scores = task.kept_scores()
    ids = np.empty((0, 2), np.uint64)
    if task.config.keep == "pareto":
        ids = packed_ids(pq.read_table(task.annotated, columns=["doc_id"]).column("doc_id"), task.annotated)[rows]
    kept, min_scores = select_documents(scores, ids, task.config, task.min_score)
    columns = {"row": rows, "value": scores, "threshold": min_scores}
    write_removed(task.removed, task.number, **{name: values[~kept] for name, values in columns.items()})


@dataclass(frozen=True)
class ChooseTask:
    """Find the kept documents of an annotated file with the lowest hashes. number: of the file in its source."""

    annotated: Path
    kept: Mask
    number: int
    max_documents: int


@dataclass(frozen=True)
class TextsTask:
    """Write the texts of these rows of an annotated file. ranks: of each among the texts of its source."""

    annotated: Path
    rows: np.ndarray
    ranks: np.ndarray
    path: Path


@dataclass(frozen=True)
class FitTask:
    """Fit the model to the texts of both classes, the positive one first: the files of each source."""

    classes: Sequence[Sequence[Sequence[Path]]]
    config: QualityConfig
    path: Path


def _chosen_texts(source: ScoredSource, config: QualityConfig, folder: Path, engine: Engine) -> Sequence[Path]:
    """The files of the source's kept texts with the lowest hashes, at most max_documents."""
    tasks = LazySequence(
        lambda file: ChooseTask(source.paths[file], source.kept()[file], file, config.max_documents),
        range(len(source.paths)),
    )
    chosen = np.empty(0, LOWEST)
    for of_file in engine.imap(_choose, tasks, "quality: choose documents", unit="files"):
        chosen = _lowest(np.concatenate([chosen, of_file]), config.max_documents)
    files = np.unique(chosen["file"])

    def texts_task(place: int) -> TextsTask:
        ranks = np.flatnonzero(chosen["file"] == files[place])
        ranks = ranks[np.argsort(chosen["row"][ranks])]
        path = source.paths[files[place]]
        return TextsTask(path, chosen["row"][ranks], ranks, folder / path.name)

    texts = LazySequence(texts_task, range(len(files)))
    engine.map(_write_texts, texts, "quality: read documents", unit="files")
    return [folder / source.paths[file].name for file in files.tolist()]


def _choose(task: ChooseTask) -> np.ndarray:
    """LOWEST[]. Memory: 40 bytes for each document of the file."""
    mask = task.kept.mask()
    table = pq.read_table(task.annotated, columns=["text_hash", "doc_id"]).filter(pa.array(mask))
    documents = np.empty(len(table), LOWEST)
    documents["hash"], documents["row"] = table.column("text_hash").to_numpy(), np.flatnonzero(mask)
    documents["id"], documents["file"] = packed_ids(table.column("doc_id"), task.annotated), task.number
    return _lowest(documents, task.max_documents)


def _lowest(documents: np.ndarray, count: int) -> np.ndarray:
    return documents[np.lexsort((documents["id"][:, 1], documents["id"][:, 0], documents["hash"]))[:count]]


def _write_texts(task: TextsTask) -> None:
    texts = read_rows(RowRange.of_rows(task.annotated, task.rows), ["text"])
    with checksummed_path(task.path) as temporary:
        pq.write_table(texts.append_column("rank", pa.array(task.ranks)), temporary, compression="lz4")


def _texts(paths: Sequence[Path]) -> list[str]:
    """The texts of a source in the order of their hashes."""
    tables = [pq.read_table(path) for path in paths]
    return pa.concat_tables(tables).sort_by("rank").column("text").to_pylist() if tables else []


def _fit(task: FitTask) -> None:
    config = task.config
    positive, negative = ([text for paths in of_class for text in _texts(paths)] for of_class in task.classes)
    labels = " and ".join(config.positive), " and ".join(config.negative)
    try:
        settings = FitSettings(config.ngram, config.features, config.held_out, labels)
        fit_linear_model(positive, negative, settings).save(task.path)
    except InputError as error:
        raise InputError(f"curate.quality: {error}") from error
    write_checksum(task.path)


def _identity(sources: Sequence[ScoredSource], config: QualityConfig) -> list:
    """Identity of the training data and settings: annotated files, their kept rows, the relevant config fields."""
    names = {*config.positive, *config.negative, *config.scored}
    files = [
        [path.name for path in source.paths]
        + [hashlib.sha256(np.packbits(mask).tobytes()).hexdigest() for mask in source.kept_masks()]
        for source in sources
        if source.source.name in names
    ]
    return [FIT_VERSION, files, config.model_dump(mode="json", exclude={"keep", "value"})]


def _check_name(name: str, known: list[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known, otherwise=f"sources are {', '.join(known)}")
        raise RecipeError(f"curate.quality names {name!r}, but there is no source of this name; {hint}")


# Selection of documents by a quality score: a threshold, the best share of a source, or a Pareto draw.
#
# The Pareto draw is that of GPT-3 (Brown et al. 2020, appendix A) and MT-NLG, which keeps some low-scoring documents.
# Here the draw is a function of the document's id.


SCORE_STEPS = 1_000_000  # scores are rounded to 6 digits


def lowest_of_best(counts: np.ndarray, share: float) -> float:
    """The lowest score of the best `share` of a source's documents; 0 for a source without any. counts: int64[], how
    many documents have the score 0, 1, 2, ... / SCORE_STEPS."""
    total = int(counts.sum())
    if not total:
        return 0.0
    place = min(max(total - round(share * total), 0), total - 1)
    return float(np.searchsorted(np.cumsum(counts), place, side="right")) / SCORE_STEPS


def select_documents(
    scores: np.ndarray, ids: np.ndarray, config: QualityConfig, min_score: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return (bool[N] kept documents, float64[N] minimum score for each to be kept).

    ids: uint64[N, 2], packed; only `pareto` reads them. min_score: of `quantile`, from `lowest_of_best`.

    pareto: GPT-3 keeps a document if np.random.pareto(alpha) > 1 - score; the draw is (1 - u)**(-1/alpha) - 1 with u
    from the document's id, so it does not depend on the order of the documents."""
    if config.keep == "all" or not len(scores):
        min_scores = np.zeros(len(scores))
    elif config.keep == "threshold":
        min_scores = np.full(len(scores), config.value)
    elif config.keep == "quantile":
        min_scores = np.full(len(scores), min_score)
    else:
        min_scores = 1.0 - pareto_draws(ids, config.value)
        return scores > min_scores, min_scores
    return scores >= min_scores, min_scores


def pareto_draws(ids: np.ndarray, alpha: float) -> np.ndarray:
    """float64[N] from packed ids uint64[N, 2]: their last 13 hex digits as a uniform number, independent of the split
    assignment."""
    uniform = (ids[:, 1] & np.uint64(16**13 - 1)).astype(np.float64) / 16.0**13
    return (1.0 - uniform) ** (-1.0 / alpha) - 1.0
