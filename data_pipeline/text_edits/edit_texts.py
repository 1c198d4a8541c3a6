"""The step of curation that edits texts (duplicate paragraphs and lines, repeated substrings, benchmark texts), and the
annotation of what it edited: the same columns, computed on the edited texts.

Each edit reads the texts that the one before wrote. Detected language and signals are those of the edited text. The
filters are not applied again; the values they compared are in the ledger. `text_hash`, which decides the split, stays
that of the text before the edit: so all pieces of a document are in one split, and an edit never moves a document to
another split. `before_EDIT_` columns and quality scores are not computed again either."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.annotate.annotate import ROW_GROUP_ROWS, AnnotateConfig
from gristmill.data_pipeline.annotate.optional_signals import own_columns
from gristmill.data_pipeline.decontamination.config import BenchmarkExample, DecontaminateConfig
from gristmill.data_pipeline.decontamination.decontaminate import Decontamination, decontaminate
from gristmill.data_pipeline.dedup.spans import SpanDedupConfig, find_duplicate_spans
from gristmill.data_pipeline.dedup.substrings import SubstringDedupConfig, find_repeated_substrings
from gristmill.data_pipeline.filters.apply import (
    KEPT,
    REMOVED_LATER,
    SOURCE,
    FilterResults,
    Results,
    SourceRows,
    marks_of,
    source_runs,
)
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.removal_step import (
    EvidenceFiles,
    Removals,
    SourceState,
    document_files_after,
    kept_document_files,
    work_folder,
)
from gristmill.data_pipeline.readers.document import metadata_json
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.kernel import measure_buffer
from gristmill.data_pipeline.signals.language import LANGUAGE_FIELDS, detect_buffer
from gristmill.data_pipeline.signals.signal_names import SIGNAL_FIELDS
from gristmill.data_pipeline.text_edits.span_removal import EditedFile, SpanRemoval, edit_document_files
from gristmill.foundation.checksums import checksummed_path
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence
from gristmill.foundation.runtime.tasks.task_files import fetch

PARENT_ROW = pa.field("parent_row", pa.int64())  # the row of the annotated file that it comes from
PARENT_KEY, PIECE_KEY = "parent_id", "piece"  # keys in the metadata of a piece


@dataclass(frozen=True)
class ReannotatedFile:
    """An annotated file to write again. document_file: its texts, row for row, and which rows are kept.
    pieces: of documents that were split (PIECES), or None. scores: of the annotated file's rows, or None."""

    annotated: Path
    document_file: DocumentFile
    pieces: Path | None
    scores: Path | None
    config: AnnotateConfig
    path: Path

    @property
    def new_scores(self) -> Path:
        return _scores_beside(self.path)


def _scores_beside(path: Path) -> Path:
    return path.with_suffix(".npy")


@dataclass(frozen=True)
class TextEdits:
    """document_files: all annotated files in their order, row for row, with the edited texts where there are any.
    removals: the steps before and these. span_files: by step, the file of the removed spans of each document file.
    contamination: the benchmark texts that were found; None if the recipe names no benchmarks."""

    document_files: Sequence[DocumentFile]
    removals: list[Removals]
    span_files: tuple[Sequence[Path], ...]
    contamination: Decontamination | None

    def evidence(self) -> Sequence[EvidenceFiles]:
        """By document_file, what the ledger records of edited and contaminated documents."""

        def of_file(number: int) -> EvidenceFiles:
            of_benchmarks = EvidenceFiles() if self.contamination is None else self.contamination.evidence(number)
            spans = [of_step[number] for of_step in self.span_files]
            return replace(of_benchmarks, removed_spans=(*spans, *of_benchmarks.removed_spans))

        return LazySequence(of_file, range(len(self.document_files)))

    def piece_file(self, number: int) -> Path | None:
        return None if self.contamination is None else self.contamination.piece_file(number)

    def with_edits(self, edited: EditedFile) -> "TextEdits":
        return replace(self, span_files=(*self.span_files, edited.span_files))

    def after_removal(self, removed: Removals, document_files: Sequence[DocumentFile]) -> "TextEdits":
        """The edits after a step that removed documents."""
        left = document_files_after(document_files, removed)
        return replace(self, document_files=left, removals=[*self.removals, removed])


