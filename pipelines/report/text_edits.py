"""The report's sections on text edits: spans removed per step, and contamination per benchmark."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.corpus.writer import DECONTAMINATION_FOLDER, REPORT_JSON
from gristmill.pipelines.report.blocks import Block, Heading, Paragraph, Table

COLUMNS = {  # counts of a benchmark -> column heading
    "examples": "examples",
    "searched": "searched",
    "found": "found",
    "verbatim": "verbatim",
    "short": "short, with an answer",
    "edited": "edited",
    "partial": "in part",
    "documents": "documents hit",
    "dropped": "dropped",
    "characters": "characters removed",
}


def removed_span_blocks(sources: Mapping[str, Any]) -> list[Block]:
    """Spans removed from kept documents; empty if no step removes spans."""
    rows = [
        (step, source, f"{spans['documents']:,}", f"{spans['spans']:,}", f"{spans['bytes']:,}")
        for source, entry in sources.items()
        for step, spans in entry["removed_spans"].items()
    ]
    if not rows:
        return []
    pieces = sum(entry["pieces"] for entry in sources.values())
    note = f"Splitting adds {pieces:,} documents to those kept. The ledger lists every span."
    columns = ("step", "source", "documents", "spans", "bytes")
    return [Heading("Spans removed from kept documents"), Table(columns, tuple(rows), 2, note)]


def contamination_blocks(folder: Path) -> list[Block]:
    """Contamination per benchmark, with matches side by side; empty without decontamination."""
    path = folder / DECONTAMINATION_FOLDER / REPORT_JSON
    if not path.is_file():
        return []
    report = json.loads(path.read_bytes())
    rows = tuple((name, *(f"{numbers[key]:,}" for key in COLUMNS)) for name, numbers in report.items())
    note = (
        "Each example is counted once, by its strongest match. Verbatim: all n-grams of a text; short: a complete "
        "question shorter than an n-gram, followed by an answer; edited: most words in order; in part: at least one "
        "n-gram."
    )
    blocks: list[Block] = [
        Heading("Decontamination"),
        Table(("benchmark", *COLUMNS.values()), rows, len(COLUMNS), note),
    ]
    if not any(numbers["shown"] for numbers in report.values()):
        return [*blocks, Paragraph("No benchmark text was found.")]
    for name, numbers in report.items():
        if numbers["shown"]:
            shown = tuple(
                (
                    f"{row['example']} ({row['field']})",
                    f"{row['kind']}, {row['matched']} of {row['of']}",
                    " ".join(row["benchmark_text"].split()),
                    " ".join(row["excerpt"].split()),
                )
                for row in numbers["shown"]
            )
            blocks += [Heading(name, 3), Table(("example", "found", "benchmark", "document"), shown)]
    return blocks
