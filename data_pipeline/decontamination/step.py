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
from gristmill.data_pipeline.decontamination.common_phrases import Found, common_ngrams, without_common
from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.decontamination.edits import search_edits
from gristmill.data_pipeline.decontamination.index import search
from gristmill.data_pipeline.decontamination.indexes import build_indexes, load_indexes, save_indexes
from gristmill.data_pipeline.decontamination.matches import MATCHES, counting_ngrams, document_matches, match_row
from gristmill.data_pipeline.decontamination.outcome import HITS, PIECES, DocumentEdit, edit_document
from gristmill.data_pipeline.decontamination.report import contamination_report
from gristmill.data_pipeline.decontamination.words import words_of_bytes
from gristmill.data_pipeline.dedup.arrays import document_file_identity, load_array, open_workspace, save_array
from gristmill.data_pipeline.dedup.folding import word_spans
from gristmill.data_pipeline.ledger.document_file import DocumentFile, utf8_of
from gristmill.data_pipeline.ledger.removed_spans import REMOVED_SPANS, sorted_spans
from gristmill.foundation.checksum_files import sealed_path
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.errors import RecipeError


@dataclass(frozen=True)
class Decontamination:
    """matches: rows of MATCHES, one for each document and benchmark text. hits: rows of HITS, one for each contaminated
    document. removed_spans: rows of REMOVED_SPANS, of the documents that are split. piece_files: by part, the PIECES of
    those documents (None: the part has no contaminated document). report: see `report.py`."""

    matches: pa.Table
    hits: pa.Table
    removed_spans: pa.Table
    piece_files: tuple[Path | None, ...]
    report: dict[str, Any]

    @property
    def pieces(self) -> pa.Table:
        """The pieces of all parts, in memory."""
        tables = [pq.read_table(path, schema=PIECES) for path in self.piece_files if path is not None]
        return _ordered([PIECES.empty_table(), *tables], ("parent_id", "piece"))


def decontaminate(
    parts: Sequence[DocumentFile],
    config: DecontaminateConfig,
    engine: LocalEngine,
    folder: Path,
    task_examples: Sequence[Example] = (),
) -> Decontamination:
    """Searches the kept documents for the texts of the config's benchmarks and, if it names tasks, `task_examples`.

    Tables are ordered by doc_id (then benchmark text, or place). The result does not depend on workers, files or order.
    `folder` takes intermediate files; called again with the same arguments after a kill, it goes on from them.
    Raises RecipeError if a task's texts were not handed over, InputError for a damaged file."""
    examples = all_examples(config, task_examples)
    open_workspace(folder, _identity(parts, config, examples))
    indexes = build_indexes(examples, config)
    save_indexes(indexes, folder)
    found = _search_parts(parts, config.answer_window, engine, folder)
    common = common_ngrams(found, len(indexes.ngrams.keys), config)
    found = without_common(found, common, indexes.ngrams, config)
    counting = counting_ngrams(indexes.ngrams, common)
    prefixes = _cut_parts(parts, found, counting, examples, config, engine, folder)
    matches, hits, removed = (_joined(prefixes, name, schema) for name, schema in JOINED.items())
    files = tuple(None if prefix is None else _file(prefix, "pieces") for prefix in prefixes)
    report = contamination_report(examples, indexes, common, matches, hits)
    return Decontamination(matches, hits, sorted_spans([removed]), files, report)


JOINED = {"matches": MATCHES, "hits": HITS, "removed_spans": REMOVED_SPANS}
SORT_KEYS = {"matches": ("doc_id", "text"), "hits": ("doc_id",), "removed_spans": ("doc_id", "start")}


def all_examples(config: DecontaminateConfig, task_examples: Sequence[Example]) -> list[Example]:
    """The texts that must not stand in the corpus: of the local files, then of the tasks.

    A suite's name is not its tasks', so only the absence of all texts can be told."""
    if config.tasks and not task_examples:
        name = config.tasks[0].name
        raise RecipeError(f"no texts of the task {name!r} were handed over; name local files in `benchmarks`")
    found = [example for benchmark in config.benchmarks for example in read_benchmark(benchmark)]
    return found + (list(task_examples) if config.tasks else [])


def _identity(
    parts: Sequence[DocumentFile], config: DecontaminateConfig, examples: Sequence[Example]
) -> dict[str, Any]:
    texts = [[one.benchmark, one.example, one.field, one.text, one.is_answer] for one in examples]
    settings = config.model_dump(mode="json", exclude={"benchmarks", "tasks", "task_data", "download"})
    digest = hashlib.sha256(orjson.dumps(texts)).hexdigest()
    return {"config": settings, "texts": digest, "parts": [document_file_identity(part) for part in parts]}