@dataclass(frozen=True)
class EditSettings:
    """spans, substrings, decontaminate: empty or None switches the step off. task_examples: the texts of the tasks
    that `decontaminate` names."""

    spans: Sequence[SpanDedupConfig]
    substrings: SubstringDedupConfig | None
    decontaminate: DecontaminateConfig | None
    task_examples: Sequence[BenchmarkExample] = ()


def edit_texts(
    curated: Sequence[SourceState],
    removals: Sequence[Removals],
    settings: EditSettings,
    folder: Path,
    engine: Engine,
) -> TextEdits:
    """Removes duplicate spans, repeated substrings and benchmark texts from the documents that `removals` left.

    `folder` takes intermediate files; called again with the same arguments after a kill, it resumes from them."""
    document_files = kept_document_files(curated, removals)
    state = TextEdits(document_files, list(removals), (), None)
    for spans in settings.spans:
        state = _spans(state, spans, folder, engine)
    if settings.substrings is not None:
        state = _substrings(state, settings.substrings, folder, engine)
    if settings.decontaminate is not None:
        config = settings.decontaminate
        work = work_folder(folder, "decontaminate", state.document_files, config.model_dump(mode="json"))
        overlaps = decontaminate(state.document_files, config, engine, work, settings.task_examples)
        state = replace(state, contamination=overlaps).after_removal(overlaps.removals, state.document_files)
    return state


def _spans(state: TextEdits, config: SpanDedupConfig, folder: Path, engine: Engine) -> TextEdits:
    step = f"{config.unit}_dedup"
    work = work_folder(folder, step, state.document_files, config.model_dump(mode="json"))
    spans = find_duplicate_spans(state.document_files, config, engine, work / "spans")
    removal = SpanRemoval(step, "min_count")
    edited = edit_document_files(state.document_files, spans, removal, engine, work / "texts")
    return state.with_edits(edited).after_removal(edited.removals, edited.document_files)


def _substrings(state: TextEdits, config: SubstringDedupConfig, folder: Path, engine: Engine) -> TextEdits:
    step, policy = "substring_dedup", config.policy
    work = work_folder(folder, step, state.document_files, config.model_dump(mode="json"))
    spans = find_repeated_substrings(state.document_files, config, engine, work / "spans")
    drop_share = config.drop_share if policy == "drop" else None
    removal = SpanRemoval(step, policy, in_bytes=True, is_applied=policy == "remove", drop_share=drop_share)
    edited = edit_document_files(state.document_files, spans, removal, engine, work / "texts")
    state = state.with_edits(edited)
    return state if policy == "annotate" else state.after_removal(edited.removals, edited.document_files)


def reannotate(
    curated: Sequence[SourceState],
    edits: TextEdits,
    scores: Mapping[str, Sequence[Path]],
    annotated: Sequence[AnnotateConfig],
    folder: Path,
    engine: Engine,
) -> tuple[list[SourceState], dict[str, Sequence[Path]]]:
    """The sources with a new file in the place of each annotated one whose texts changed, and their scores.

    scores: by source, the file of the scores of each of its files. annotated: how each source is annotated.
    A new file holds the kept documents alone, pieces in the place of their parent; all of it is kept. In the others
    KEPT rows are those that no step removed."""
    pieces = [edits.piece_file(number) is not None for number in range(len(edits.document_files))]
    work = work_folder(folder, "rewritten", edits.document_files, pieces)
    sources = [
        _Reannotation(state, edits, scores.get(state.source.name), config, work)
        for state, config in zip(curated, annotated, strict=True)
    ]
    missing = [
        (source, file) for source in sources for file in source.numbers if source.is_new[file] and not source.has(file)
    ]
    tasks = LazySequence(lambda number: missing[number][0].task(missing[number][1]), range(len(missing)))
    engine.map(write_reannotated, tasks, "annotate again", [task.document_file.bytes for task in tasks], "B")
    new_scores = {source.state.source.name: source.scores_written for source in sources if source.scores is not None}
    return [source.written for source in sources], new_scores


