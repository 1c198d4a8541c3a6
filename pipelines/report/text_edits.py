"""What a report says of texts that were rewritten: what each step cut, and what of which benchmark was found."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.corpus.writer import DECONTAMINATION_FOLDER, REPORT_JSON
from gristmill.pipelines.report.blocks import Block, Heading, Paragraph, Table

FOUND = {  # of a benchmark, in the report's order
    "examples": "examples",
    "searched": "searched",
    "found": "found",
    "verbatim": "verbatim",
    "short": "short, with an answer",
    "edited": "edited",
    "part": "in part",
    "documents": "documents hit",
    "dropped": "dropped",
    "characters": "characters removed",
}


def cut_blocks(sources: Mapping[str, Any]) -> list[Block]:
    """Spans cut out of documents that stay; nothing if no step cuts."""
    rows = [
        (step, source, f"{cut['documents']:,}", f"{cut['spans']:,}", f"{cut['bytes']:,}")
        for source, entry in sources.items()
        for step, cut in entry["cut"].items()
    ]
    if not rows:
        return []
    pieces = sum(entry["pieces"] for entry in sources.values())
    note = f"By splitting, {pieces:,} documents more are written than were kept. The ledger has every span."
    columns = ("step", "source", "documents", "spans", "bytes")
    return [Heading("What was cut out of documents that stay"), Table(columns, tuple(rows), 2, note)]


def contamination_blocks(folder: Path) -> list[Block]:
    """What of which benchmark stood in the corpus, with matches side by side; nothing if none was looked for."""
    path = folder / DECONTAMINATION_FOLDER / REPORT_JSON
    if not path.is_file():
        return []
    report = json.loads(path.read_bytes())
    rows = tuple((name, *(f"{numbers[key]:,}" for key in FOUND)) for name, numbers in report.items())
    note = (
        "An example is counted by the strongest way in which one of its texts stands in a document. Verbatim: all its "
        "n-grams; short: a question too short for an n-gram, whole, and an answer behind it; edited: most of its words "
        "in their order; in part: an n-gram and less."
    )
    blocks: list[Block] = [
        Heading("Decontamination"),
        Table(("benchmark", *FOUND.values()), rows, len(FOUND), note),
    ]
    if not any(numbers["shown"] for numbers in report.values()):
        return [*blocks, Paragraph("No document holds a text of a benchmark.")]
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
