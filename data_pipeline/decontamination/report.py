"""The page that says what of which benchmark stood in the corpus, with examples side by side."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.decontamination.benchmark import Example
from gristmill.data_pipeline.decontamination.index import NgramIndex

# Characters of the document shown before a match; three times as many follow its beginning.
EXCERPT_MARGIN = 80
SHOWN = 5


def contamination_report(
    examples: Sequence[Example], index: NgramIndex, common: np.ndarray, matches: pa.Table, hits: pa.Table
) -> dict[str, Any]:
    """By benchmark: examples (records), those searched (some text is long enough), touched (an n-gram stands in a
    document) and fully (some document has all n-grams of one of its texts); texts too short to be searched; n-grams
    left out as common phrases; documents hit; characters those lost; and the strongest matches, side by side."""
    rows = matches.to_pylist()
    fates = {row["doc_id"]: row for row in hits.to_pylist()}
    names = list(dict.fromkeys(example.benchmark for example in examples))
    return {name: _of_benchmark(name, examples, index, common, rows, fates) for name in names}


def _of_benchmark(name, examples, index, common, rows, fates) -> dict[str, Any]:
    texts = [number for number, example in enumerate(examples) if example.benchmark == name]
    mine = [row for row in rows if row["benchmark"] == name]
    documents = sorted({row["doc_id"] for row in mine})
    return {
        "examples": len({examples[number].example for number in texts}),
        "searched": len({examples[number].example for number in texts if index.ngrams_of[number]}),
        "touched": len({row["example"] for row in mine}),
        "fully": len({row["example"] for row in mine if row["matched"] == row["of"]}),
        "texts_too_short": int((index.ngrams_of[texts] == 0).sum()),
        "common_ngrams": _common_ngrams(texts, index, common),
        "documents": len(documents),
        "dropped": sum(fates[doc_id]["fate"] == "dropped" for doc_id in documents),
        "characters": sum(fates[doc_id]["characters"] for doc_id in documents),
        "shown": [_shown(row, examples) for row in sorted(mine, key=_strongest_first)[:SHOWN]],
    }


def _common_ngrams(texts: list[int], index: NgramIndex, common: np.ndarray) -> int:
    inside = np.zeros(len(index.ngrams_of), bool)
    inside[texts] = True
    ngram_of_pair = np.repeat(np.arange(len(common)), np.diff(index.text_first))
    return len(np.unique(ngram_of_pair[inside[index.text_of] & common[ngram_of_pair]]))


def _strongest_first(row: dict[str, Any]) -> tuple:
    return (-row["matched"] / row["of"], -row["matched"], row["text"], row["doc_id"])


def _shown(row: dict[str, Any], examples: Sequence[Example]) -> dict[str, Any]:
    names = ("doc_id", "example", "field", "matched", "of", "excerpt")
    return {**{name: row[name] for name in names}, "benchmark_text": examples[row["text"]].text[: 4 * EXCERPT_MARGIN]}


def report_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown: a table of all benchmarks, then examples side by side."""
    columns = ("examples", "searched", "touched", "fully", "documents", "dropped", "characters", "common_ngrams")
    lines = [f"| benchmark | {' | '.join(columns)} |", "|---" + "|--:" * len(columns) + "|"]
    lines += [f"| {name} | {' | '.join(str(numbers[c]) for c in columns)} |" for name, numbers in report.items()]
    for name, numbers in report.items():
        if numbers["shown"]:
            lines += ["", f"### {name}", "", "| example | n-grams | benchmark | document |", "|---|---|---|---|"]
        for row in numbers["shown"]:
            cells = (f"{row['example']} ({row['field']})", f"{row['matched']} of {row['of']}")
            lines.append(f"| {' | '.join((*cells, _cell(row['benchmark_text']), _cell(row['excerpt'])))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(escaped.split())
