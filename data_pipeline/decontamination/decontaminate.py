"""Decontamination: finds benchmark texts in documents, verbatim or edited, and removes, drops or annotates them."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.decontamination.config import BenchmarkExample, DecontaminateConfig, read_benchmark
from gristmill.data_pipeline.decontamination.edits import build_indexes, load_indexes, save_indexes, search_edits
from gristmill.data_pipeline.decontamination.matches import (
    DROPPING_RULES,
    HITS,
    MATCHES,
    PIECES,
    QUESTION_CHARACTERS,
    ContaminationReport,
    DocumentEdit,
    counting_ngrams,
    document_matches,
    edit_document,
    found_questions,
    match_row,
    question_order,
    report_markdown,
)
from gristmill.data_pipeline.decontamination.ngram_index import (
    PHRASE,
    NgramMatches,
    common_ngrams,
    common_phrases,
    phrase_counts,
    phrase_ranges,
    search,
    without_common,
    words_of_bytes,
)
from gristmill.data_pipeline.dedup.folding import word_spans
from gristmill.data_pipeline.ledger.document_file import (
    DocumentFile,
    document_file_identity,
    load_array,
    open_workspace,
    save_array,
    utf8_of,
)
from gristmill.data_pipeline.ledger.removal_step import (
    REMOVED_SPANS,
    EvidenceFiles,
    StoredRemovals,
    removed_dtype,
    write_removed,
)
from gristmill.foundation.checksums import checksummed_path
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.files import atomic_path, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, fetch, ranges_for

MATCHES_OF_TASK = 1_000_000  # 1 kB each as Python objects
PHRASE_BYTES = 1000  # of a document file, for the number of ranges: a guess that decides memory alone


@dataclass(frozen=True)
class Decontamination:
    """prefixes: by document file, how the paths of its matches, hits, removed spans and pieces begin; None: it has no
    contaminated document. removals: the dropped documents. report: of ContaminationReport. question_files: the lines of
    `decontamination/matches.py`, file after file. Tables are read by the properties, into memory."""

    prefixes: Sequence[Path | None]
    removals: StoredRemovals
    report: dict[str, Any]
    question_files: tuple[Path, ...]

    @property
    def matches(self) -> pa.Table:
        """Rows of MATCHES, one for each document and benchmark text."""
        return joined_tables(self.prefixes, "matches", MATCHES)

    @property
    def hits(self) -> pa.Table:
        """HITS, one row for each contaminated document, without the row, which depends on the division into files."""
        return joined_tables(self.prefixes, "hits", HITS).drop_columns(["row"])

    @property
    def pieces(self) -> pa.Table:
        return joined_tables(self.prefixes, "pieces", PIECES)

    @property
    def removed_spans(self) -> pa.Table:
        return joined_tables(self.prefixes, "removed_spans", REMOVED_SPANS)

    def piece_file(self, number: int) -> Path | None:
        prefix = self.prefixes[number]
        return None if prefix is None else result_file(prefix, "pieces")

    def evidence(self, number: int) -> EvidenceFiles:
        """The files about the documents of one document file."""
        prefix = self.prefixes[number]
        if prefix is None:
            return EvidenceFiles()
        return EvidenceFiles(
            (result_file(prefix, "removed_spans"),),
            result_file(prefix, "matches"),
            result_file(prefix, "pieces"),
        )


def decontaminate(
    document_files: Sequence[DocumentFile],
    config: DecontaminateConfig,
    engine: Engine,
    folder: Path,
    task_examples: Sequence[BenchmarkExample] = (),
) -> Decontamination:
    """Searches the kept documents for the texts of the config's benchmarks and, if it names tasks, `task_examples`.

    Tables are ordered by doc_id (then benchmark text, or place). The result does not depend on workers, files or order.
    This process holds the benchmarks and one file's matches, whatever the number of documents.
    `folder` takes intermediate files; called again with the same arguments after a kill, it goes on from them.
    Raises RecipeError if a task's texts were not handed over, InputError for a damaged file."""
    examples = all_examples(config, task_examples)
    open_workspace(folder, _identity(document_files, config, examples))
    indexes = build_indexes(examples, config)
    save_indexes(indexes, folder)
    phrases = _search_files(document_files, config, engine, folder)
    common = common_ngrams(phrases, len(indexes.ngrams.keys))
    counting = counting_ngrams(indexes.ngrams, common)
    texts = BenchmarkTexts(tuple(examples), counting, phrases, config)
    removed = PartitionedFiles(
        folder / "removed", removed_dtype("row", "value", "threshold", "rule"), len(document_files), 1
    )
    prefixes = _edit_files(document_files, texts, engine, folder, removed)
    report = ContaminationReport(examples, indexes, common)
    for prefix in prefixes:
        if prefix is not None:
            report.add(*(_read(prefix, name, schema) for name, schema in (("matches", MATCHES), ("hits", HITS))))
    removals = StoredRemovals("decontaminate", 1.0, removed, DROPPING_RULES, is_by_part=True)
    questions = _write_questions(prefixes, examples, report.num_matches, engine, folder)
    return Decontamination(prefixes, removals, report.content(), questions)