def _search_parts(parts: Sequence[DocumentFile], window: int, engine: LocalEngine, folder: Path) -> list[Found]:
    files = [folder / f"found-{number:05d}.npy" for number in range(len(parts))]
    tasks = [(part, window, folder, file) for part, file in zip(parts, files, strict=True) if not file.exists()]
    engine.map(_search_part, tasks, "benchmark texts", [task[0].bytes for task in tasks], "B")
    return [Found(load_array(file), load_array(_copies_file(file))) for file in files]


def _copies_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}-copies.npy")


def _search_part(task: tuple[DocumentFile, int, Path, Path]) -> None:
    part, window, folder, path = task
    indexes = load_indexes(folder)
    ngrams, copies = [np.empty((3, 0), np.int64)], [np.empty((6, 0), np.int64)]
    for rows, _, texts in part.batches():
        words = words_of_bytes(*utf8_of(texts))
        for found, held in (
            (search(indexes.ngrams, words), ngrams),
            (search_edits(indexes.edits, words, window), copies),
        ):
            found[0] = rows[found[0]]
            held.append(found)
    save_array(_copies_file(path), np.concatenate(copies, axis=1))
    save_array(path, np.concatenate(ngrams, axis=1))  # last: its file says that both are whole


def _cut_parts(
    parts: Sequence[DocumentFile],
    found: Sequence[Found],
    counting: np.ndarray,
    examples: Sequence[Example],
    config: DecontaminateConfig,
    engine: LocalEngine,
    folder: Path,
) -> list[Path | None]:
    """Of each part the prefix of its files of matches, hits, removed spans and pieces; None where nothing was found.

    counting: n-grams of each benchmark text that are no common phrases."""
    prefixes: list[Path | None] = []
    tasks = []
    for number, (part, mine) in enumerate(zip(parts, found, strict=True)):
        prefix = folder / f"part-{number:05d}" if len(mine.rows) else None
        prefixes.append(prefix)
        if prefix is not None and not _file(prefix, "hits").exists():
            tasks.append((part, mine, counting, tuple(examples), config, folder, prefix))
    engine.map(_cut_part, tasks, "decontamination", [len(task[1].rows) for task in tasks], "documents")
    return prefixes


def _of_row(found: np.ndarray, row: int) -> np.ndarray:
    first, last = np.searchsorted(found[0], [row, row + 1])
    return found[1:, first:last]


def _file(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{name}.parquet")


def _cut_part(task) -> None:
    part, found, counting, examples, config, folder, prefix = task
    indexes = load_indexes(folder)
    wanted = np.zeros(len(part.kept_mask()), bool)
    wanted[found.rows] = True
    matches: list[tuple] = []
    edits: list[DocumentEdit] = []
    for numbers, doc_ids, texts in part.batches(wanted):
        for row, doc_id, text in zip(numbers, doc_ids.to_pylist(), texts.to_pylist(), strict=True):
            ngrams, copies = (_of_row(rows, row) for rows in (found.ngrams, found.copies))
            mine = document_matches(text, ngrams, copies, indexes, counting)
            spans = word_spans(text)
            matches += [match_row(doc_id, text, match, spans, examples) for match in mine]
            edits.append(edit_document(doc_id, text, mine, spans, examples, config))
    tables = {
        "matches": _table(matches, MATCHES),
        "removed_spans": pa.Table.from_pylist(
            [row for edit in edits for row in edit.removed_spans], schema=REMOVED_SPANS
        ),
        "pieces": _table([row for edit in edits for row in edit.pieces], PIECES),
        "hits": _table([edit.hit for edit in edits], HITS),  # last: its file says that all are whole
    }
    for name, table in tables.items():
        with sealed_path(_file(prefix, name)) as temporary:
            pq.write_table(table, temporary, compression="zstd")


def _table(rows: list[tuple], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def _joined(prefixes: Sequence[Path | None], name: str, schema: pa.Schema) -> pa.Table:
    tables = [pq.read_table(_file(prefix, name), schema=schema) for prefix in prefixes if prefix is not None]
    return _ordered([schema.empty_table(), *tables], SORT_KEYS[name])


def _ordered(tables: Sequence[pa.Table], keys: Sequence[str]) -> pa.Table:
    return pa.concat_tables(tables).sort_by([(key, "ascending") for key in keys]).combine_chunks()
