"""Indexes a corpus: documents to tokens, one shuffled .bin and .idx per source and split.

Tasks encode ranges of documents; others merge their small files, shuffled."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.splits import (
    SLICE_BYTES,
    SPLITS,
    DocumentRange,
    Repeats,
    document_ranges,
    read,
    read_repeats,
)
from gristmill.data_pipeline.indexed.config import MixConfig
from gristmill.data_pipeline.indexed.dataset import (
    Dataset,
    FimIds,
    IndexedSource,
    SplitCounts,
    merge,
    source_prefix,
    write_dataset,
)
from gristmill.data_pipeline.indexed.draws import blend_weights, key_of
from gristmill.data_pipeline.indexed.format import (
    IndexedReader,
    IndexedWriter,
    bin_path,
    dtype_for,
    idx_path,
    indexed_writer,
)
from gristmill.data_pipeline.indexed.language_shares import cell_name, pooled
from gristmill.data_pipeline.indexed.mix import (
    cell_names,
    documents_of,
    documents_path,
    language_tokens,
    source_cells,
    token_ranges_of,
    write_cells,
)
from gristmill.data_pipeline.indexed.sentence_pairs import split_sentences
from gristmill.data_pipeline.ledger.document_file import utf8_of
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path, file_digest, remove_tree, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.task_files import fetch, fetch_folder
from gristmill.tokenizers.encoders import Encoder
from gristmill.tokenizers.tokenizer import Tokenizer, load_bulk_tokenizer, load_encoder

# Encodes documents: a task reads document ranges of a corpus and writes their token ids as one small indexed file.

# Text given to the encoder in one call, about; a longer document is one call.
BATCH_BYTES = 1_000_000
# Text of a task, about: putting its three files in place takes as long as encoding 1.5 MB.
TASK_BYTES = 8 * SLICE_BYTES
DESCRIBED = ["doc_id", "language"]  # columns of documents


@dataclass(frozen=True)
class EncodeTask:
    """prefix: of the output .bin and .idx; PREFIX.json, written last, holds the ranges and the bytes of their texts.
    sentences: every sentence is a sequence of its own. described: PREFIX.parquet holds the id, language and bytes of
    each document. differing: the code points that the encoder does not encode itself."""

    tokenizer: Path
    encoder: str
    vocab_size: int
    end_of_document: int
    ranges: tuple[DocumentRange, ...]
    prefix: Path
    sentences: bool = False
    described: bool = False
    differing: tuple[tuple[int, int], ...] = ()

    @property
    def bytes(self) -> int:
        return sum(documents.bytes for documents in self.ranges)

    def is_done(self) -> bool:
        """Whether the files are complete and of these ranges: another version may have cut them at other rows."""
        note = counts_path(self.prefix)
        if not (note.is_file() and idx_path(self.prefix).is_file()):
            return False
        return json.loads(fetch(note).read_bytes()).get("ranges") == self.places()

    def places(self) -> list[list[str | int]]:
        """The file's name, row group, first row and number of rows of each range."""
        return [[part.path.name, part.row_group, part.first, part.documents] for part in self.ranges]


def encode_tasks(ranges: Sequence[DocumentRange], common: EncodeTask) -> list[EncodeTask]:
    """Groups consecutive ranges up to about TASK_BYTES per task; outputs are PREFIX-00000, PREFIX-00001 ...

    common: what all tasks share, with the PREFIX and no ranges."""
    groups: list[list[DocumentRange]] = []
    for documents in ranges:
        if not groups or sum(earlier.bytes for earlier in groups[-1]) + documents.bytes > TASK_BYTES:
            groups.append([])
        groups[-1].append(documents)
    name = common.prefix.name
    return [
        replace(common, ranges=tuple(group), prefix=common.prefix.with_name(f"{name}-{number:05d}"))
        for number, group in enumerate(groups)
    ]


