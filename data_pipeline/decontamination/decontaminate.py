"""Decontamination: benchmark texts are found in documents by n-grams, and cut out, dropped or annotated."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.cuts import CUTS, in_order
from gristmill.data_pipeline.decontamination.benchmark import Example, read_benchmark
from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.decontamination.index import NgramIndex, build_index, search
from gristmill.data_pipeline.decontamination.outcome import (
    HITS,
    MATCHES,
    PIECES,
    Outcome,
    counting_ngrams,
    matches_of,
    outcome_of,
)
from gristmill.data_pipeline.decontamination.report import contamination_report
from gristmill.data_pipeline.dedup.arrays import claim, load_array, part_identity, save_array
from gristmill.data_pipeline.dedup.folding import word_spans
from gristmill.data_pipeline.dedup.part import Part, utf8_of
from gristmill.data_pipeline.engine.local import LocalEngine
from gristmill.data_pipeline.errors import RecipeError
from gristmill.data_pipeline.provenance.sealed import sealed_path


@dataclass(frozen=True)
class Decontamination:
    """matches: which documents share how much with which benchmark texts. hits: what becomes of each document.
    cuts: what was cut out of those that are split. piece_files: of each part, the documents that stand in the split
    ones' stead (None: no document of it was hit). report: the page of `report.py`, as JSON."""

    matches: pa.Table
    hits: pa.Table
    cuts: pa.Table
    piece_files: tuple[Path | None, ...]
    report: dict[str, Any]

    @property
    def pieces(self) -> pa.Table:
        """The pieces of all parts, in memory."""
        tables = [pq.read_table(path, schema=PIECES) for path in self.piece_files if path is not None]
        return _ordered([PIECES.empty_table(), *tables], ("parent_id", "piece"))


def decontaminate(
    parts: Sequence[Part],
    config: DecontaminateConfig,
    engine: LocalEngine,
    folder: Path,
    task_examples: Sequence[Example] = (),
) -> Decontamination:
    """Searches the living documents for the texts of the config's benchmarks and, if it names tasks, `task_examples`.

    Tables are ordered by doc_id (then benchmark text, or place). The result does not depend on workers, files or order.
    `folder` takes intermediate files; called again with the same arguments after a kill, it goes on from them.
    Raises RecipeError if a task's texts were not handed over, InputError for a damaged file."""
    examples = all_examples(config, task_examples)
    claim(folder, _identity(parts, config, examples))
    index = build_index(examples, config.ngram, config.shortest_ngram)
    _save_index(index, folder)
    found = _search_parts(parts, engine, folder)
    common = _common(found, len(index.keys), config)
    prefixes = _cut_parts(parts, found, common, examples, config, engine, folder)
    matches, hits, cuts = (_joined(prefixes, name, schema) for name, schema in JOINED.items())
    files = tuple(None if prefix is None else _file(prefix, "pieces") for prefix in prefixes)
    report = contamination_report(examples, index, common, matches, hits)
    return Decontamination(matches, hits, in_order([cuts]), files, report)


JOINED = {"matches": MATCHES, "hits": HITS, "cuts": CUTS}
SORT_KEYS = {"matches": ("doc_id", "text"), "hits": ("doc_id",), "cuts": ("doc_id", "start")}


def all_examples(config: DecontaminateConfig, task_examples: Sequence[Example]) -> list[Example]:
    """The texts that must not stand in the corpus: of the local files, then of the tasks.

    A suite's name is not its tasks', so only the absence of all texts can be told."""
    if config.tasks and not task_examples:
        name = config.tasks[0].name
        raise RecipeError(f"no texts of the task {name!r} were handed over; name local files in `benchmarks`")
    found = [example for benchmark in config.benchmarks for example in read_benchmark(benchmark)]
    return found + (list(task_examples) if config.tasks else [])


def _identity(parts: Sequence[Part], config: DecontaminateConfig, examples: Sequence[Example]) -> dict[str, Any]:
    texts = [[example.benchmark, example.example, example.field, example.text] for example in examples]
    settings = config.model_dump(mode="json", exclude={"benchmarks", "tasks", "task_data", "download"})
    digest = hashlib.sha256(orjson.dumps(texts)).hexdigest()
    return {"config": settings, "texts": digest, "parts": [part_identity(part) for part in parts]}


