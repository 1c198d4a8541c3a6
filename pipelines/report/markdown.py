"""Renders blocks as Markdown. Text from corpora and models cannot escape its table cell or code fence."""

import re
from collections.abc import Sequence

from gristmill.pipelines.report.blocks import Block, Excerpt, Figure, Heading, Paragraph, Table


def to_markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(_render(block) for block in blocks) + "\n"


def _render(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escape(text)}"
        case Paragraph(text):
            return escape(text)
        case Figure(name, _, alt):
            return f"![{escape(alt)}](figures/{name}.svg)"
        case Excerpt(title, text):
            fence = "`" * (3 + longest_run(text))
            return f"{escape(title)}\n\n{fence}text\n{text}\n{fence}"
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    left = len(table.columns) - table.numeric
    marks = ["---"] * left + ["--:"] * table.numeric
    lines = [table.columns, tuple(marks), *(tuple(escape(cell) for cell in row) for row in table.rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{escape(table.caption)}\n\n{text}" if table.caption else text


def escape(text: str) -> str:
    """Escapes Markdown and HTML markup; line breaks become spaces."""
    return re.sub(r"([\\`*_{}\[\]<>#|!~])", r"\\\1", " ".join(text.split("\n")))


def longest_run(text: str) -> int:
    """The longest run of backticks: 'a``b' -> 2. A fence must be longer than any run inside it."""
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
