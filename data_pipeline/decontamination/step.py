"""Decontamination: finds benchmark texts in documents, verbatim or edited, and removes, drops or annotates them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.decontamination.benchmark import Example, read_benchmark
from gristmill.data_pipeline.decontamination.common_phrases import (
    PHRASE,
    Found,
    common_ngrams,
    common_phrases,
    phrase_counts,
    phrase_ranges,
    without_common,
)
from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.decontamination.document_edit import HITS, PIECES, DocumentEdit, edit_document
from gristmill.data_pipeline.decontamination.edits import search_edits
from gristmill.data_pipeline.decontamination.index import search
from gristmill.data_pipeline.decontamination.indexes import build_indexes, load_indexes, save_indexes
from gristmill.data_pipeline.decontamination.matches import MATCHES, counting_ngrams, document_matches, match_row
from gristmill.data_pipeline.decontamination.report import contamination_report
from gristmill.data_pipeline.decontamination.words import words_of_bytes
from gristmill.data_pipeline.dedup.arrays import document_file_identity, load_array, open_workspace, save_array
from gristmill.data_pipeline.dedup.folding import word_spans
from gristmill.data_pipeline.ledger.document_file import DocumentFile, utf8_of
from gristmill.data_pipeline.ledger.evidence import EvidenceFiles
from gristmill.data_pipeline.ledger.removed_spans import REMOVED_SPANS
from gristmill.foundation.checksum_files import sealed_path
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.shuffle import Shuffle, ranges_for

PHRASE_BYTES = 1000  # of a document file, for the number of ranges: a guess that decides memory alone


@dataclass(frozen=True)
class Decontamination:
    """matches: rows of MATCHES, one for each document and benchmark text. located_hits: rows of HITS, one for each
    contaminated document, with `file`, the number of its document file. prefixes: by document file, how the paths of
    its matches, hits, removed spans and pieces begin; None: it has no contaminated document. report: `report.py`."""

    matches: pa.Table
    located_hits: pa.Table
    prefixes: tuple[Path | None, ...]
    report: dict[str, Any]

    @property
    def hits(self) -> pa.Table:
        """The hits without their places, which depend on how the documents are spread over files."""
        return self.located_hits.drop_columns(["row", "file"])

    @property
    def pieces(self) -> pa.Table:
        """The pieces of all document files, in memory."""
        return joined_tables(self.prefixes, "pieces", PIECES)

    @property
    def removed_spans(self) -> pa.Table:
        """The removed spans of all document files, in memory."""
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
    task_examples: Sequence[Example] = (),
) -> Decontamination:
    """Searches the kept documents for the texts of the config's benchmarks and, if it names tasks, `task_examples`.

    Tables are ordered by doc_id (then benchmark text, or place). The result does not depend on workers, files or order.
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
    prefixes = _edit_files(document_files, texts, engine, folder)
    matches = joined_tables(prefixes, "matches", MATCHES)
    hits = joined_tables(prefixes, "hits", HITS)
    report = contamination_report(examples, indexes, common, matches, hits)
    return Decontamination(matches, hits, tuple(prefixes), report)


SORT_KEYS = {
    "matches": ("doc_id", "text"),
    "hits": ("doc_id",),
    "removed_spans": ("doc_id", "start"),
    "pieces": ("parent_id", "piece"),
}


def all_examples(config: DecontaminateConfig, task_examples: Sequence[Example]) -> list[Example]:
    """The texts that must not stand in the corpus: of the local files, then of the tasks.

    A suite's name is not its tasks', so only the absence of all texts can be told."""
    if config.tasks and not task_examples:
        name = config.tasks[0].name
        raise RecipeError(f"no texts of the task {name!r} were handed over; name local files in `benchmarks`")
    found = [example for benchmark in config.benchmarks for example in read_benchmark(benchmark)]
    return found + (list(task_examples) if config.tasks else [])


