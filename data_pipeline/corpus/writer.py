"""Writes the output folder of curation: shards, ledger, quarantine, examples, decontamination report. Takes what the
run before made of the same documents."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from gristmill.data_pipeline.corpus.shards import (
    ShardRows,
    ShardTask,
    SourceToWrite,
    held_out_shards,
    link_empty_shards,
    plan_shards,
    training_shards,
    write_shard_run,
)
from gristmill.data_pipeline.corpus.sketches import SketchTask
from gristmill.data_pipeline.corpus.small_sources import BatchTable, BatchToWrite, write_batch
from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.dedup.folding import document_ids, picked_texts
from gristmill.data_pipeline.filters.apply import EXAMPLES_PER_SIDE, KEPT_SIDE, REMOVED_SIDE
from gristmill.data_pipeline.filters.pii import PiiConfig
from gristmill.data_pipeline.ledger.document_file import unpacked_ids
from gristmill.data_pipeline.ledger.ledger import LedgerRows, LedgerTask, write_ledger
from gristmill.data_pipeline.ledger.removal_step import EvidenceFiles, Removals, RemovalStep, SourceState
from gristmill.foundation.checksums import cached_sha256, content_digest, link_with_checksum, matches_checksum
from gristmill.foundation.files import DigestCache, remove_tree, write_atomic
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence, joined

# Files of a corpus that are taken from the run before: shards, ledgers and sketches made from the same documents.
#
# `cache/outputs/KEY/` holds hard links to the files of one task by their suffixes. A key is the fingerprint of all that
# decides the bytes: the documents by id (an annotated file's name and an id say what the document is), settings, and
# outcomes. Where the file system has no hard links nothing is kept.

OUTPUT_CACHE = "outputs"  # in the cache of a work folder
ANNOTATED_FOLDER = "annotated"


@dataclass(frozen=True)
class ReusedFiles:
    """folder: takes the links. code_version: of the stage; files of another one are of no use. corpus: the folder that
    gets a manifest; digests: takes the SHA-256 of each kept file in it, which is not read again for that. taken: keys
    of which this run took the files."""

    folder: Path
    code_version: int
    corpus: Path
    digests: DigestCache
    taken: set[str] = field(default_factory=set)

    def take(self, key: str, files: Mapping[str, Path]) -> bool:
        """Links the kept files of the key to these paths, by name; False, and nothing is done, if one is missing."""
        kept = {name: self._of_key(key) / name for name in files}
        if not all(matches_checksum(path) for path in kept.values()):
            return False
        for name, path in files.items():
            link_with_checksum(kept[name], path)
            self._add_digest(path)
        self.taken.add(key)
        return True

    def keep(self, key: str, files: Mapping[str, Path]) -> None:
        """Keeps links to the files, for the next run."""
        if key in self.taken:
            return
        try:
            for name, path in files.items():
                self._add_digest(path)
                if not matches_checksum(self._of_key(key) / name):
                    link_with_checksum(path, self._of_key(key) / name, may_copy=False)
        except OSError:  # no hard links here
            remove_tree(self._of_key(key))

    def _add_digest(self, path: Path) -> None:
        if path.is_relative_to(self.corpus):
            self.digests.add(path, cached_sha256(path))

    def prune(self, keys: Collection[str]) -> None:
        """Removes the files of all other keys."""
        names = {self._of_key(key).name for key in keys}
        for folder in self.folder.glob("*"):
            if folder.name not in names:
                remove_tree(folder)

    def _of_key(self, key: str) -> Path:
        return self.folder / f"{self.code_version}-{key}"


# Keys.


def shard_key(task: ShardTask) -> str:
    scores = None if task.scores is None else [content_digest(path) for path in task.scores]
    return fingerprint(
        [
            task.split,
            _described(task.format),
            [_rows_digest(rows) for rows in task.rows],
            scores,
            sorted(task.held_out),
        ]
    )


def shard_files(task: ShardTask) -> dict[str, Path]:
    """Files that the task writes, by name."""
    held_out = {f"held_out-{split}.arrow": path for split, path in task.held_out.items()}
    return {"documents.parquet": task.documents, "signals.parquet": task.signals, **held_out}


def ledger_key(task: LedgerTask) -> str:
    rows = [_ledger_rows_digest(rows) for rows in task.rows]
    return fingerprint([task.source, task.rules.description, task.split_names, rows])


def sketch_key(tasks: Sequence[SketchTask]) -> str:
    """Key of a sketch by the content of the tables that it is made from, and the texts that it quotes."""
    return fingerprint([_sketched(task) for task in tasks])


def _sketched(task: SketchTask) -> list[Any]:
    files = [task.table] + ([] if task.is_ledger else [task.signals])
    tables = list(task.digests) or [content_digest(path) for path in files]
    quoted = [_identity_of(rows.path) for rows in task.rows]
    return [task.name.split("/")[:-1], task.source, tables, quoted, _described(task.pii)]


def _described(value: Any) -> str:
    """Text that is equal for equal settings."""
    return repr(value)


def _rows_digest(rows: ShardRows) -> list[str]:
    if rows.results is None:
        return [content_digest(rows.path), f"{rows.start}-{rows.stop}"]
    row_range, splits = rows.load()
    if _is_annotated(rows.path):
        return [rows.path.stem, _digest(_ids(rows.path)[row_range.rows], splits)]
    return [content_digest(rows.path), _digest(row_range.rows, splits)]


def _ledger_rows_digest(rows: LedgerRows) -> list[str]:
    results, chosen = rows.results.load(), slice(rows.start, rows.stop)
    ids = _ids(rows.path)[chosen]
    outcomes = [results.failed_rule[chosen], results.splits[chosen]]
    steps = []
    for step in rows.removals:
        removed = step.in_file(rows.file).in_rows(rows.start, rows.stop)
        steps.append([removed.step, repr(removed.threshold), list(removed.rule_names), _digest(*_columns(removed))])
    return [rows.path.stem, _digest(ids, *outcomes), repr(steps), *_evidence(rows.evidence)]


def _columns(removed: RemovalStep) -> list[np.ndarray]:
    columns = (removed.rows, removed.values, removed.duplicate_of, removed.thresholds, removed.rules)
    return [column for column in columns if column is not None]


def _evidence(files: EvidenceFiles) -> list[str]:
    others = [path for path in (files.matches, files.pieces) if path is not None]
    return [content_digest(path) for path in (*files.removed_spans, *others)]


def _is_annotated(path: Path) -> bool:
    return path.parent.name == ANNOTATED_FOLDER


def _identity_of(path: Path) -> str:
    """Name of an annotated file, which says what its documents are; content of any other file."""
    return path.stem if _is_annotated(path) else content_digest(path)


def _ids(path: Path) -> np.ndarray:
    return _ids_of(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _ids_of(path: Path, _: int) -> np.ndarray:
    return document_ids(path)


def _digest(*arrays: np.ndarray) -> str:
    hasher = xxhash.xxh3_128()
    for array in arrays:
        hasher.update(str(array.dtype).encode())
        hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()


MAX_RUN = 4  # consecutive shards that one task writes
RUNS_PER_WORKER = 4  # at least, where there are so many shards, so that none waits long for the last
EXAMPLES_NAME = "examples.jsonl"


@dataclass(frozen=True)
class SourcesToWrite:
    """shard_bytes: text of a shard, about. pii: what is replaced in all of them. batches: of small sources, which are
    not in `sources`."""

    sources: Sequence[SourceToWrite]
    shard_bytes: int
    pii: PiiConfig | None
    batches: Sequence[BatchToWrite] = ()


def write_corpus(
    corpus: SourcesToWrite,
    ledgers: Sequence[LedgerTask],
    folder: Path,
    engine: Engine,
    reused: ReusedFiles,
) -> tuple[list[str], list[BatchTable]]:
    """Writes the ledgers, and the documents and signals of every source and split in shards of about `shard_bytes` of
    text, or fewer so that a source of some size has TARGET_SHARDS.

    The training shards are written first; their tasks put the held-out documents that they meet into files below
    HELD_OUT_FOLDER (which the caller removes), from which the other shards are written. Files that the run before made
    of the same documents are taken from there. Returns the keys of all files, and the tables of the batches."""
    training, held_out = _planned(corpus, folder, engine)
    link_empty_shards([task for task in joined([training, held_out]) if task.is_empty])
    training, held_out = _with_rows(training), _with_rows(held_out)
    written: LazySequence[ShardTask | LedgerTask] = joined([training, ledgers])
    by_file = sorted(range(len(written)), key=lambda number: _first_file(written[number]))
    first = LazySequence(written.__getitem__, by_file)
    keys = _take(first, reused, engine)
    runs = _runs(training, engine.workers)
    # together, so that no worker waits for the last shard or ledger
    files: LazySequence[BatchToWrite | LedgerTask | tuple[ShardTask, ...]] = joined([corpus.batches, runs, ledgers])
    sizes = [*(float(batch.num_files) for batch in corpus.batches), *map(len, runs), *([1] * len(ledgers))]
    tables = engine.map(_write, files, "write corpus", sizes, "files")
    keys += _take(held_out, reused, engine)
    runs = _runs(held_out, engine.workers)
    engine.map(_write, runs, "write held-out documents", [len(run) for run in runs], "files")
    every_task: LazySequence[ShardTask | LedgerTask] = joined([first, held_out])
    for key, task in zip(keys, every_task, strict=True):
        reused.keep(key, _files(task))
    return keys, [table for of_task in tables for table in of_task]


def _planned(
    corpus: SourcesToWrite, folder: Path, engine: Engine
) -> tuple[LazySequence[ShardTask], LazySequence[ShardTask]]:
    """The shards of the training split and of the others. Of each this process holds a few numbers."""
    sources = corpus.sources
    of_files = LazySequence(
        lambda number: (sources[number].state.filter_results, corpus.shard_bytes), range(len(sources))
    )
    training: list[Sequence[ShardTask]] = []
    held_out: list[Sequence[ShardTask]] = []
    for source, plan in zip(sources, engine.imap(plan_shards, of_files, "plan shards", unit="sources"), strict=True):
        training.append(training_shards(source, plan, corpus.pii, folder))
        held_out += (held_out_shards(training[-1], plan, split) for split in range(1, len(SPLITS)))
    return joined(training), joined(held_out)


def _with_rows(tasks: Sequence[ShardTask]) -> LazySequence[ShardTask]:
    """The tasks without those of empty shards."""
    return LazySequence(tasks.__getitem__, [number for number, task in enumerate(tasks) if not task.is_empty])


def _take(tasks: Sequence[ShardTask | LedgerTask], reused: ReusedFiles, engine: Engine) -> list[str]:
    """The key of each task; files that are kept under it are in their places afterwards."""
    keys = engine.map(_key_of, tasks, "files to take over", unit="files")
    for task, key in zip(tasks, keys, strict=True):
        files = _files(task)
        if not all(matches_checksum(path) for path in files.values()):
            reused.take(key, files)
    return keys


def _files(task: ShardTask | LedgerTask) -> Mapping[str, Path]:
    """Files that the task writes, by name."""
    return {"ledger.parquet": task.path} if isinstance(task, LedgerTask) else shard_files(task)


def _first_file(task: ShardTask | LedgerTask) -> str:
    """The file by which tasks are sorted whose keys are made from the same ids, which are read once then."""
    return str(task.rows[0].path) if task.rows else ""


def _key_of(task: ShardTask | LedgerTask) -> str:
    return ledger_key(task) if isinstance(task, LedgerTask) else shard_key(task)


def _write(task: BatchToWrite | LedgerTask | tuple[ShardTask, ...]) -> list[BatchTable]:
    if isinstance(task, BatchToWrite):
        return write_batch(task)
    if isinstance(task, LedgerTask):
        write_ledger(task)
    else:
        write_shard_run(task)
    return []


def _runs(tasks: Sequence[ShardTask], workers: int) -> Sequence[tuple[ShardTask, ...]]:
    """Runs of up to MAX_RUN consecutive shards of one source and split, fewer where the workers would be unevenly
    loaded. Each run is written by one worker."""
    size = MAX_RUN if workers == 1 else min(max(len(tasks) // (RUNS_PER_WORKER * workers), 1), MAX_RUN)
    runs: list[range] = []
    kinds = ((task.format.source, task.split) for task in tasks)
    for _, group in groupby(enumerate(kinds), itemgetter(1)):
        numbers = [number for number, _ in group]
        runs += [range(start, min(start + size, numbers[-1] + 1)) for start in numbers[::size]]
    return LazySequence(lambda number: tuple(tasks[place] for place in runs[number]), range(len(runs)))


def write_examples(curated: Sequence[SourceState], removals: Sequence[Removals], folder: Path, engine: Engine) -> None:
    lines = [orjson.dumps(example) + b"\n" for example in borderline_examples(curated, removals, engine)]
    write_atomic(folder / EXAMPLES_NAME, b"".join(lines))


# The documents nearest to each threshold, kept and removed, for people to inspect.

EXCERPT_CHARACTERS = 400
SIDES = {REMOVED_SIDE: "removed", KEPT_SIDE: "kept"}


@dataclass(frozen=True)
class ThresholdExample:
    """A document near a threshold, or a duplicate. file: number in its source; row: of the annotated file, or of its
    source in the file of a batch."""

    file: int
    row: int
    rule: str
    side: str
    value: float
    threshold: float
    duplicate_of: str | None = None


def borderline_examples(
    curated: Sequence[SourceState], removals: Sequence[Removals], engine: Engine
) -> Iterator[dict[str, Any]]:
    """Source after source: for each rule that removed a document of the source, the EXAMPLES_PER_SIDE documents nearest
    its threshold on either side; for each later step, the removed documents with the lowest values. Of equals the first
    in the source."""
    removed_of: dict[str, tuple[int, RemovalStep]] = {}  # of the last file of batches, which many sources have

    def removed(state: SourceState, step: Removals, number: int) -> RemovalStep:
        if state.rows is None:
            return step.in_file(number)
        if step.step not in removed_of or removed_of[step.step][0] != number:
            removed_of[step.step] = number, step.in_file(number)
        return removed_of[step.step][1].in_rows(state.rows.start, state.rows.stop)

    chosen = [
        [
            *_rule_examples(state),
            *(
                example
                for step in removals
                for example in _step_examples(step, (removed(state, step, number) for number in state.files))
            ),
        ]
        for state in curated
    ]
    documents = _read_documents(list(zip(curated, chosen, strict=True)), engine)
    for state, examples in zip(curated, chosen, strict=True):
        for example in examples:
            doc_id, excerpt = documents[state.paths[example.file], state.first_row + example.row]
            yield {
                "rule": example.rule,
                "source": state.source.name,
                "side": example.side,
                "doc_id": doc_id,
                "value": example.value,
                "threshold": example.threshold,
                "duplicate_of": example.duplicate_of,
                "excerpt": excerpt,
            }


def _rule_examples(state: SourceState) -> Iterator[ThresholdExample]:
    merged: list[np.ndarray] = []  # files, rows, values and thresholds [rules, sides, EXAMPLES_PER_SIDE], nearest first
    for file, nearest in enumerate(results.nearest for results in state.filter_results):
        if nearest is None:
            continue
        columns = [np.full_like(nearest.rows, file), nearest.rows, nearest.values, nearest.thresholds]
        columns = [np.concatenate(pair, axis=-1) for pair in zip(merged, columns, strict=True)] if merged else columns
        distances = np.where(columns[1] >= 0, np.abs(columns[2] - columns[3]), np.inf)
        chosen = np.argsort(distances, axis=-1, kind="stable")[..., :EXAMPLES_PER_SIDE]  # of equals the first
        merged = [np.take_along_axis(column, chosen, axis=-1) for column in columns]
    for rule, side in np.ndindex(merged[0].shape[:2] if merged else (0, 0)):
        files, rows, values, thresholds = (column[rule, side].tolist() for column in merged)
        if (merged[1][rule, REMOVED_SIDE] >= 0).any():
            label = state.rules.rules[rule].label
            for file, row, value, threshold in sorted(zip(files, rows, values, thresholds, strict=True)):
                if row >= 0:
                    yield ThresholdExample(file, row, label, SIDES[side], value, threshold)


def _step_examples(step: Removals, of_files: Iterable[RemovalStep]) -> list[ThresholdExample]:
    """of_files: the documents that the step removed of each file of a source, of which one is held at a time."""
    lowest: list[ThresholdExample] = []
    for file, removed in enumerate(of_files):
        if not len(removed.rows):
            continue
        order = np.argsort(removed.values, kind="stable")[:EXAMPLES_PER_SIDE]
        ids = (
            [None] * len(order)
            if removed.duplicate_of is None
            else unpacked_ids(removed.duplicate_of[order]).to_pylist()
        )
        for at, duplicate_of in zip(order.tolist(), ids, strict=True):
            row, value = int(removed.rows[at]), float(removed.values[at])
            lowest.append(ThresholdExample(file, row, step.step, "removed", value, float(step.threshold), duplicate_of))
        lowest = sorted(lowest, key=attrgetter("value"))[:EXAMPLES_PER_SIDE]
    return lowest


def _read_documents(
    chosen: Sequence[tuple[SourceState, Sequence[ThresholdExample]]], engine: Engine
) -> Mapping[tuple[Path, int], tuple[str, str]]:
    """By file and row: (doc_id, excerpt). chosen: of each source."""
    rows: dict[Path, set[int]] = {}
    for state, examples in chosen:
        for example in examples:
            rows.setdefault(state.paths[example.file], set()).add(state.first_row + example.row)
    tasks = [(path, sorted(wanted)) for path, wanted in rows.items()]
    documents_by_row: dict[tuple[Path, int], tuple[str, str]] = {}
    read = engine.map(_read_rows, tasks, "examples", unit="files")
    for (path, _), documents in zip(tasks, read, strict=True):
        documents_by_row |= {(path, row): document for row, document in documents.items()}
    return documents_by_row


def _read_rows(task: tuple[Path, list[int]]) -> dict[int, tuple[str, str]]:
    path, rows = task
    ids = dict(zip(rows, unpacked_ids(document_ids(path)[rows]).to_pylist(), strict=True))
    return {
        row: (ids[row], text[:EXCERPT_CHARACTERS])
        for some_rows, texts in picked_texts(path, rows)
        for row, text in zip(some_rows.tolist(), texts.to_pylist(), strict=True)
    }
