"""The page that says what of which benchmark stood in the corpus, with examples side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.decontamination.config import (
    BenchmarkExample,
    missing_fields,
)
from gristmill.data_pipeline.decontamination.edits import (
    Indexes,
)
from gristmill.data_pipeline.decontamination.index import (
    NgramIndex,
)
from gristmill.data_pipeline.decontamination.matches import (
    KINDS,
    QUESTION_CHARACTERS,
)

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
