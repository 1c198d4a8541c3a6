"""Decontamination: benchmark texts are found in documents by n-grams, and cut out, dropped or annotated."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import Field, model_validator

from gristmill.data_pipeline.config import Config
from gristmill.data_pipeline.decontamination.benchmark import BenchmarkConfig, Example, read_benchmark
from gristmill.data_pipeline.decontamination.cut import CutRule, cut_spans, pieces
from gristmill.data_pipeline.decontamination.index import NgramIndex, build_index, search
from gristmill.data_pipeline.decontamination.report import EXCERPT_MARGIN, contamination_report
from gristmill.data_pipeline.dedup.arrays import claim, load_array, part_identity, save_array
from gristmill.data_pipeline.dedup.folding import word_spans
from gristmill.data_pipeline.dedup.part import Part, utf8_of
from gristmill.data_pipeline.engine.local import LocalEngine
from gristmill.data_pipeline.errors import RecipeError
from gristmill.data_pipeline.provenance.canonical import fingerprint
from gristmill.data_pipeline.provenance.files import atomic_path

Policy = Literal["split", "drop", "annotate"]

# One row a document and benchmark text that share at least one n-gram that counts. `excerpt` is the document's text
# around the first match.
MATCHES = pa.schema(
    [
        ("doc_id", pa.string()),
        ("benchmark", pa.string()),
        ("example", pa.string()),
        ("field", pa.string()),
        ("text", pa.int64()),
        ("matched", pa.int64()),
        ("of", pa.int64()),
        ("excerpt", pa.string()),
    ]
)
# One row a document that was hit. fate: split (pieces are left), dropped, annotated. characters: cut from it.
HITS = pa.schema([("doc_id", pa.string()), ("fate", pa.string()), ("pieces", pa.int64()), ("characters", pa.int64())])
PIECES = pa.schema([("doc_id", pa.string()), ("parent_id", pa.string()), ("piece", pa.int64()), ("text", pa.string())])


class DecontaminateConfig(Config):
    """Defaults are MT-NLG 530B's (Megatron-LM tools/openwebtext/filter_ngrams.py) unless said otherwise.

    benchmarks: in local files. tasks: of lm-eval, whose texts the caller hands over. ngram: words of a match;
    shortest_ngram: the least words of a text that is shorter than that; shorter ones are not searched (counted).
    common: an n-gram in so many documents is a common phrase and does not count. (Megatron counts occurrences;
    documents, as GPT-3 does, so that a text that repeats a question does not hide itself.)
    policy: `split` cuts the match, `margin` characters to each side and on to a sentence end, and keeps pieces of at
    least shortest_piece characters, of which there may be most_pieces; `drop` removes the document; `annotate` only
    reports."""

    benchmarks: tuple[BenchmarkConfig, ...] = ()
    tasks: tuple[str, ...] = ()
    ngram: int = Field(default=13, ge=2)
    shortest_ngram: int = Field(default=8, ge=2)
    common: int = Field(default=10, ge=2)
    policy: Policy = "split"
    margin: int = Field(default=200, ge=0)
    shortest_piece: int = Field(default=200, ge=1)
    most_pieces: int = Field(default=10, ge=1)

    @model_validator(mode="after")
    def n_grams_in_order(self) -> Self:
        if self.shortest_ngram > self.ngram:
            raise ValueError(f"shortest_ngram={self.shortest_ngram} is over ngram={self.ngram}; try {self.ngram}")
        return self

    @model_validator(mode="after")
    def one_name_each(self) -> Self:
        names = [*(benchmark.name for benchmark in self.benchmarks), *self.tasks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the benchmark {twice[0]!r} is named twice; give each its own name")
        return self

    @property
    def cut_rule(self) -> CutRule:
        return CutRule(self.margin, self.shortest_piece, self.most_pieces)


@dataclass(frozen=True)
class Decontamination:
    """matches: which documents share how much with which benchmark texts. hits: what becomes of each document.
    pieces: the documents that stand in a split one's stead. report: the page of `report.py`, as JSON."""

    matches: pa.Table
    hits: pa.Table
    pieces: pa.Table
    report: dict[str, Any]


def decontaminate(
    parts: Sequence[Part],
    config: DecontaminateConfig,
    engine: LocalEngine,
    folder: Path,
    task_examples: Sequence[Example] = (),
) -> Decontamination:
    """Searches the living documents for the texts of the config's benchmarks and, if it names tasks, `task_examples`.

    Tables are ordered by doc_id (then benchmark text, piece). The result does not depend on workers, files or order.
    `folder` takes intermediate files; called again with the same arguments after a kill, it goes on from them.
    Raises RecipeError if a task's texts were not handed over, InputError for a damaged file."""
    examples = [example for benchmark in config.benchmarks for example in read_benchmark(benchmark)]
    examples += _of_tasks(config.tasks, task_examples)
    claim(folder, _identity(parts, config, examples))
    index = build_index(examples, config.ngram, config.shortest_ngram)
    _save_index(index, folder)
    found = _search_parts(parts, engine, folder)
    common = _common(found, len(index.keys), config.common)
    files = _cut_parts(parts, found, common, examples, config, engine, folder)
    matches, hits, kept = (_joined(files, name, schema) for name, schema in SCHEMAS.items())
    report = contamination_report(examples, index, common, matches, hits)
    return Decontamination(matches, hits, kept, report)


SCHEMAS = {"matches": MATCHES, "hits": HITS, "pieces": PIECES}
SORT_KEYS = {"matches": ("doc_id", "text"), "hits": ("doc_id",), "pieces": ("parent_id", "piece")}


