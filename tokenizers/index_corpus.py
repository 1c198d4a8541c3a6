"""Indexes a corpus: documents to tokens, one shuffled .bin and .idx per source and split."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.indexed.config import blend_weights
from gristmill.data_pipeline.indexed.dataset import (
    Dataset,
    FimIds,
    IndexedSource,
    SplitCounts,
    source_prefix,
    write_dataset,
)
from gristmill.data_pipeline.indexed.documents import Repeats, document_ranges, read_repeats
from gristmill.data_pipeline.indexed.format import bin_path, dtype_for
from gristmill.data_pipeline.indexed.language_shares import (
    cell_name,
    language_tag,
    pooled,
)
from gristmill.data_pipeline.indexed.merge import merge
from gristmill.data_pipeline.indexed.mix import cell_names, source_cells, write_cells
from gristmill.data_pipeline.indexed.mix_config import MixConfig
from gristmill.data_pipeline.indexed.permutation import key_of
from gristmill.data_pipeline.indexed.reader import IndexedReader
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest, remove_tree, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.task_files import fetch
from gristmill.tokenizers.encode import EncodeTask, documents_path, encode_documents, encode_tasks, note_path
from gristmill.tokenizers.tokenizer import Tokenizer, load_bulk_tokenizer

CHUNKS = "chunks"  # temporary folder: small indexed files in the corpus's order, removed when all are merged
# Starting a process costs 1.5 s of imports; below twice that the work runs in this process.
MIN_PARALLEL_SECONDS = 3.0
ENCODE_BYTES_PER_SECOND = 12e6  # text per second and core
MERGE_BYTES_PER_SECOND = 200e6


@dataclass(frozen=True)
class IndexRequest:
    """corpus, tokenizer: the folders of the stages curate and tokenizer. sources: names, in the recipe's order.
    folder: the output folder, which may hold files of an earlier run. sentences: every sentence is a sequence of its
    own. min_language_tokens: every language of a source is a source of its own, those with fewer training tokens
    together as `other`; None: languages are not told apart. rehydrate: how often documents are written, by the size of
    their cluster. mix: which cells the documents are cut into. held_out: sources without a train split."""

    corpus: Path
    tokenizer: Path
    sources: tuple[str, ...]
    seed: int
    folder: Path
    sentences: bool = False
    min_language_tokens: int | None = None
    rehydrate: Mapping[int, int] = field(default_factory=dict)
    mix: MixConfig | None = None
    held_out: frozenset[str] = frozenset()


@dataclass(frozen=True)
class MergeTask:
    """chunks: prefixes in their order. prefix: the merged file's. note: JSON with its counts. key: of its shuffle.
    languages: only the documents with these tags are merged, None all. repeats: how often each is written. cell: only
    the documents of this cell in this table are merged."""

    chunks: tuple[Path, ...]
    prefix: Path
    note: Path
    key: int
    languages: frozenset[str] | None = None
    repeats: Repeats | None = None
    cell: tuple[Path, str] | None = None


def index_corpus(request: IndexRequest, engine: Engine) -> tuple[Dataset, Tokenizer]:
    """Writes the .bin and .idx files and their description into request.folder; finished files are reused.

    Raises InputError if a source has no documents in the train split, or a document has no text."""
    tokenizer = load_bulk_tokenizer(request.tokenizer)
    engine.reporter.say(f"index: encoding with {tokenizer.encoder}")
    encodes, merges = _plan_tasks(request, tokenizer)
    is_cut = request.min_language_tokens is not None or request.mix is not None
    text_bytes = sum(task.bytes for tasks in encodes for task in tasks)
    todo = [
        task
        for tasks, merge_task in zip(encodes, merges, strict=True)
        if is_cut or not _is_merged(merge_task)
        for task in tasks
    ]
    encoding = _sized(engine, text_bytes / ENCODE_BYTES_PER_SECOND)
    encoding.map(encode_documents, todo, "index: encoding", [task.bytes for task in todo], "B")
    merging = _sized(engine, text_bytes / MERGE_BYTES_PER_SECOND)
    names = list(request.sources)
    if request.min_language_tokens is not None:
        merges, names = _by_language(request, merges)
    if request.mix is not None:
        merges, names = _by_cell(request, merges)
    if request.rehydrate:
        repeats = read_repeats(request.corpus, request.rehydrate)
        merges = [replace(task, repeats=repeats) if task.prefix.parent.name == "train" else task for task in merges]
    merging.map(_merge, merges, "index: shuffling", unit="files")
    dataset = _describe(request, tokenizer, names)
    write_dataset(request.folder, dataset)
    remove_tree(request.folder / CHUNKS)
    return dataset, tokenizer


def _sized(engine: Engine, seconds: float) -> Engine:
    """The engine, or this process alone where starting workers would take longer than the work."""
    return engine if seconds >= MIN_PARALLEL_SECONDS else LocalEngine(1, engine.reporter)


def _plan_tasks(request: IndexRequest, tokenizer: Tokenizer) -> tuple[list[list[EncodeTask]], list[MergeTask]]:
    """For each source and split: the tasks that encode its chunks, and the task that merges them."""
    encodes: list[list[EncodeTask]] = []
    merges: list[MergeTask] = []
    for split in SPLITS:
        for source in request.sources:
            ranges = document_ranges(request.corpus, split, source)
            if not ranges and split == "train" and source not in request.held_out:
                raise InputError(
                    f"{request.corpus}: source {source!r} has no documents in the train split; "
                    "look at what curate removed, or drop the source"
                )
            if not ranges:
                continue
            chunk_prefix = request.folder / CHUNKS / split / source
            is_cut = request.min_language_tokens is not None or request.mix is not None
            described = is_cut or bool(request.rehydrate)
            common = EncodeTask(
                request.tokenizer,
                tokenizer.encoder,
                (),
                chunk_prefix,
                request.sentences,
                described=described,
                differing=tokenizer.differing,
            )
            tasks = encode_tasks(ranges, common)
            encodes.append(tasks)
            merges.append(_merge_task(request, split, source, tuple(task.prefix for task in tasks)))
    return encodes, merges


def _merge_task(
    request: IndexRequest, split: str, name: str, chunks: tuple[Path, ...], languages: frozenset[str] | None = None
) -> MergeTask:
    return MergeTask(
        chunks=chunks,
        prefix=source_prefix(request.folder, split, name),
        note=note_path(request.folder / CHUNKS / split / name),
        key=key_of(request.seed, "documents", name, split),
        languages=languages,
    )


def _by_language(request: IndexRequest, merges: list[MergeTask]) -> tuple[list[MergeTask], list[str]]:
    """(a task for each language of each source and split, SOURCE.LANGUAGE in the order of the recipe)."""
    assert request.min_language_tokens is not None
    tasks: list[MergeTask] = []
    names: list[str] = []
    # source -> language -> the name it is sampled under
    groups: dict[str, dict[str, str]] = {source: {} for source in request.held_out}
    for task in merges:
        split, source = task.prefix.parent.name, task.prefix.name
        tokens = language_tokens(task.chunks)
        if split == "train":
            groups[source] = pooled(tokens, request.min_language_tokens)
            names += [cell_name(source, group) for group in sorted(set(groups[source].values()))]
        members: dict[str, set[str]] = {}
        for language in tokens:
            members.setdefault(groups[source].get(language, language), set()).add(language)
        for group, languages in sorted(members.items()):
            name = cell_name(source, group)
            if name not in names:
                names.append(name)
            tasks.append(_merge_task(request, split, name, task.chunks, frozenset(languages)))
    return tasks, names


def _by_cell(request: IndexRequest, merges: list[MergeTask]) -> tuple[list[MergeTask], list[str]]:
    """(a task for each cell of each source, and for its held-out splits; the sources in the order of the recipe, each
    followed by its cells)."""
    assert request.mix is not None
    cut = [task.prefix.name for task in merges if task.prefix.parent.name == "train"]
    cut = [name for name in cut if not request.mix.sources or name in request.mix.sources]
    tasks: list[MergeTask] = []
    cells: dict[str, list[str]] = {source: [] for source in request.sources}
    for task in merges:
        split, source = task.prefix.parent.name, task.prefix.name
        if split != "train" or source not in cut:
            tasks.append(task)
            continue
        tables = [pq.read_table(fetch(documents_path(chunk)), columns=["doc_id", "language"]) for chunk in task.chunks]
        ranges = [_token_ranges(chunk) for chunk in task.chunks]
        tokens = np.concatenate([ends - starts for starts, ends in ranges])
        table = source_cells(request.corpus, source, pa.concat_tables(tables), tokens, request.mix)
        path = write_cells(request.folder, source, table)
        cells[source] = cell_names(path)
        for name in cells[source]:
            tasks.append(replace(_merge_task(request, split, name, task.chunks), cell=(path, name)))
    return tasks, [name for source in request.sources for name in (source, *cells[source])]


def _is_merged(task: MergeTask) -> bool:
    return task.note.is_file()


def _merge(task: MergeTask) -> None:
    """Writes the source's .bin and .idx in shuffled order, then the note with its counts; skipped if that exists."""
    if _is_merged(task):
        return
    if task.languages is None and task.repeats is None and task.cell is None:
        merge(task.chunks, task.prefix, task.key)
        text_bytes = sum(json.loads(fetch(note_path(chunk)).read_bytes())["bytes"] for chunk in task.chunks)
    else:
        chosen, text_bytes = documents_of(task.chunks, task.languages, task.repeats, task.cell)
        merge(task.chunks, task.prefix, task.key, chosen)
    reader = IndexedReader(task.prefix)
    counts = SplitCounts(
        documents=len(reader),
        tokens=reader.num_tokens,
        bytes=text_bytes,
        sha256=file_digest(bin_path(task.prefix)),
    )
    write_atomic(task.note, canonical_json(counts.model_dump(mode="json")))


