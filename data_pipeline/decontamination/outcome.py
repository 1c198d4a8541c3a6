"""What becomes of one document in which benchmark texts were found, and the evidence for it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from gristmill.data_pipeline.cuts import complement, cut_row
from gristmill.data_pipeline.decontamination.cut import cut_spans, pieces
from gristmill.data_pipeline.decontamination.index import NgramIndex
from gristmill.data_pipeline.decontamination.report import EXCERPT_MARGIN

# Ways a benchmark text is found in a document, strongest first. verbatim: all its n-grams; part: some of them.
KINDS = ("verbatim", "part")

# One row a document and benchmark text that share at least one n-gram that counts. `excerpt` is the document's text
# around the first match.
MATCHES = pa.schema(
    [
        ("doc_id", pa.string()),
        ("benchmark", pa.string()),
        ("example", pa.string()),
        ("field", pa.string()),
        ("kind", pa.string()),
        ("text", pa.int64()),
        ("matched", pa.int64()),
        ("of", pa.int64()),
        ("excerpt", pa.string()),
    ]
)
# One row a document that was hit. fate: split (pieces are left), dropped, annotated; characters: cut from it. rule:
# what dropped it, with its value and threshold (drop: n-grams found; most_pieces; shortest_piece: of the longest).
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


def matches_of(doc_id, text, mine, spans, index, counting, examples) -> list[tuple]:
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
        kind = "verbatim" if len(ngrams) == int(counting[owner]) else "part"
        names = (example.benchmark, example.example, example.field, kind)
        found.append((doc_id, *names, owner, len(ngrams), int(counting[owner]), excerpt))
    return found


def counting_ngrams(index: NgramIndex, common: np.ndarray) -> np.ndarray:
    """int64[texts]: the distinct n-grams of each benchmark text that are no common phrases."""
    ngram_of_pair = np.repeat(np.arange(len(common)), np.diff(index.text_first))
    return np.bincount(index.text_of[~common[ngram_of_pair]], minlength=len(index.ngrams_of))


@dataclass(frozen=True)
class Outcome:
    """Of one document that was hit: a row of HITS, rows of PIECES and of CUTS."""

    hit: tuple
    pieces: list[tuple]
    cuts: list[dict[str, Any]]


def outcome_of(doc_id, text, mine, spans, index, examples, config) -> Outcome:
    ngrams, words = mine
    if config.policy == "annotate":
        return Outcome((doc_id, "annotated", 1, 0, None, None, None), [], [])
    if config.policy == "drop":
        return _dropped(doc_id, text, "drop", len(np.unique(ngrams)), 1)
    places = list(zip(spans[0, words].tolist(), spans[1, words + index.lengths[ngrams] - 1].tolist(), strict=True))
    found = pieces(text, cut_spans(text, places, config.margin))
    kept = [(start, stop) for start, stop in found if stop - start >= config.shortest_piece]
    if not kept:
        longest = max((stop - start for start, stop in found), default=0)
        return _dropped(doc_id, text, "shortest_piece", longest, config.shortest_piece)
    if len(kept) > config.most_pieces:
        return _dropped(doc_id, text, "most_pieces", len(kept), config.most_pieces)
    rows = [(piece_id(doc_id, n), doc_id, n, text[start:stop]) for n, (start, stop) in enumerate(kept)]
    removed = complement(kept, len(text))
    owners = [examples[index.text_of[index.text_first[ngram]]] for ngram in ngrams.tolist()]
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