class _Reannotation:
    """The files of a source, of which those with changed texts are written again. is_new: by file of the source."""

    def __init__(
        self,
        state: SourceState,
        edits: TextEdits,
        scores: Sequence[Path] | None,
        config: AnnotateConfig,
        work: Path,
    ):
        self.state, self.edits, self.scores, self.config, self.work = state, edits, scores, config, work
        self.numbers = range(len(state.paths))
        self.is_new = bytes(self._is_changed(file) for file in self.numbers)

    def _is_changed(self, file: int) -> bool:
        number = self.state.files[file]
        is_split = self.edits.piece_file(number) is not None
        return is_split or self.edits.document_files[number].path != self.state.paths[file]

    def has(self, file: int) -> bool:
        return self._path(file).exists()

    def task(self, file: int) -> ReannotatedFile:
        number, annotated = self.state.files[file], self.state.paths[file]
        scores = None if self.scores is None else self.scores[file]
        document_file, pieces = self.edits.document_files[number], self.edits.piece_file(number)
        return ReannotatedFile(annotated, document_file, pieces, scores, self.config, self.work / annotated.name)

    @property
    def written(self) -> SourceState:
        """The source with its new files."""
        results = LazySequence(self._results, self.numbers)
        return replace(self.state, paths=LazySequence(self._path, self.numbers), filter_results=results)

    @property
    def scores_written(self) -> Sequence[Path]:
        return LazySequence(self._scores, self.numbers)

    def _path(self, file: int) -> Path:
        annotated = self.state.paths[file]
        return self.work / annotated.name if self.is_new[file] else annotated

    def _results(self, file: int) -> Results:
        results = self.state.filter_results[file]
        if self.is_new[file]:
            return RewrittenResults(results, self._path(file))
        return LeftResults(results, self.edits.document_files[self.state.files[file]])

    def _scores(self, file: int) -> Path:
        assert self.scores is not None
        return _scores_beside(self._path(file)) if self.is_new[file] else self.scores[file]


@dataclass(frozen=True)
class WrittenResults:
    """The results of a file that is written, loaded from those of the annotated file behind it."""

    annotated: Results

    @property
    def nearest(self) -> None:
        return None

    @property
    def sources(self) -> tuple[SourceRows, ...]:
        return self.load().sources

    @property
    def num_quarantined(self) -> int:
        return 0

    @property
    def num_documents(self) -> int:
        return self.load().num_documents

    @property
    def present_languages(self) -> tuple[str, ...]:
        return self.load().present_languages

    def load(self) -> FilterResults:
        raise NotImplementedError


@dataclass(frozen=True)
class LeftResults(WrittenResults):
    """Filter results of an annotated file that is written as it is: KEPT are the rows that no step removed."""

    document_file: DocumentFile

    def load(self) -> FilterResults:
        failed_rule = np.where(self.document_file.kept_mask(), np.int16(KEPT), np.int16(REMOVED_LATER))
        return replace(self.annotated.load(), failed_rule=failed_rule)


@dataclass(frozen=True)
class RewrittenResults(WrittenResults):
    """Filter results of a new file, all of which is kept; the filters are not applied again."""

    path: Path

    def load(self) -> FilterResults:
        with pq.ParquetFile(fetch(self.path)) as file:
            names = ["num_bytes", "text_hash", PARENT_ROW.name]
            table = file.read([*names, SOURCE] if SOURCE in file.schema_arrow.names else names)
        runs = source_runs(table.column(SOURCE)) if SOURCE in table.column_names else []
        return FilterResults(
            failed_rule=np.full(len(table), KEPT, np.int16),
            bytes=table.column("num_bytes").to_numpy().astype(np.uint32),
            splits=self.annotated.load().splits[table.column(PARENT_ROW.name).to_numpy()],
            languages=np.zeros(len(table), np.int16),
            marks=marks_of(table.column("text_hash").to_numpy()),
            language_names=("",),
            sources=tuple(SourceRows(*run) for run in runs),
        )


def write_reannotated(task: ReannotatedFile) -> None:
    """The new scores, if there are any, and then the new file."""
    texts = pq.read_table(task.document_file.path, columns=["text"]).column("text")
    kept = task.document_file.kept_mask()
    pieces = _pieces(task.pieces)
    parents = [np.empty(0, np.int64)]
    with pq.ParquetFile(task.annotated) as file, checksummed_path(task.path) as temporary:
        schema = file.schema_arrow.append(PARENT_ROW)
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            start = 0
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                rows = start + np.flatnonzero(kept[start : start + len(table)])
                edited = _edited_rows(table, rows - start, texts.take(pa.array(rows)).to_pylist(), pieces, task)
                parents.append(start + edited.column(PARENT_ROW.name).to_numpy())
                edited = edited.set_column(len(schema) - 1, PARENT_ROW, pa.array(parents[-1]))
                writer.write_table(edited.select(schema.names), row_group_size=ROW_GROUP_ROWS)
                start += len(table)
        if task.scores is not None:
            scores = np.load(task.scores)[np.concatenate(parents)]
            with checksummed_path(task.new_scores) as unfinished, unfinished.open("wb") as scores_file:
                np.save(scores_file, scores)


