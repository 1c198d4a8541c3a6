"""What becomes of one document in which benchmark texts were found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import xxhash

from gristmill.data_pipeline.decontamination.matches import TextMatch
from gristmill.data_pipeline.decontamination.spans import cut_spans, pieces
from gristmill.data_pipeline.ledger.removed_spans import complement, cut_row

# One row a document that was hit. fate: split (pieces are left), dropped, annotated; characters: cut from it. rule:
# what dropped it, with its value and threshold (drop: benchmark texts found; most_pieces: pieces; shortest_piece:
# characters of the longest).
HITS = pa.schema(
    [
        ("doc_id", pa.string()),
        ("fate", pa.string()),
        ("pieces", pa.int64()),
        ("characters", pa.int64()),
        ("rule", pa.string()),
        ("value", pa.float64()),
        ("threshold", pa.float64()),
    ]
)
PIECES = pa.schema([("doc_id", pa.string()), ("parent_id", pa.string()), ("piece", pa.int64()), ("text", pa.string())])


@dataclass(frozen=True)
class Outcome:
    """Of one document that was hit: a row of HITS, rows of PIECES and of CUTS."""

    hit: tuple
    pieces: list[tuple]
    cuts: list[dict[str, Any]]


def outcome_of(doc_id, text, matches: Sequence[TextMatch], spans, examples, config) -> Outcome:
    if config.policy == "annotate":
        return Outcome((doc_id, "annotated", 1, 0, None, None, None), [], [])
    if config.policy == "drop":
        return _dropped(doc_id, text, "drop", len(matches), 1)
    owner_of = {(first, last): match.text for match in reversed(matches) for first, last in match.words}
    words = sorted(owner_of)
    places = [(int(spans[0, first]), int(spans[1, last - 1])) for first, last in words]
    found = pieces(text, cut_spans(text, places, config.margin))
    kept = [(start, stop) for start, stop in found if stop - start >= config.shortest_piece]
    if not kept:
        longest = max((stop - start for start, stop in found), default=0)
        return _dropped(doc_id, text, "shortest_piece", longest, config.shortest_piece)
    if len(kept) > config.most_pieces:
        return _dropped(doc_id, text, "most_pieces", len(kept), config.most_pieces)
    rows = [(piece_id(doc_id, n), doc_id, n, text[start:stop]) for n, (start, stop) in enumerate(kept)]
    removed = complement(kept, len(text))
    owners = [examples[owner_of[place]] for place in words]
    cuts = [_cut(doc_id, text, span, places, owners) for span in removed]
    characters = sum(stop - start for start, stop in removed)
    return Outcome((doc_id, "split", len(kept), characters, None, None, None), rows, cuts)


def _dropped(doc_id: str, text: str, rule: str, value: float, threshold: float) -> Outcome:
    return Outcome((doc_id, "dropped", 0, len(text), f"decontaminate.{rule}", value, threshold), [], [])


def _cut(doc_id, text, span, places, owners) -> dict[str, Any]:
    """One row of CUTS, with the first match in the span; only white space at the text's ends has none."""
    start, stop = span
    inside = [n for n, (first, last) in enumerate(places) if start <= first and last <= stop]
    row = cut_row(doc_id, "decontaminate.split", text, start, stop)
    if inside:
        row |= {"benchmark": owners[inside[0]].benchmark, "example": owners[inside[0]].example}
    return row


def piece_id(doc_id: str, piece: int) -> str:
    """The 32 hex digits of a piece: a 128-bit hash of its parent's and its number."""
    return xxhash.xxh3_128_hexdigest(f"{doc_id}/{piece}".encode())