def _save_index(index: NgramIndex, folder: Path) -> None:
    for field in fields(index):
        path = folder / f"index-{field.name}.npy"
        if not path.exists():
            save_array(path, np.asarray(getattr(index, field.name)))


def _load_index(folder: Path) -> NgramIndex:
    values: dict[str, Any] = {
        field.name: load_array(folder / f"index-{field.name}.npy") for field in fields(NgramIndex)
    }
    numbers: dict[str, Any] = {name: int(value) for name, value in values.items() if value.ndim == 0}
    return NgramIndex(**{**values, **numbers})


def _search_parts(parts: Sequence[Part], engine: LocalEngine, folder: Path) -> list[np.ndarray]:
    """int64[3, matches] of each part: row, n-gram, word at which it begins."""
    files = [folder / f"found-{number:05d}.npy" for number in range(len(parts))]
    tasks = [(part, folder, file) for part, file in zip(parts, files, strict=True) if not file.exists()]
    engine.map(_search_part, tasks, "benchmark n-grams", [task[0].bytes for task in tasks], "B")
    return [load_array(file) for file in files]


def _search_part(task: tuple[Part, Path, Path]) -> None:
    part, folder, path = task
    index = _load_index(folder)
    found = [np.empty((3, 0), np.int64)]
    for rows, _, texts in part.batches():
        matches = search(index, *utf8_of(texts))
        matches[0] = rows[matches[0]]
        found.append(matches)
    save_array(path, np.concatenate(found, axis=1))


def _common(found: Sequence[np.ndarray], num_ngrams: int, config: DecontaminateConfig) -> np.ndarray:
    """bool[n-grams]: those that stand in at least `common` documents (or places)."""
    times = np.zeros(num_ngrams, np.int64)
    for matches in found:
        counted = np.unique(matches[:2], axis=1) if config.common_in == "documents" else matches
        times += np.bincount(counted[1], minlength=num_ngrams)
    return times >= config.common


def _cut_parts(
    parts: Sequence[Part],
    found: Sequence[np.ndarray],
    common: np.ndarray,
    examples: Sequence[Example],
    config: DecontaminateConfig,
    engine: LocalEngine,
    folder: Path,
) -> list[Path | None]:
    """Of each part the prefix of its files of matches, hits, cuts and pieces; None where nothing was found."""
    prefixes: list[Path | None] = []
    tasks = []
    for number, (part, matches) in enumerate(zip(parts, found, strict=True)):
        counting = matches[:, ~common[matches[1]]]
        prefix = folder / f"part-{number:05d}" if counting.shape[1] else None
        prefixes.append(prefix)
        if prefix is not None and not _file(prefix, "hits").exists():
            tasks.append((part, counting, common, tuple(examples), config, folder, prefix))
    engine.map(_cut_part, tasks, "decontamination", [task[1].shape[1] for task in tasks], "matches")
    return prefixes


def _file(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{name}.parquet")


def _cut_part(task) -> None:
    part, found, common, examples, config, folder, prefix = task
    index = _load_index(folder)
    counting = counting_ngrams(index, common)
    wanted = np.zeros(len(part.living()), bool)
    wanted[found[0]] = True
    matches: list[tuple] = []
    outcomes: list[Outcome] = []
    for numbers, doc_ids, texts in part.batches(wanted):
        for row, doc_id, text in zip(numbers, doc_ids.to_pylist(), texts.to_pylist(), strict=True):
            first, last = np.searchsorted(found[0], [row, row + 1])
            mine = found[1:, first:last]
            spans = word_spans(text)
            matches += matches_of(doc_id, text, mine, spans, index, counting, examples)
            outcomes.append(outcome_of(doc_id, text, mine, spans, index, examples, config))
    tables = {
        "matches": _table(matches, MATCHES),
        "cuts": pa.Table.from_pylist([row for outcome in outcomes for row in outcome.cuts], schema=CUTS),
        "pieces": _table([row for outcome in outcomes for row in outcome.pieces], PIECES),
        "hits": _table([outcome.hit for outcome in outcomes], HITS),  # last: its file says that all are whole
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
