"""The documents and spans of text that one step after the filters removed, by annotated file and row."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.filters.apply import KEPT, FilterResults, NearestDocuments, Results, SourceRows
from gristmill.data_pipeline.filters.profiles import Rules
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.tasks.engine import LazySequence
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, fetch

REMOVED_FIELDS = {"row": "<i8", "value": "<f8", "duplicate_of": ("<u8", 2), "threshold": "<f8", "rule": "i1"}


class Removals(Protocol):
    """Documents that one step removed, in memory (`RemovalStep`) or on disk (`StoredRemovals`)."""

    @property
    def step(self) -> str: ...
    @property
    def threshold(self) -> float: ...
    def in_file(self, number: int) -> "RemovalStep":
        """The documents of one annotated file, ordered by row."""
        ...

    def removed_mask(self, file: int, num_rows: int) -> np.ndarray:
        """bool[num_rows]: which rows of the file this step removed."""
        ...


@dataclass(frozen=True)
class RemovalStep:
    """The documents that a step after the filters removed, sorted by file and row.

    files int32[N], rows int64[N]: number of the annotated file (over all sources) and row in it. values float64[N]:
    compared with the threshold: similarity, quality score, characters. duplicate_of uint64[N, 2]: the packed id of
    the kept document each is a duplicate of; None if the step removes no duplicates. thresholds float64[N], where they
    differ from `threshold`. rules int8[N]: the place of each document's rule in rule_names; None: the only one."""

    step: str
    threshold: float
    files: np.ndarray
    rows: np.ndarray
    values: np.ndarray
    duplicate_of: np.ndarray | None = None
    thresholds: np.ndarray | None = None
    rules: np.ndarray | None = None
    rule_names: Sequence[str] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its rules, STEP.RULE."""
        return tuple(f"{self.step}.{name}" for name in self.rule_names or ("threshold",))

    def sorted(self) -> "RemovalStep":
        return self._chosen(np.lexsort((self.rows, self.files)))

    def in_files(self, first: int, last: int) -> "RemovalStep":
        """The documents of the files first..last - 1."""
        return self._chosen(slice(*np.searchsorted(self.files, [first, last])))

    def in_file(self, number: int) -> "RemovalStep":
        return self.in_files(number, number + 1)

    def in_rows(self, start: int, stop: int) -> "RemovalStep":
        """The documents, of a step of one file, of the rows start..stop - 1, with rows counted from `start`."""
        removed = self._chosen(slice(*np.searchsorted(self.rows, [start, stop])))
        return RemovalStep(**{**vars(removed), "rows": removed.rows - start})

    def removed_mask(self, file: int, num_rows: int) -> np.ndarray:
        """bool[num_rows]: which rows of the file this step removed."""
        mask = np.zeros(num_rows, bool)
        mask[self.in_files(file, file + 1).rows] = True
        return mask

    def _chosen(self, chosen: np.ndarray | slice) -> "RemovalStep":
        arrays = ("files", "rows", "values", "duplicate_of", "thresholds", "rules")
        taken = {name: None if (column := getattr(self, name)) is None else column[chosen] for name in arrays}
        return RemovalStep(**{**vars(self), **taken})


def removed_dtype(*fields: str) -> np.dtype:
    """A record of a removed document with these of REMOVED_FIELDS."""
    return np.dtype([(name, *kind) if isinstance(kind, tuple) else (name, kind) for name, kind in _fields(fields)])


def _fields(names: Sequence[str]) -> list[tuple]:
    return [(name, kind) for name, kind in REMOVED_FIELDS.items() if name in names]


def write_removed(removed: PartitionedFiles, number: int, **columns: np.ndarray) -> None:
    """Writes what a step removed of one annotated file, as that part of `removed`, which has one range. columns: the
    fields of its records."""
    records = np.empty(len(columns["row"]), removed.dtype)
    for name, values in columns.items():
        records[name] = values
    removed.write(number, records, np.array([0, len(records)]))


@dataclass(frozen=True)
class StoredRemovals:
    """A step whose documents are on disk: `removed` has at least the fields row and value. A few bytes, whatever the
    step removed.

    is_by_part: `removed` has a part an annotated file, or none for a file that loses nothing (`write_removed`); else
    it has a range an annotated file."""

    step: str
    threshold: float
    removed: PartitionedFiles
    rule_names: Sequence[str] = ()
    is_by_part: bool = False

    def _records(self, number: int) -> np.ndarray:
        if not self.is_by_part:
            return self.removed.read(number)
        return self.removed.map_output(number)[1] if self.removed.has(number) else np.empty(0, self.removed.dtype)

    def in_file(self, number: int) -> RemovalStep:
        records = self._records(number)
        records = records[np.argsort(records["row"], kind="stable")]
        files = np.full(len(records), number, np.int32)
        duplicate_of, thresholds, rules = (
            np.ascontiguousarray(records[name]) if name in (records.dtype.names or ()) else None
            for name in ("duplicate_of", "threshold", "rule")
        )
        rows, values = np.ascontiguousarray(records["row"]), np.ascontiguousarray(records["value"])
        return RemovalStep(
            self.step, self.threshold, files, rows, values, duplicate_of, thresholds, rules, self.rule_names
        )

    def removed_mask(self, file: int, num_rows: int) -> np.ndarray:
        mask = np.zeros(num_rows, bool)
        mask[self._records(file)["row"]] = True
        return mask


# A source on its way through curation, and which of its documents are still kept.


@dataclass(frozen=True)
class SourceState:
    """A source's annotated files in canonical order, and the results on each of their rows.

    first_file: the number of its first file among the files of all sources, which removal steps count by. batch: the
    sources of a batch, for which `source` stands; empty for one source. rows: of a source taken out of a batch, its
    rows in the batch's file."""

    source: SourceConfig
    rules: Rules
    paths: Sequence[Path]
    filter_results: Sequence[Results]
    first_file: int
    batch: tuple[SourceConfig, ...] = ()
    rows: SourceRows | None = None

    @property
    def first_row(self) -> int:
        """Number of the source's first row in its file: 0 but in a batch."""
        return 0 if self.rows is None else self.rows.start

    def of_batch(self) -> "list[SourceState]":
        """The state of each source of the batch; of one source this."""
        if not self.batch:
            return [self]
        [whole] = self.filter_results
        loaded = whole.load()
        rows = {of_source.source: of_source for of_source in loaded.sources}
        states = []
        for source in self.batch:
            of_source = rows.get(source.name, SourceRows(source.name, 0, 0))
            results = (SourceResults(loaded, of_source),)
            states.append(replace(self, source=source, filter_results=results, batch=(), rows=of_source))
        return states

    @property
    def num_documents(self) -> int:
        return sum(results.num_documents for results in self.filter_results)

    @property
    def files(self) -> range:
        """The numbers of its files among those of all sources."""
        return range(self.first_file, self.first_file + len(self.paths))

    def kept(self, removals: Sequence[Removals] = ()) -> "Sequence[KeptRows]":
        """By file, the documents that neither the filters nor these steps removed."""
        steps = tuple(removals)
        return LazySequence(
            lambda file: KeptRows(self.filter_results[file], self.files[file], steps), range(len(self.paths))
        )

    def kept_masks(self, removals: Sequence[Removals] = ()) -> Iterator[np.ndarray]:
        """By file, bool[rows]: the documents of `kept`, loaded one file at a time."""
        return (rows.mask() for rows in self.kept(removals))


