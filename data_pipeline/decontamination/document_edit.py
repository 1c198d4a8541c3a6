"""The edit of one document in which benchmark texts were found: split, dropped or annotated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import xxhash

from gristmill.data_pipeline.decontamination.matches import TextMatch
from gristmill.data_pipeline.decontamination.spans import cut_spans, pieces
from gristmill.data_pipeline.ledger.removed_spans import complement, removed_span_row

# One row a contaminated document. outcome: split, dropped or annotated; characters: removed from it. rule:
# what dropped it, with its value and threshold (drop: benchmark texts found; max_pieces: pieces; min_piece_characters:
# characters of the longest). row: in the file's file.
HITS = pa.schema(
    [
        ("doc_id", pa.string()),
        ("outcome", pa.string()),
        ("pieces", pa.int64()),
        ("characters", pa.int64()),
        ("rule", pa.string()),
        ("value", pa.float64()),
        ("threshold", pa.float64()),
        ("row", pa.int64()),
    ]
)
DROPPING_RULES = ("drop", "max_pieces", "min_piece_characters")
PIECES = pa.schema([("doc_id", pa.string()), ("parent_id", pa.string()), ("piece", pa.int64()), ("text", pa.string())])


@dataclass(frozen=True)
class DocumentEdit:
    """The edit of one contaminated document: a row of HITS without `row`, rows of PIECES and of REMOVED_SPANS."""

    hit: tuple
    pieces: list[tuple]
    removed_spans: list[dict[str, Any]]


def edit_document(doc_id, text, matches: Sequence[TextMatch], spans, examples, config) -> DocumentEdit:
    if config.policy == "annotate":
        return DocumentEdit((doc_id, "annotated", 1, 0, None, None, None), [], [])
    if config.policy == "drop":
        return _dropped(doc_id, text, "drop", len(matches), 1)
    owner_of = {(first, last): match.text for match in reversed(matches) for first, last in match.words}
    words = sorted(owner_of)
    places = [(int(spans[0, first]), int(spans[1, last - 1])) for first, last in words]
    found = pieces(text, cut_spans(text, places, config.margin))
    kept = [(start, stop) for start, stop in found if stop - start >= config.min_piece_characters]
    if not kept:
        longest = max((stop - start for start, stop in found), default=0)
        return _dropped(doc_id, text, "min_piece_characters", longest, config.min_piece_characters)
    if len(kept) > config.max_pieces:
        return _dropped(doc_id, text, "max_pieces", len(kept), config.max_pieces)
    rows = [(piece_id(doc_id, n), doc_id, n, text[start:stop]) for n, (start, stop) in enumerate(kept)]
    removed = complement(kept, len(text))
    owners = [examples[owner_of[place]] for place in words]
    removed_spans = [_removed_span(doc_id, text, span, places, owners) for span in removed]
    characters = sum(stop - start for start, stop in removed)
    return DocumentEdit((doc_id, "split", len(kept), characters, None, None, None), rows, removed_spans)


def _dropped(doc_id: str, text: str, rule: str, value: float, threshold: float) -> DocumentEdit:
    return DocumentEdit((doc_id, "dropped", 0, len(text), f"decontaminate.{rule}", value, threshold), [], [])


def _removed_span(doc_id, text, span, places, owners) -> dict[str, Any]:
    """A row of REMOVED_SPANS with the first match in the span; a span of white space at the ends has no match."""
    start, stop = span
    inside = [n for n, (first, last) in enumerate(places) if start <= first and last <= stop]
    row = removed_span_row(doc_id, "decontaminate.split", text, start, stop)
    if inside:
        row |= {"benchmark": owners[inside[0]].benchmark, "example": owners[inside[0]].example}
    return row


def piece_id(doc_id: str, piece: int) -> str:
    """The 32 hex digits of a piece: a 128-bit hash of its parent's and its number."""
    return xxhash.xxh3_128_hexdigest(f"{doc_id}/{piece}".encode())