def _identity(
    document_files: Sequence[DocumentFile], config: DecontaminateConfig, examples: Sequence[Example]
) -> dict[str, Any]:
    texts = [[one.benchmark, one.example, one.field, one.text, one.is_answer] for one in examples]
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
    counts = Shuffle(folder / "phrases", PHRASE, len(document_files), ranges_for(int(sum(sizes)) // PHRASE_BYTES))
    tasks = [(each, config, folder, counts, number) for number, each in enumerate(document_files)]
    tasks = [task for task in tasks if not counts.has(task[-1])]
    engine.map(_search_file, tasks, "benchmark texts", [task[0].bytes for task in tasks], "B")
    sized = engine if counts.ranges > 1 else LocalEngine(1, engine.reporter)
    ranges = [(counts, config, number) for number in range(counts.ranges)]
    return np.concatenate([np.empty(0, PHRASE), *sized.map(_common_of_range, ranges, "common phrases", unit="tasks")])


def _common_of_range(task: tuple[Shuffle, DecontaminateConfig, int]) -> np.ndarray:
    counts, config, number = task
    return common_phrases(counts.read(number), config)


def _found_file(folder: Path, number: int) -> Path:
    return folder / f"found-{number:05d}.npy"


def _read_found(folder: Path, number: int) -> Found:
    path = _found_file(folder, number)
    return Found(load_array(path), load_array(_copies_file(path)))


def _copies_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}-copies.npy")


def _search_file(task: tuple[DocumentFile, DecontaminateConfig, Path, Shuffle, int]) -> None:
    document_file, config, folder, counts, number = task
    path = _found_file(folder, number)
    indexes = load_indexes(folder)
    ngrams, copies = [np.empty((3, 0), np.int64)], [np.empty((6, 0), np.int64)]
    for rows, _, texts in document_file.batches():
        words = words_of_bytes(*utf8_of(texts))
        for found, held in (
            (search(indexes.ngrams, words), ngrams),
            (search_edits(indexes.edits, words, config.answer_window), copies),
        ):
            found[0] = rows[found[0]]
            held.append(found)
    save_array(_copies_file(path), np.concatenate(copies, axis=1))
    save_array(path, np.concatenate(ngrams, axis=1))
    phrases = phrase_counts(_read_found(folder, number), config)
    counts.write_unsorted(number, phrases, phrase_ranges(phrases, counts.ranges))  # last: the files are whole


@dataclass(frozen=True)
class BenchmarkTexts:
    """counting: n-grams of each text that are no common phrases. common: PHRASE[]."""

    examples: tuple[Example, ...]
    counting: np.ndarray
    common: np.ndarray
    config: DecontaminateConfig


def _edit_files(
    document_files: Sequence[DocumentFile], texts: BenchmarkTexts, engine: Engine, folder: Path
) -> list[Path | None]:
    """Of each document file the prefix of its files of matches, hits, removed spans and pieces; None if it has none."""
    prefixes = [folder / f"file-{number:05d}" for number in range(len(document_files))]
    tasks = [
        (document_file, number, texts, folder, prefixes[number])
        for number, document_file in enumerate(document_files)
        if not result_file(prefixes[number], "hits").exists()
    ]
    engine.map(_edit_file, tasks, "decontamination", [task[0].bytes for task in tasks], "B")
    return [prefix if result_file(prefix, "hits").exists() else None for prefix in prefixes]


def _of_row(found: np.ndarray, row: int) -> np.ndarray:
    first, last = np.searchsorted(found[0], [row, row + 1])
    return found[1:, first:last]


def result_file(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{name}.parquet")


def _edit_file(task) -> None:
    document_file, number, benchmarks, folder, prefix = task
    examples, counting, config = benchmarks.examples, benchmarks.counting, benchmarks.config
    indexes = load_indexes(folder)
    found = without_common(_read_found(folder, number), benchmarks.common, indexes.ngrams)
    if not len(found.rows):
        return
    wanted = np.zeros(len(document_file.kept_mask()), bool)
    wanted[found.rows] = True
    matches: list[tuple] = []
    edits: list[DocumentEdit] = []
    hits: list[tuple] = []
    for numbers, doc_ids, texts in document_file.batches(wanted):
        for row, doc_id, text in zip(numbers, doc_ids.to_pylist(), texts.to_pylist(), strict=True):
            ngrams, copies = (_of_row(rows, row) for rows in (found.ngrams, found.copies))
            mine = document_matches(text, ngrams, copies, indexes, counting)
            spans = word_spans(text)
            matches += [match_row(doc_id, text, match, spans, examples) for match in mine]
            edits.append(edit_document(doc_id, text, mine, spans, examples, config))
            hits.append((*edits[-1].hit, int(row)))
    tables = {
        "matches": _table(matches, MATCHES),
        "removed_spans": pa.Table.from_pylist(
            [row for edit in edits for row in edit.removed_spans], schema=REMOVED_SPANS
        ),
        "pieces": _table([row for edit in edits for row in edit.pieces], PIECES),
        "hits": _table(hits, HITS),  # last: its file says that all are whole
    }
    for name, table in tables.items():
        with sealed_path(result_file(prefix, name)) as temporary:
            pq.write_table(table, temporary, compression="zstd")


def _table(rows: list[tuple], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def joined_tables(prefixes: Sequence[Path | None], name: str, schema: pa.Schema) -> pa.Table:
    """The tables of all document files, ordered; hits get a column `file`, the file's number."""
    tables = []
    for number, prefix in enumerate(prefixes):
        table = schema.empty_table() if prefix is None else pq.read_table(result_file(prefix, name), schema=schema)
        if name == "hits":
            table = table.append_column("file", pa.array(np.full(len(table), number, np.int32)))
        tables.append(table)
    joined = pa.concat_tables(tables) if tables else schema.empty_table()
    return joined.sort_by([(key, "ascending") for key in SORT_KEYS[name]]).combine_chunks()