def _pieces(path: Path | None) -> dict[str, list[tuple[str, str]]]:
    """By parent: (doc_id, text) of each of its pieces."""
    pieces: dict[str, list[tuple[str, str]]] = {}
    if path is not None:
        for row in pq.read_table(path).to_pylist():
            pieces.setdefault(row["parent_id"], []).append((row["doc_id"], row["text"]))
    return pieces


def _edited_rows(
    table: pa.Table,
    rows: np.ndarray,
    texts: Sequence[str],
    pieces: Mapping[str, list[tuple[str, str]]],
    task: ReannotatedFile,
) -> pa.Table:
    """These rows of a row group with their new texts, a split one once a piece, measured again where they changed."""
    doc_ids = table.column("doc_id").take(pa.array(rows)).to_pylist()
    parents: list[int] = []
    ids: list[str] = []
    new: list[str] = []
    numbers: list[int] = []  # of the piece; -1 for a whole document
    for row, doc_id, text in zip(rows.tolist(), doc_ids, texts, strict=True):
        document_pieces = pieces.get(doc_id) or [(doc_id, text)]
        for number, (piece_id, piece) in enumerate(document_pieces):
            parents.append(row)
            ids.append(piece_id)
            new.append(piece)
            numbers.append(number if doc_id in pieces else -1)
    taken = table.take(pa.array(parents, pa.int64()))
    before = taken.column("text").to_pylist()
    changed = np.array([i for i, (old, text) in enumerate(zip(before, new, strict=True)) if old != text], np.int64)
    taken = _with_measures(taken, changed, [new[i] for i in changed], task)
    taken = _with_column(taken, "metadata", _metadata(taken, numbers))
    taken = _with_column(taken, "doc_id", pa.array(ids, pa.string()))
    taken = _with_column(taken, "text", pa.array(new, pa.string()))
    return taken.append_column(PARENT_ROW, pa.array(parents, pa.int64()))


def _with_measures(table: pa.Table, changed: np.ndarray, texts: list[str], task: ReannotatedFile) -> pa.Table:
    if not len(changed):
        return table
    config = task.config
    own = config.optional.own
    buffer = TextBuffer.of(texts)
    languages, signals = detect_buffer(buffer, config.language_id), measure_buffer(buffer, config.word_tokenizer)
    urls, metadata = (table.column(name).take(pa.array(changed)).combine_chunks() for name in ("url", "metadata"))
    optional = config.optional.columns(buffer, languages, urls, metadata)
    for field, measured in [
        *zip(LANGUAGE_FIELDS, languages.columns, strict=True),
        *zip(SIGNAL_FIELDS, signals.columns, strict=True),
        *zip(config.optional.fields()[: len(optional)], optional, strict=True),
    ]:
        table = _with_rows(table, field, changed, measured)
    if own:
        edited = _with_column(table.take(pa.array(changed)), "text", pa.array(texts, pa.string()))
        for signal, measured in zip(own, own_columns(own, edited), strict=True):
            table = _with_rows(table, signal.arrow_field(), changed, measured)
    return table


def _with_rows(table: pa.Table, field: pa.Field, rows: np.ndarray, values: pa.Array) -> pa.Table:
    """The table with these values of a column in these rows."""
    mask = np.zeros(len(table), bool)
    mask[rows] = True
    column = pc.replace_with_mask(table.column(field.name).combine_chunks(), mask, values.cast(field.type))
    return _with_column(table, field.name, column)


def _with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name), values)


def _metadata(table: pa.Table, numbers: Sequence[int]) -> pa.Array:
    """The metadata of a piece name its parent and its number, from 0; a document that is whole keeps its own."""
    metadata = []
    for text, doc_id, number in zip(
        table.column("metadata").to_pylist(), table.column("doc_id").to_pylist(), numbers, strict=True
    ):
        own = orjson.loads(text) if text else {}
        metadata.append(text if number < 0 else metadata_json({**own, PARENT_KEY: doc_id, PIECE_KEY: number}))
    return pa.array(metadata, pa.string())