def encode_documents(task: EncodeTask) -> None:
    """Writes the task's indexed file unless it is complete. Raises InputError naming a document that has no text."""
    if task.is_done():
        return
    encoder = _loaded_once(fetch_folder(task.tokenizer), task.encoder, task.differing)
    text_bytes = 0
    described: list[pa.Table] = []
    with indexed_writer(task.prefix, dtype_for(task.vocab_size), task.vocab_size) as writer:
        for documents in task.ranges:
            table = read(documents, "text", *(DESCRIBED if task.described else ()))
            texts = table["text"].combine_chunks()
            _check_texts(documents, texts)
            buffer, offsets = utf8_of(texts)
            if task.described:
                described.append(table.select(DESCRIBED).append_column("bytes", pa.array(np.diff(offsets))))
            if task.sentences:
                _encode_sentences(encoder, task.end_of_document, texts.to_pylist(), writer)
            else:
                _encode_texts(encoder, task.end_of_document, buffer, offsets, writer)
            text_bytes += int(offsets[-1] - offsets[0])
    if described:
        with atomic_path(documents_path(task.prefix)) as temporary:
            pq.write_table(pa.concat_tables(described), temporary)
    write_atomic(counts_path(task.prefix), canonical_json({"bytes": text_bytes, "ranges": task.places()}))


def counts_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def _encode_texts(
    encoder: Encoder, end_of_document: int, buffer: np.ndarray, offsets: np.ndarray, writer: IndexedWriter
) -> None:
    """Appends the texts, each followed by an end-of-document token. Text i is the UTF-8 buffer[offsets[i] : offsets[i +
    1]], uint8 and int64[texts + 1]."""
    first = 0
    while first < len(offsets) - 1:
        start = int(offsets[first])
        last = max(first + 1, int(np.searchsorted(offsets, start + BATCH_BYTES, side="right")) - 1)
        ends = offsets[first + 1 : last + 1] - start
        writer.add_many(*encoder.encode_utf8(buffer[start : start + int(ends[-1])], ends, end_of_document))
        first = last


def _encode_sentences(encoder: Encoder, end_of_document: int, texts: Sequence[str], writer: IndexedWriter) -> None:
    """Appends the texts with a sequence for each sentence; the last one ends with the end-of-document token."""
    for text in texts:
        ids, lengths = encoder.encode_flat(split_sentences(text))
        lengths[-1] += 1
        lengths = lengths[lengths > 0]  # a sentence may have no token, such as one of characters that are dropped
        writer.add_many(np.append(ids, end_of_document), lengths, np.array([len(lengths)]))


def _check_texts(documents: DocumentRange, texts: pa.Array) -> None:
    if texts.null_count:
        row = documents.first + texts.is_null().index(True).as_py()
        raise InputError(
            f"{documents.path}: row group {documents.row_group}, row {row} has no text; run `gristmill curate` again"
        )


def _loaded_once(folder: Path, encoder: str, differing: tuple[tuple[int, int], ...] = ()) -> Encoder:
    """The encoder, loaded once per process while its files stay the same: loading takes as long as one task."""
    states = sorted((path.name, path.stat()) for path in folder.iterdir())
    files = tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)
    return _loaded(folder.absolute(), encoder, differing, files)


@lru_cache(maxsize=2)
def _loaded(
    folder: Path, encoder: str, differing: tuple[tuple[int, int], ...], files: tuple[tuple[str | int, ...], ...]
) -> Encoder:
    """files: the state of the folder's files, so that a tokenizer trained again under its old path is loaded again."""
    return load_encoder(folder, encoder, differing)


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
    engine.reporter.info(f"index: encoding with {tokenizer.encoder}")
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
                tokenizer.vocab_size,
                tokenizer.end_of_document,
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
        note=counts_path(request.folder / CHUNKS / split / name),
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
        ranges = [token_ranges_of(chunk) for chunk in task.chunks]
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
        text_bytes = sum(json.loads(fetch(counts_path(chunk)).read_bytes())["bytes"] for chunk in task.chunks)
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
    note = counts_path(folder / CHUNKS / split / source)
    if not note.is_file():
        return SplitCounts(documents=0, tokens=0, bytes=0, sha256="")
    return SplitCounts.model_validate_json(note.read_bytes())