def _of_tasks(tasks: Sequence[str], examples: Sequence[Example]) -> list[Example]:
    """A suite's name is not its tasks', so only the absence of all texts can be told."""
    if tasks and not examples:
        raise RecipeError(f"no texts of the task {tasks[0]!r} were handed over; name local files in `benchmarks`")
    return list(examples) if tasks else []


def _identity(parts: Sequence[Part], config: DecontaminateConfig, examples: Sequence[Example]) -> dict[str, Any]:
    texts = [[example.benchmark, example.example, example.field, example.text] for example in examples]
    settings = config.model_dump(mode="json", exclude={"benchmarks"})
    return {"config": settings, "texts": fingerprint(texts), "parts": [part_identity(part) for part in parts]}


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


def _common(found: Sequence[np.ndarray], num_ngrams: int, limit: int) -> np.ndarray:
    """bool[n-grams]: those that stand in at least `limit` documents."""
    documents = np.zeros(num_ngrams, np.int64)
    for matches in found:
        once = np.unique(matches[:2], axis=1)
        documents += np.bincount(once[1], minlength=num_ngrams)
    return documents >= limit


def _cut_parts(
    parts: Sequence[Part],
    found: Sequence[np.ndarray],
    common: np.ndarray,
    examples: Sequence[Example],
    config: DecontaminateConfig,
    engine: LocalEngine,
    folder: Path,
) -> list[Path]:
    """Prefixes of the parts' files of matches, hits and pieces."""
    prefixes, tasks = [], []
    for number, (part, matches) in enumerate(zip(parts, found, strict=True)):
        counting = matches[:, ~common[matches[1]]]
        if counting.shape[1]:
            prefixes.append(folder / f"part-{number:05d}")
            if not _file(prefixes[-1], "hits").exists():
                tasks.append((part, counting, common, tuple(examples), config, folder, prefixes[-1]))
    engine.map(_cut_part, tasks, "decontamination", [task[1].shape[1] for task in tasks], "matches")
    return prefixes


def _file(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{name}.parquet")


def _cut_part(task) -> None:
    part, found, common, examples, config, folder, prefix = task
    index = _load_index(folder)
    counting = _counting(index, common)
    wanted = np.zeros(len(part.living()), bool)
    wanted[found[0]] = True
    rows: dict[str, list[tuple]] = {name: [] for name in SCHEMAS}
    for numbers, doc_ids, texts in part.batches(wanted):
        for row, doc_id, text in zip(numbers, doc_ids.to_pylist(), texts.to_pylist(), strict=True):
            mine = found[1:, found[0] == row]
            spans = word_spans(text)
            rows["matches"] += _matches(doc_id, text, mine, spans, index, counting, examples)
            hit, kept = _cut(doc_id, text, mine, spans, index, config)
            rows["hits"].append(hit)
            rows["pieces"] += kept
    for name in ("matches", "pieces", "hits"):  # hits last: their file says that all three are whole
        with atomic_path(_file(prefix, name)) as temporary:
            pq.write_table(_table(rows[name], SCHEMAS[name]), temporary, compression="zstd")


def _matches(doc_id, text, mine, spans, index, counting, examples) -> list[tuple]:
    """Rows of MATCHES: the benchmark texts that share n-grams with the document."""
    shared: dict[int, set[int]] = {}
    earliest: dict[int, int] = {}
    for ngram, word in mine.T.tolist():
        for owner in index.text_of[index.text_first[ngram] : index.text_first[ngram + 1]].tolist():
            shared.setdefault(owner, set()).add(ngram)
            earliest.setdefault(owner, word)
    found = []
    for owner, ngrams in sorted(shared.items()):
        start = max(spans[0, earliest[owner]] - EXCERPT_MARGIN, 0)
        excerpt = text[start : start + 4 * EXCERPT_MARGIN]
        example = examples[owner]
        names = (example.benchmark, example.example, example.field)
        found.append((doc_id, *names, owner, len(ngrams), int(counting[owner]), excerpt))
    return found


def _counting(index: NgramIndex, common: np.ndarray) -> np.ndarray:
    """int64[texts]: the distinct n-grams of each benchmark text that are no common phrases."""
    ngram_of_pair = np.repeat(np.arange(len(common)), np.diff(index.text_first))
    return np.bincount(index.text_of[~common[ngram_of_pair]], minlength=len(index.ngrams_of))


def _cut(doc_id, text, mine, spans, index, config) -> tuple[tuple, list[tuple]]:
    """(row of HITS, rows of PIECES)."""
    if config.policy == "annotate":
        return (doc_id, "annotated", 1, 0), []
    if config.policy == "drop":
        return (doc_id, "dropped", 0, len(text)), []
    ngrams, words = mine
    places = zip(spans[0, words].tolist(), spans[1, words + index.lengths[ngrams] - 1].tolist(), strict=True)
    left = pieces(text, cut_spans(text, list(places), config.margin), config.cut_rule)
    if not left:
        return (doc_id, "dropped", 0, len(text)), []
    removed = len(text) - sum(map(len, left))
    kept = [(piece_id(doc_id, number), doc_id, number, piece) for number, piece in enumerate(left)]
    return (doc_id, "split", len(left), removed), kept


def piece_id(doc_id: str, piece: int) -> str:
    """The 32 hex digits of a piece: a 128-bit hash of its parent's and its number."""
    return xxhash.xxh3_128_hexdigest(f"{doc_id}/{piece}".encode())


def _table(rows: list[tuple], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def _joined(prefixes: Sequence[Path], name: str, schema: pa.Schema) -> pa.Table:
    tables = [schema.empty_table(), *(pq.read_table(_file(prefix, name), schema=schema) for prefix in prefixes)]
    return pa.concat_tables(tables).sort_by([(key, "ascending") for key in SORT_KEYS[name]]).combine_chunks()