def _describe(request: IndexRequest, tokenizer: Tokenizer, names: Sequence[str]) -> Dataset:
    """names: of the indexed files. Their weights are their shares of the training tokens."""
    fim = tokenizer.fim_ids()
    splits = {name: {split: _counts(request.folder, split, name) for split in SPLITS} for name in names}
    tokens = {name: counts["train"].tokens for name, counts in splits.items()}
    weights = blend_weights(dict.fromkeys(tokens), tokens)
    return Dataset(
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        dtype=str(dtype_for(tokenizer.vocab_size)),
        fim=None if fim is None else FimIds(prefix=fim[0], middle=fim[1], suffix=fim[2]),
        sources=tuple(
            IndexedSource(name=name, weight=weights[name], tokenizer=tokenizer.fingerprint, splits=counts)
            for name, counts in splits.items()
        ),
    )


def _counts(folder: Path, split: str, source: str) -> SplitCounts:
    note = note_path(folder / CHUNKS / split / source)
    if not note.is_file():
        return SplitCounts(documents=0, tokens=0, bytes=0, sha256="")
    return SplitCounts.model_validate_json(note.read_bytes())


# Which encoded documents go into a file, and how often: by language, and by the number of their duplicates.
#
# Read from the tables that the encoding tasks write beside their chunks.


