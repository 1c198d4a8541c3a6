"""The report's section on the tokenizer's languages, from languages.json of the stage `tokenizer`."""

import json
from pathlib import Path

from gristmill.evaluation.tasks.language_names import english_name
from gristmill.pipelines.report.blocks import Block, Heading, Paragraph, Table
from gristmill.pipelines.tokenizer_languages import LANGUAGES_NAME


def tokenizer_blocks(folder: Path) -> list[Block]:
    """Empty if the recipe does not train the tokenizer by language."""
    path = folder / LANGUAGES_NAME
    if not path.is_file():
        return []
    content = json.loads(path.read_bytes())
    rows = tuple(
        (
            f"{english_name(group['group'])} ({group['group']})",
            f"{group['documents']:,}",
            f"{group['bytes_per_token']:.2f}",
            f"{group['fertility']:.2f}",
            "" if group["parity"] is None else f"{group['parity']:.2f}",
            f"{group['byte_fallback']:.2%}",
            f"{group['pieces']:,}",
        )
        for group in content["languages"]
    )
    columns = ("language", "documents", "bytes per token", "tokens per word", "parity", "single bytes", "pieces used")
    whole = sum(content["vocabulary"].values())
    budget = tuple((name, f"{count:,}", f"{count / whole:.1%}") for name, count in content["vocabulary"].items())
    return [
        Heading("Tokenizer"),
        Paragraph(
            f"Parity is the number of tokens over that of the same text in {english_name(content['reference'])}, "
            "where the corpus has translations. Single bytes are tokens for a byte of a character without a piece."
        ),
        Table(columns, rows, 6),
        Table(("script of the letters", "pieces", "share"), budget, 2, "The vocabulary."),
    ]