def _read(prefix: Path, name: str, schema: pa.Schema) -> pa.Table:
    return pq.read_table(fetch(result_file(prefix, name)), schema=schema)


@dataclass(frozen=True)
class QuestionsTask:
    """results: (matches, hits) of the document files that have any. beginnings: number -> beginning of the texts of
    the task's records, which follow each other in `question_order`."""

    results: tuple[tuple[Path, Path], ...]
    beginnings: Mapping[int, str]
    path: Path


def _write_questions(
    prefixes: Sequence[Path | None],
    examples: Sequence[BenchmarkExample],
    num_matches: int,
    engine: Engine,
    folder: Path,
) -> tuple[Path, ...]:
    """The lines about the questions that were found, in files one after the other. A task holds about
    MATCHES_OF_TASK matches."""
    results = tuple((result_file(p, "matches"), result_file(p, "hits")) for p in prefixes if p is not None)
    order = question_order(examples)
    parts = ranges_for(num_matches, MATCHES_OF_TASK)
    part_of = order * parts // max(int(order.max(initial=0)) + 1, 1)
    paths = tuple(folder / f"questions-{part:05d}.jsonl" for part in range(parts))
    beginnings = [
        {number: examples[number].text[:QUESTION_CHARACTERS] for number in np.flatnonzero(part_of == part).tolist()}
        for part in range(parts)
    ]
    tasks = [QuestionsTask(results, *task) for task in zip(beginnings, paths, strict=True)]
    (engine if parts > 1 else LocalEngine(1, engine.reporter)).map(_write_found, tasks, "decontamination: questions")
    return paths


def _write_found(task: QuestionsTask) -> None:
    matches, hits = [MATCHES.empty_table()], [HITS.empty_table()]
    wanted = pa.array(list(task.beginnings), pa.int64())
    for matches_path, hits_path in task.results:
        table = pq.read_table(fetch(matches_path), schema=MATCHES)
        matches.append(table.filter(pc.is_in(table.column("text"), value_set=wanted)))
        table = pq.read_table(fetch(hits_path), schema=HITS)
        hits.append(table.filter(pc.is_in(table.column("doc_id"), value_set=matches[-1].column("doc_id"))))
    joined = pa.concat_tables(matches).sort_by([(key, "ascending") for key in SORT_KEYS["matches"]])
    questions = found_questions(joined, pa.concat_tables(hits), task.beginnings)
    lines = [canonical_json(question) + b"\n" for question in questions]
    with checksummed_path(task.path) as temporary:
        temporary.write_bytes(b"".join(lines))


SORT_KEYS = {
    "matches": ("doc_id", "text"),
    "hits": ("doc_id",),
    "removed_spans": ("doc_id", "start"),
    "pieces": ("parent_id", "piece"),
}


def all_examples(config: DecontaminateConfig, task_examples: Sequence[BenchmarkExample]) -> list[BenchmarkExample]:
    """The texts that must not stand in the corpus: of the local files, then of the tasks.

    A suite's name is not its tasks', so only the absence of all texts can be told."""
    if config.tasks and not task_examples:
        name = config.tasks[0].name
        raise RecipeError(f"no texts of the task {name!r} were handed over; name local files in `benchmarks`")
    examples = [example for benchmark in config.benchmarks for example in read_benchmark(benchmark)]
    return examples + (list(task_examples) if config.tasks else [])


