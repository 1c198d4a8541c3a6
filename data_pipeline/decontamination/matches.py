"""Which benchmark texts stand in one document, in what way, and where; and the report on those of all documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from gristmill.data_pipeline.decontamination.config import (
    BenchmarkExample,
    missing_fields,
)
from gristmill.data_pipeline.decontamination.edits import (
    Indexes,
    copy_of,
)
from gristmill.data_pipeline.decontamination.ngram_index import (
    NgramIndex,
    words_of,
)
from gristmill.data_pipeline.ledger.removal_step import complement, removed_span_row

# Ways a benchmark text stands in a document, strongest first. verbatim: all its n-grams; short: a question too short
# for an n-gram, whole, and an answer behind it; edited: most of its words in their order; partial: an n-gram and less.
KINDS = ("verbatim", "short", "edited", "partial")

# Characters of the document shown before a match; three times as many follow its beginning.
EXCERPT_MARGIN = 80
QUESTION_CHARACTERS = 4 * EXCERPT_MARGIN  # of a benchmark text, shown beside the document

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
    """The texts found in the document, by number. ngrams, copies: its columns of `NgramMatches`, without the row."""
    index = indexes.ngrams
    ngrams_of_text: dict[int, list[tuple[int, int]]] = {}
    for ngram, word in ngrams.T.tolist():
        for text in index.text_of[index.text_first[ngram] : index.text_first[ngram + 1]].tolist():
            ngrams_of_text.setdefault(text, []).append((ngram, word))
    near: dict[int, list[tuple[int, int, int]]] = {}
    for text, first, last, words, _ in copies.T.tolist():
        near.setdefault(text, []).append((first, last, words))
    matches = []
    for text in sorted(ngrams_of_text.keys() | near.keys()):
        text_ngrams = ngrams_of_text.get(text, [])
        distinct = len({ngram for ngram, _ in text_ngrams})
        if text_ngrams and distinct < counting[text] and text not in near and not indexes.edits.edited[text]:
            copy = copy_of(indexes.edits, text, words_of([document]).hashes, text_ngrams[0][1])
            near[text] = [copy] if copy else []
        matches.append(_match(text, text_ngrams, distinct, near.get(text, []), indexes, int(counting[text])))
    return matches


def _match(text, ngrams, distinct, copies, indexes: Indexes, counting: int) -> TextMatch:
    lengths = indexes.ngrams.lengths
    places = {(word, word + int(lengths[ngram])) for ngram, word in ngrams} | {copy[:2] for copy in copies}
    words = tuple(sorted(places))
    if copies and (not ngrams or distinct < counting):
        kind = "short" if indexes.edits.short[text] else "edited"
        size = int(indexes.edits.texts.ends[text + 1] - indexes.edits.texts.ends[text])
        return TextMatch(text, kind, max(copy[2] for copy in copies), size, words)
    return TextMatch(text, "verbatim" if distinct == counting else "partial", distinct, counting, words)


def match_row(
    doc_id: str, text: str, match: TextMatch, spans: np.ndarray, examples: Sequence[BenchmarkExample]
) -> tuple:
    """A row of MATCHES. spans: first and last + 1 character of every word of the document (`word_spans`)."""
    start = max(int(spans[0, match.words[0][0]]) - EXCERPT_MARGIN, 0)
    example = examples[match.text]
    names = (example.benchmark, example.example, example.field, match.kind)
    return (doc_id, *names, match.text, match.matched, match.of, text[start : start + QUESTION_CHARACTERS])


# Cutting matches out of a document, with the sentences around them.

SENTENCE_ENDS = ".!?"


def cut_spans(text: str, matches: list[tuple[int, int]], margin: int) -> list[tuple[int, int]]:
    """Disjoint ascending (start, stop) characters to cut: each match, `margin` to both sides, out to a sentence end.

    The sentence end before stays, the one after goes: "A. B c d. E", match (5, 6), margin 0 -> [(2, 9)]."""
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(matches):
        left = max(text.rfind(end, 0, max(start - margin, 0)) for end in SENTENCE_ENDS) + 1
        behind = [text.find(end, min(stop + margin, len(text))) for end in SENTENCE_ENDS]
        right = min((place + 1 for place in behind if place >= 0), default=len(text))
        if spans and left <= spans[-1][1]:
            left, right = spans[-1][0], max(right, spans.pop()[1])
        spans.append((left, right))
    return spans


def pieces(text: str, removed: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, stop) of what is left between the removed spans, without white space at its ends.

    " ab", cut (2, 3) -> [(1, 2)]: the blank before a is nobody's."""
    kept_pieces = []
    for start, stop in complement(removed, len(text)):
        piece = text[start:stop]
        start, stop = start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())
        if start < stop:
            kept_pieces.append((start, stop))
    return kept_pieces


