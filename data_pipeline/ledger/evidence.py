"""Records of text edits for the documents of one annotated file: removed spans, pieces, benchmark texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

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
        sorted_spans([pq.read_table(path, schema=REMOVED_SPANS) for path in files.removed_spans]),
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