def _identity(
    document_files: Sequence[DocumentFile], config: DecontaminateConfig, examples: Sequence[BenchmarkExample]
) -> dict[str, Any]:
    texts = [
        [example.benchmark, example.example, example.field, example.text, example.is_answer] for example in examples
    ]
    settings = config.model_dump(mode="json", exclude={"benchmarks", "tasks", "task_data", "download"})
    digest = hashlib.sha256(orjson.dumps(texts)).hexdigest()
    return {
        "config": settings,
        "texts": digest,
        "document_files": [document_file_identity(document_file) for document_file in document_files],
    }


def _search_files(
    document_files: Sequence[DocumentFile], config: DecontaminateConfig, engine: Engine, folder: Path
) -> np.ndarray:
    """PHRASE[]: the common phrases. What was found in a document file is in `_found_file`.

    The phrases' counts are a shuffle, of which a task adds up one range; memory of a task: 24 bytes for each distinct
    phrase of a benchmark that one document file has."""
    sizes = [document_file.bytes for document_file in document_files]
    counts = PartitionedFiles(
        folder / "phrases", PHRASE, len(document_files), ranges_for(int(sum(sizes)) // PHRASE_BYTES)
    )
    missing = [number for number in range(len(document_files)) if not counts.has(number)]
    tasks = LazySequence(lambda number: (document_files[number], config, folder, counts, number), missing)
    sizes = [sizes[number] for number in missing]
    engine.map(_search_file, tasks, "decontamination: search benchmark texts", sizes, "B")
    sized = engine if counts.ranges > 1 else LocalEngine(1, engine.reporter)
    ranges = [(counts, config, number) for number in range(counts.ranges)]
    return np.concatenate(
        [np.empty(0, PHRASE), *sized.map(_common_of_range, ranges, "decontamination: common phrases", unit="tasks")]
    )


def _common_of_range(task: tuple[PartitionedFiles, DecontaminateConfig, int]) -> np.ndarray:
    counts, config, number = task
    return common_phrases(counts.read(number), config)


def _found_file(folder: Path, number: int) -> Path:
    return folder / f"found-{number:05d}.npy"


def _read_found(folder: Path, number: int) -> NgramMatches:
    path = _found_file(folder, number)
    return NgramMatches(load_array(path), load_array(_copies_file(path)))


def _copies_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}-copies.npy")


def _search_file(task: tuple[DocumentFile, DecontaminateConfig, Path, PartitionedFiles, int]) -> None:
    document_file, config, folder, counts, number = task
    path = _found_file(folder, number)
    indexes = load_indexes(folder)
    ngrams, copies = [np.empty((3, 0), np.int64)], [np.empty((6, 0), np.int64)]
    for rows, _, texts in document_file.batches():
        words = words_of_bytes(*utf8_of(texts))
        for matches, batches in (
            (search(indexes.ngrams, words), ngrams),
            (search_edits(indexes.edits, words, config.answer_window), copies),
        ):
            matches[0] = rows[matches[0]]
            batches.append(matches)
    save_array(_copies_file(path), np.concatenate(copies, axis=1))
    save_array(path, np.concatenate(ngrams, axis=1))
    phrases = phrase_counts(_read_found(folder, number), config)
    counts.write_unsorted(number, phrases, phrase_ranges(phrases, counts.ranges))  # last: the files are whole


@dataclass(frozen=True)
class BenchmarkTexts:
    """counting: n-grams of each text that are no common phrases. common: PHRASE[]."""

    examples: tuple[BenchmarkExample, ...]
    counting: np.ndarray
    common: np.ndarray
    config: DecontaminateConfig


