"""Which benchmark texts stand in one document, in what way, and where."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.decontamination.benchmark import Example
from gristmill.data_pipeline.decontamination.edits import copy_of
from gristmill.data_pipeline.decontamination.index import NgramIndex
from gristmill.data_pipeline.decontamination.indexes import Indexes
from gristmill.data_pipeline.decontamination.words import words_of

# Ways a benchmark text stands in a document, strongest first. verbatim: all its n-grams; short: a question too short
# for an n-gram, whole, and an answer behind it; edited: most of its words in their order; partial: an n-gram and less.
KINDS = ("verbatim", "short", "edited", "partial")

# Characters of the document shown before a match; three times as many follow its beginning.
EXCERPT_MARGIN = 80

# One row a document and benchmark text. matched, of: n-grams of the text (verbatim, partial) or its words (short,
# edited). `excerpt` is the document's text around the first match.
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


@dataclass(frozen=True)
class TextMatch:
    """One benchmark text in one document. text: its number; kind, matched, of: as above; words: (first, last + 1) of
    every place in the document, the first place first."""

    text: int
    kind: str
    matched: int
    of: int
    words: tuple[tuple[int, int], ...]


def counting_ngrams(index: NgramIndex, common: np.ndarray) -> np.ndarray:
    """int64[texts]: the distinct n-grams of each benchmark text that are no common phrases."""
    ngram_of_pair = np.repeat(np.arange(len(common)), np.diff(index.text_first))
    return np.bincount(index.text_of[~common[ngram_of_pair]], minlength=len(index.ngrams_of))


def document_matches(
    document: str, ngrams: np.ndarray, copies: np.ndarray, indexes: Indexes, counting: np.ndarray
) -> list[TextMatch]:
    """The texts found in the document, by number. ngrams, copies: its columns of `Found`, without the row."""
    index = indexes.ngrams
    held: dict[int, list[tuple[int, int]]] = {}
    for ngram, word in ngrams.T.tolist():
        for text in index.text_of[index.text_first[ngram] : index.text_first[ngram + 1]].tolist():
            held.setdefault(text, []).append((ngram, word))
    near: dict[int, list[tuple[int, int, int]]] = {}
    for text, first, last, words, _ in copies.T.tolist():
        near.setdefault(text, []).append((first, last, words))
    found = []
    for text in sorted(held.keys() | near.keys()):
        mine = held.get(text, [])
        distinct = len({ngram for ngram, _ in mine})
        if mine and distinct < counting[text] and text not in near and not indexes.edits.edited[text]:
            copy = copy_of(indexes.edits, text, words_of([document]).hashes, mine[0][1])
            near[text] = [copy] if copy else []
        found.append(_match(text, mine, distinct, near.get(text, []), indexes, int(counting[text])))
    return found


def _match(text, ngrams, distinct, copies, indexes: Indexes, counting: int) -> TextMatch:
    lengths = indexes.ngrams.lengths
    places = {(word, word + int(lengths[ngram])) for ngram, word in ngrams} | {copy[:2] for copy in copies}
    words = tuple(sorted(places))
    if copies and (not ngrams or distinct < counting):
        kind = "short" if indexes.edits.short[text] else "edited"
        size = int(indexes.edits.texts.ends[text + 1] - indexes.edits.texts.ends[text])
        return TextMatch(text, kind, max(copy[2] for copy in copies), size, words)
    return TextMatch(text, "verbatim" if distinct == counting else "partial", distinct, counting, words)


def match_row(doc_id: str, text: str, match: TextMatch, spans: np.ndarray, examples: Sequence[Example]) -> tuple:
    """A row of MATCHES. spans: first and last + 1 character of every word of the document (`word_spans`)."""
    start = max(int(spans[0, match.words[0][0]]) - EXCERPT_MARGIN, 0)
    example = examples[match.text]
    names = (example.benchmark, example.example, example.field, match.kind)
    return (doc_id, *names, match.text, match.matched, match.of, text[start : start + 4 * EXCERPT_MARGIN])