# The edit of one document in which benchmark texts were found: split, dropped or annotated.

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
    document_pieces = pieces(text, cut_spans(text, places, config.margin))
    kept = [(start, stop) for start, stop in document_pieces if stop - start >= config.min_piece_characters]
    if not kept:
        longest = max((stop - start for start, stop in document_pieces), default=0)
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


# Which questions of which benchmark were found in the corpus, one by one: what evaluation reads.


def found_questions(matches: pa.Table, hits: pa.Table, beginnings: Mapping[int, str]) -> list[dict[str, Any]]:
    """One entry a benchmark record of which a text was found, ordered by benchmark and example (numbers as numbers).

    {"benchmark": "rivers", "example": "7", "kind": "verbatim", "fields": {"question": "verbatim"},
     "texts": {"question": "Where does the mill stand?"},
     "documents": [{"doc_id": "00..1", "kind": "verbatim", "outcome": "split"}]}
    kind: the strongest of the record (of a field, of a document); outcome: as in HITS; texts: the beginning of every
    field that was found. beginnings: number of a benchmark text -> its beginning."""
    outcomes = dict(zip(hits.column("doc_id").to_pylist(), hits.column("outcome").to_pylist(), strict=True))
    questions: dict[tuple[str, str], dict[str, Any]] = {}
    for row in matches.to_pylist():
        key = row["benchmark"], row["example"]
        entry = questions.setdefault(key, {"kind": row["kind"], "fields": {}, "texts": {}, "documents": {}})
        entry["kind"] = _stronger(entry["kind"], row["kind"])
        entry["texts"][row["field"]] = beginnings[row["text"]]
        for strongest, name in ((entry["fields"], row["field"]), (entry["documents"], row["doc_id"])):
            strongest[name] = _stronger(strongest.get(name, row["kind"]), row["kind"])
    return [
        {
            "benchmark": benchmark,
            "example": example,
            "kind": entry["kind"],
            "fields": dict(sorted(entry["fields"].items())),
            "texts": dict(sorted(entry["texts"].items())),
            "documents": [
                {"doc_id": doc_id, "kind": kind, "outcome": outcomes[doc_id]}
                for doc_id, kind in sorted(entry["documents"].items())
            ],
        }
        for (benchmark, example), entry in sorted(questions.items(), key=lambda item: _in_order(*item[0]))
    ]


def question_order(examples: Sequence[BenchmarkExample]) -> np.ndarray:
    """int64[texts]: the place of each text's record in the order of `found_questions`."""
    keys = [(example.benchmark, example.example) for example in examples]
    place = {key: number for number, key in enumerate(sorted(set(keys), key=lambda key: _in_order(*key)))}
    return np.array([place[key] for key in keys], np.int64)


def _stronger(kind: str, other: str) -> str:
    return min(kind, other, key=KINDS.index)


def _in_order(benchmark: str, example: str) -> tuple[str, int, str]:
    return benchmark, int(example) if example.isdecimal() else -1, example


# The page that says what of which benchmark stood in the corpus, with examples side by side.

SHOWN = 5