def _edit_files(
    document_files: Sequence[DocumentFile],
    texts: BenchmarkTexts,
    engine: Engine,
    folder: Path,
    removed: PartitionedFiles,
) -> Sequence[Path | None]:
    """The prefix of each document file's files of matches, hits, removed spans and pieces; None if it has none.
    removed: takes the dropped documents."""
    numbers = range(len(document_files))
    prefixes = LazySequence(lambda number: folder / f"file-{number:05d}", numbers)
    missing = [number for number in numbers if not result_file(prefixes[number], "hits").exists()]
    tasks = LazySequence(
        lambda number: (document_files[number], number, texts, folder, prefixes[number], removed), missing
    )
    engine.map(_edit_file, tasks, "decontamination: remove", [document_files[number].bytes for number in missing], "B")
    has_hits = bytes(result_file(prefix, "hits").exists() for prefix in prefixes)
    return LazySequence(lambda number: prefixes[number] if has_hits[number] else None, numbers)


def _of_row(matches: np.ndarray, row: int) -> np.ndarray:
    first, last = np.searchsorted(matches[0], [row, row + 1])
    return matches[1:, first:last]


def result_file(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{name}.parquet")


def _edit_file(task) -> None:
    document_file, number, benchmarks, folder, prefix, removed = task
    examples, counting, config = benchmarks.examples, benchmarks.counting, benchmarks.config
    indexes = load_indexes(folder)
    searched = without_common(_read_found(folder, number), benchmarks.common, indexes.ngrams)
    if not len(searched.rows):
        return
    wanted = np.zeros(len(document_file.kept_mask()), bool)
    wanted[searched.rows] = True
    matches: list[tuple] = []
    edits: list[DocumentEdit] = []
    hits: list[tuple] = []
    for numbers, doc_ids, texts in document_file.batches(wanted):
        for row, doc_id, text in zip(numbers, doc_ids.to_pylist(), texts.to_pylist(), strict=True):
            ngrams, copies = (_of_row(rows, row) for rows in (searched.ngrams, searched.copies))
            document_hits = document_matches(text, ngrams, copies, indexes, counting)
            spans = word_spans(text)
            matches += [match_row(doc_id, text, match, spans, examples) for match in document_hits]
            edits.append(edit_document(doc_id, text, document_hits, spans, examples, config))
            hits.append((*edits[-1].hit, int(row)))
    tables = {
        "matches": _table(matches, MATCHES),
        "removed_spans": pa.Table.from_pylist(
            [row for edit in edits for row in edit.removed_spans], schema=REMOVED_SPANS
        ),
        "pieces": _table([row for edit in edits for row in edit.pieces], PIECES),
        "hits": _table(hits, HITS),  # last: its file says that all are whole
    }
    _write_dropped(removed, number, tables["hits"])
    for name, table in tables.items():
        with checksummed_path(result_file(prefix, name)) as temporary:
            pq.write_table(table, temporary, compression="zstd")


def _write_dropped(removed: PartitionedFiles, number: int, hits: pa.Table) -> None:
    dropped = hits.filter(pc.equal(hits.column("outcome"), "dropped"))
    columns = {name: dropped.column(name).to_numpy() for name in ("row", "value", "threshold")}
    rules = [DROPPING_RULES.index(rule.removeprefix("decontaminate.")) for rule in dropped.column("rule").to_pylist()]
    write_removed(removed, number, **columns, rule=np.array(rules, np.int8))


def _table(rows: list[tuple], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def joined_tables(prefixes: Sequence[Path | None], name: str, schema: pa.Schema) -> pa.Table:
    """The tables of all document files, ordered."""
    joined = pa.concat_tables([schema.empty_table(), *(_read(prefix, name, schema) for prefix in prefixes if prefix)])
    return joined.sort_by([(key, "ascending") for key in SORT_KEYS[name]]).combine_chunks()


DECONTAMINATION_FOLDER = "decontamination"
REPORT_JSON, REPORT_MARKDOWN, QUESTIONS_NAME = "report.json", "report.md", "questions.jsonl"


def write_contamination(decontamination: Decontamination, folder: Path) -> None:
    """Writes the report on benchmark texts in the corpus, as JSON and Markdown."""
    where = folder / DECONTAMINATION_FOLDER
    write_atomic(where / REPORT_JSON, canonical_json(decontamination.report) + b"\n")
    write_atomic(where / REPORT_MARKDOWN, report_markdown(decontamination.report).encode())
    with atomic_path(where / QUESTIONS_NAME) as temporary, temporary.open("wb") as file:
        for path in decontamination.question_files:
            with fetch(path).open("rb") as lines:
                shutil.copyfileobj(lines, file)