def language_tokens(chunks: Sequence[Path]) -> dict[str, int]:
    """Language -> tokens of its documents, sorted by language."""
    totals: dict[str, int] = {}
    for chunk in chunks:
        languages = _languages(chunk)
        starts, ends = _token_ranges(chunk)
        for language, tokens in zip(languages.to_pylist(), (ends - starts).tolist(), strict=True):
            totals[language] = totals.get(language, 0) + tokens
    return dict(sorted(totals.items()))


def documents_of(
    chunks: Sequence[Path],
    languages: frozenset[str] | None,
    repeats: Repeats | None,
    cell: tuple[Path, str] | None = None,
) -> tuple[np.ndarray, int]:
    """(int64: numbers of the documents in these languages, counted over all chunks, each as often as it is repeated;
    the bytes of their texts). languages, cell: None takes all; repeats: None takes each document once."""
    in_cell = None if cell is None else _in_cell(*cell)
    wanted = None if languages is None else pa.array(sorted(languages), pa.string())
    numbers, first, text_bytes = [np.empty(0, np.int64)], 0, 0
    for chunk in chunks:
        table = pq.read_table(fetch(documents_path(chunk)), columns=["doc_id", "bytes"])
        times = np.ones(len(table), np.int64) if repeats is None else repeats.of(table["doc_id"])
        if wanted is not None:
            times *= np.asarray(pc.is_in(_languages(chunk), value_set=wanted))
        if in_cell is not None:
            times *= in_cell[first : first + len(table)]
        numbers.append(first + np.repeat(np.arange(len(table)), times))
        text_bytes += int((table["bytes"].to_numpy() * times).sum())
        first += len(table)
    return np.concatenate(numbers), text_bytes


def _in_cell(path: Path, name: str) -> np.ndarray:
    """bool[documents]: of all chunks of the source."""
    cells = pq.read_table(fetch(path), columns=["cell"])["cell"].cast(pa.string())
    return np.asarray(pc.equal(cells, name))


def _languages(chunk: Path) -> pa.Array:
    """The tag of each document; each distinct value is checked once."""
    column = pq.read_table(fetch(documents_path(chunk)), columns=["language"])["language"].combine_chunks()
    encoded = column.cast(pa.string()).dictionary_encode(null_encoding="encode")
    tags = pa.array([language_tag(value) for value in encoded.dictionary.to_pylist()], pa.string())
    return tags.take(encoded.indices)


def _token_ranges(chunk: Path) -> tuple[np.ndarray, np.ndarray]:
    reader = IndexedReader(chunk)
    return reader.token_ranges(np.arange(len(reader)))