@dataclass(frozen=True)
class SourceResults:
    """The results of one source of a batch. whole: of the batch's file."""

    whole: FilterResults
    rows: SourceRows

    @property
    def num_documents(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def num_quarantined(self) -> int:
        return self.rows.num_quarantined

    @property
    def present_languages(self) -> tuple[str, ...]:
        return self.rows.languages

    @property
    def nearest(self) -> NearestDocuments | None:
        return self.rows.nearest

    @property
    def sources(self) -> tuple[SourceRows, ...]:
        return ()

    def load(self) -> FilterResults:
        return self.whole.of_source(self.rows)


def source_states(states: Sequence[SourceState], names: Sequence[str]) -> list[SourceState]:
    """The state of every source, in the order of these names, where some are in batches."""
    by_name = {state.source.name: state for group in states for state in group.of_batch()}
    return [by_name[name] for name in names]


@dataclass(frozen=True)
class KeptRows:
    """Which rows of one annotated file neither the filters nor these steps removed. file: its number among those of all
    sources."""

    results: Results
    file: int
    removals: tuple[Removals, ...]

    def mask(self) -> np.ndarray:
        """bool[rows]"""
        mask = self.results.load().failed_rule == KEPT
        for step in self.removals:
            mask &= ~step.removed_mask(self.file, len(mask))
        return mask


def kept_document_files(curated: Sequence[SourceState], removals: Sequence[Removals]) -> Sequence[DocumentFile]:
    """All annotated files as deduplication takes them: source after source, each in its order."""
    firsts = [state.first_file for state in curated]

    def document_file(number: int) -> DocumentFile:
        state = curated[bisect_right(firsts, number) - 1]
        file = number - state.first_file
        return DocumentFile(state.paths[file], state.source.name, state.source.priority, state.kept(removals)[file])

    return _with_digests(document_file, sum(len(state.paths) for state in curated))


def document_files_after(document_files: Sequence[DocumentFile], removed: Removals) -> Sequence[DocumentFile]:
    """Those of `kept_document_files`, or with edited texts, without the rows that another step removed."""

    def document_file(number: int) -> DocumentFile:
        before = document_files[number]
        assert isinstance(before.kept, KeptRows)
        kept = replace(before.kept, removals=(*before.kept.removals, removed))
        return replace(before, kept=kept, mask_digest="")

    return _with_digests(document_file, len(document_files))


def _with_digests(document_file: Callable[[int], DocumentFile], count: int) -> Sequence[DocumentFile]:
    """Document files with the digests of their masks, computed once: this process holds 32 bytes for each."""
    digests = b"".join(bytes.fromhex(document_file(number).kept_digest) for number in range(count))

    def with_digest(number: int) -> DocumentFile:
        return replace(document_file(number), mask_digest=digests[32 * number : 32 * number + 32].hex())

    return LazySequence(with_digest, range(count))


# Records of text edits for the documents of one annotated file: removed spans, pieces, benchmark texts.


# Schema of the text spans that the edits removed from kept documents.

# start, length: characters of the text as it stood before the step; bytes: of the span in UTF-8. rule: STEP.RULE.
# kept_in: the document that keeps the same text. benchmark, example: what the span was part of.
REMOVED_SPANS = pa.schema(
    [
        ("doc_id", pa.string()),
        ("rule", pa.string()),
        ("start", pa.int64()),
        ("length", pa.int64()),
        ("bytes", pa.int64()),
        ("excerpt", pa.string()),
        ("kept_in", pa.string()),
        ("benchmark", pa.string()),
        ("example", pa.string()),
    ]
)
EXCERPT_CHARACTERS = 80


def removed_span_row(doc_id: str, rule: str, text: str, start: int, stop: int) -> dict:
    """A row of REMOVED_SPANS, without `kept_in`, `benchmark` and `example`."""
    span = text[start:stop]
    excerpt = " ".join(span[: 2 * EXCERPT_CHARACTERS].split())[:EXCERPT_CHARACTERS]
    return {
        "doc_id": doc_id,
        "rule": rule,
        "start": start,
        "length": stop - start,
        "bytes": len(span.encode()),
        "excerpt": excerpt,
    }


def sorted_spans(tables: list[pa.Table]) -> pa.Table:
    """The tables joined, sorted by doc_id and start."""
    joined = pa.concat_tables([REMOVED_SPANS.empty_table(), *tables])
    return joined.sort_by([("doc_id", "ascending"), ("start", "ascending")]).combine_chunks()


def complement(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Gaps between disjoint ascending spans: [(2, 9)], 11 -> [(0, 2), (9, 11)]."""
    bounds = [0, *(place for span in spans for place in span), length]
    return [(bounds[i], bounds[i + 1]) for i in range(0, len(bounds), 2) if bounds[i] < bounds[i + 1]]


REMOVED_SPAN = pa.struct([REMOVED_SPANS.field(name) for name in REMOVED_SPANS.names if name != "doc_id"])
MATCH = pa.struct(
    [
        ("benchmark", pa.string()),
        ("example", pa.string()),
        ("field", pa.string()),
        ("kind", pa.string()),
        ("matched", pa.int64()),
        ("of", pa.int64()),
    ]
)
PIECE = pa.schema([("parent_id", pa.string()), ("doc_id", pa.string())])


@dataclass(frozen=True)
class EvidenceFiles:
    """The files written about one annotated file. removed_spans: REMOVED_SPANS, one file a step. matches, pieces: of
    decontamination, None if it found nothing there."""

    removed_spans: tuple[Path, ...] = ()
    matches: Path | None = None
    pieces: Path | None = None

    def __bool__(self) -> bool:
        return bool(self.removed_spans) or self.matches is not None or self.pieces is not None


@dataclass(frozen=True)
class Evidence:
    """Tables about the documents of one annotated file. removed_spans: REMOVED_SPANS. matches: doc_id and the fields of
    MATCH. pieces: PIECE, the pieces of a document in their order."""

    removed_spans: pa.Table
    matches: pa.Table
    pieces: pa.Table


def read_evidence(files: EvidenceFiles) -> Evidence:
    matches = pa.schema([("doc_id", pa.string()), *MATCH])
    return Evidence(
        sorted_spans([pq.read_table(fetch(path), schema=REMOVED_SPANS) for path in files.removed_spans]),
        matches.empty_table() if files.matches is None else pq.read_table(files.matches, schema=matches),
        PIECE.empty_table() if files.pieces is None else pq.read_table(files.pieces, schema=PIECE),
    )


def rows_by_document(table: pa.Table, key: str, doc_ids: pa.Array) -> tuple[pa.Table, np.ndarray]:
    """(the table's rows about these documents, in their order, int64[documents + 1] bounds of each document's rows)."""
    if not len(table):
        return table, np.zeros(len(doc_ids) + 1, np.int64)
    places = pc.index_in(table.column(key).combine_chunks(), value_set=doc_ids)
    matches = np.flatnonzero(pc.is_valid(places).to_numpy(zero_copy_only=False))
    place = places.take(pa.array(matches)).to_numpy(zero_copy_only=False)
    order = np.argsort(place, kind="stable")
    counts = np.bincount(place, minlength=len(doc_ids))
    return table.take(pa.array(matches[order])), np.concatenate([[0], np.cumsum(counts)])


def list_column(values: pa.Array, bounds: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), values)


def struct_list_column(table: pa.Table, kind: pa.StructType, bounds: np.ndarray) -> pa.ListArray:
    """Lists of structs with these fields of the table."""
    columns = [table.column(field.name).combine_chunks().cast(field.type) for field in kind]
    return list_column(pa.StructArray.from_arrays(columns, fields=list(kind)), bounds)


def columns_of_evidence(evidence: Evidence, doc_ids: Sequence[str] | pa.Array) -> dict[str, pa.Array]:
    """The ledger's columns removed_spans, pieces and contamination of these documents."""
    spans, span_bounds = rows_by_document(evidence.removed_spans, "doc_id", doc_ids)
    pieces, piece_bounds = rows_by_document(evidence.pieces, "parent_id", doc_ids)
    matches, match_bounds = rows_by_document(evidence.matches, "doc_id", doc_ids)
    return {
        "removed_spans": struct_list_column(spans, REMOVED_SPAN, span_bounds),
        "pieces": list_column(pieces.column("doc_id").combine_chunks(), piece_bounds),
        "contamination": struct_list_column(matches, MATCH, match_bounds),
    }


def work_folder(folder: Path, step: str, document_files: Sequence[DocumentFile], settings: Any) -> Path:
    """A folder for the step's intermediate files, named by what they are made from.

    Annotated files are named by what they hold; rewritten ones stand in a folder that is."""
    made_from = [
        [
            document_file.path.parent.parent.name,
            document_file.path.name,
            document_file.kept_digest,
        ]
        for document_file in document_files
    ]
    work = folder / f"{step}-{fingerprint([made_from, settings])}"
    work.mkdir(parents=True, exist_ok=True)
    return work