class ContaminationReport:
    """By benchmark: examples (records), those searched (some text is long enough), found in any way, and by the
    strongest kind in which they were; documents hit; characters those lost; texts too short to be searched; by field,
    the records in which it is missing; n-grams left out as common phrases; and the strongest matches, side by side.

    It grows with the benchmarks, not with the documents, whose matches are added file by file in any order."""

    def __init__(self, examples: Sequence[BenchmarkExample], indexes: Indexes, common: np.ndarray):
        self.examples, self.indexes, self.common, self.num_matches = examples, indexes, common, 0
        self._hits = {example.benchmark: _BenchmarkHits() for example in examples}

    def add(self, matches: pa.Table, hits: pa.Table) -> None:
        """MATCHES and HITS of one document file."""
        self.num_matches += len(matches)
        outcomes = {row["doc_id"]: row for row in hits.to_pylist()}
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in matches.to_pylist():
            rows.setdefault(row["benchmark"], []).append(row)
        for name, benchmark_rows in rows.items():
            self._hits[name].add(benchmark_rows, outcomes)

    def content(self) -> dict[str, Any]:
        texts: dict[str, list[int]] = {}
        for number, example in enumerate(self.examples):
            texts.setdefault(example.benchmark, []).append(number)
        missing = missing_fields(self.examples)
        return {
            name: self._of_benchmark(numbers, self._hits[name]) | {"missing": missing.get(name, {})}
            for name, numbers in texts.items()
        }

    def _of_benchmark(self, texts: list[int], hits: "_BenchmarkHits") -> dict[str, Any]:
        """texts: the numbers of the benchmark's examples."""
        examples, searched = self.examples, self.indexes.searched
        kinds = hits.kinds.values()
        return {
            "examples": len({examples[number].example for number in texts}),
            "searched": len({examples[number].example for number in texts if searched[number]}),
            "found": len(kinds),
            **{kind: sum(strongest == place for strongest in kinds) for place, kind in enumerate(KINDS)},
            "texts_too_short": sum(bool(examples[number].text) and not searched[number] for number in texts),
            "common_ngrams": _common_ngrams(texts, self.indexes.ngrams, self.common),
            "documents": hits.documents,
            "dropped": hits.dropped,
            "characters": hits.characters,
            "shown": [_report_row(row, examples) for row in hits.strongest],
        }


@dataclass
class _BenchmarkHits:
    """Hits of one benchmark, so far. kinds: by example, the strongest. strongest: the first SHOWN matches."""

    kinds: dict[str, int] = field(default_factory=dict)
    documents: int = 0
    dropped: int = 0
    characters: int = 0
    strongest: list[dict[str, Any]] = field(default_factory=list)

    def add(self, rows: list[dict[str, Any]], outcomes: Mapping[str, dict[str, Any]]) -> None:
        """rows: of MATCHES, of one document file. outcomes: of HITS, by doc_id."""
        for row in rows:
            self.kinds[row["example"]] = min(self.kinds.get(row["example"], len(KINDS)), KINDS.index(row["kind"]))
        documents = {row["doc_id"] for row in rows}
        self.documents += len(documents)
        self.dropped += sum(outcomes[doc_id]["outcome"] == "dropped" for doc_id in documents)
        self.characters += sum(outcomes[doc_id]["characters"] for doc_id in documents)
        self.strongest = sorted([*self.strongest, *rows], key=_strongest_first)[:SHOWN]


def _common_ngrams(texts: list[int], index: NgramIndex, common: np.ndarray) -> int:
    inside = np.zeros(len(index.ngrams_of), bool)
    inside[texts] = True
    ngram_of_pair = np.repeat(np.arange(len(common)), np.diff(index.text_first))
    return len(np.unique(ngram_of_pair[inside[index.text_of] & common[ngram_of_pair]]))


def _strongest_first(row: dict[str, Any]) -> tuple:
    return (KINDS.index(row["kind"]), -row["matched"] / row["of"], -row["matched"], row["text"], row["doc_id"])


def _report_row(row: dict[str, Any], examples: Sequence[BenchmarkExample]) -> dict[str, Any]:
    names = ("doc_id", "example", "field", "kind", "matched", "of", "excerpt")
    return {**{name: row[name] for name in names}, "benchmark_text": examples[row["text"]].text[:QUESTION_CHARACTERS]}


def report_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown: a table of all benchmarks, then examples side by side."""
    columns = ("examples", "searched", "found", *KINDS, "documents", "dropped", "characters", "common_ngrams")
    lines = [f"| benchmark | {' | '.join(columns)} |", "|---" + "|--:" * len(columns) + "|"]
    lines += [f"| {name} | {' | '.join(str(numbers[c]) for c in columns)} |" for name, numbers in report.items()]
    for name, numbers in report.items():
        lines += [
            f"\n{name}: the field {field} is missing in {times} of {numbers['examples']} records."
            for field, times in numbers["missing"].items()
        ]
    for name, numbers in report.items():
        if numbers["shown"]:
            lines += ["", f"### {name}", "", "| example | found | benchmark | document |", "|---|---|---|---|"]
        for row in numbers["shown"]:
            cells = (f"{row['example']} ({row['field']})", f"{row['kind']}, {row['matched']} of {row['of']}")
            lines.append(f"| {' | '.join((*cells, _cell(row['benchmark_text']), _cell(row['excerpt'])))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(escaped.split())
