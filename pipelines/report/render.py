"""The blocks of a report, which are rendered as Markdown and as HTML."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Table:
    """numeric: the number of trailing columns that are right-aligned numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: int = 0
    caption: str = ""


@dataclass(frozen=True)
class Excerpt:
    """Verbatim text from a corpus or a model (untrusted)."""

    title: str
    text: str


@dataclass(frozen=True)
class Figure:
    """name: of the file next to the Markdown page. alt: text description."""

    name: str
    svg: bytes
    alt: str


Block = Heading | Paragraph | Table | Excerpt | Figure

# Characters that a terminal or browser obeys instead of showing: C0 controls but tab and line feed, DEL, C1 controls,
# and the embeddings, overrides and isolates of bidirectional text (Unicode 16, 3.2 of UAX #9).
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


def visible(text: str) -> str:
    """The text with a picture in the place of each control character: "a\\x1b[2J" -> "a␛[2J"."""
    return text.translate(_CONTROLS)


# Renders blocks as Markdown. Text from corpora and models cannot escape its table cell or code fence.


def to_markdown(blocks: Sequence[Block]) -> str:
    return visible("\n\n".join(_render_markdown(block) for block in blocks) + "\n")


def _render_markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escape_markdown(text)}"
        case Paragraph(text):
            return escape_markdown(text)
        case Figure(name, _, alt):
            return f"![{escape_markdown(alt)}](figures/{name}.svg)"
        case Excerpt(title, text):
            fence = "`" * (3 + longest_run(text))
            return f"{escape_markdown(title)}\n\n{fence}text\n{text}\n{fence}"
        case Table():
            return _markdown_table(block)


def _markdown_table(table: Table) -> str:
    left = len(table.columns) - table.numeric
    marks = ["---"] * left + ["--:"] * table.numeric
    lines = [table.columns, tuple(marks), *(tuple(escape_markdown(cell) for cell in row) for row in table.rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{escape_markdown(table.caption)}\n\n{text}" if table.caption else text


def escape_markdown(text: str) -> str:
    """Escapes Markdown and HTML markup; line breaks become spaces."""
    return re.sub(r"([\\`*_{}\[\]<>#|!~])", r"\\\1", " ".join(text.split("\n")))


def longest_run(text: str) -> int:
    """The longest run of backticks: 'a``b' -> 2. A fence must be longer than any run inside it."""
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


# Renders blocks as one self-contained HTML page: no scripts, no external resources, all text escaped.

STYLE = """
:root { color-scheme: light dark; --ink: #1d2327; --dim: #5b666e; --rule: #d9dee2; --paper: #ffffff; --wash: #f5f7f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ea; --dim: #9aa5ad; --rule: #3a444b; --paper: #15191c; --wash: #1e2428; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 5rem; }
h1 { font-size: 1.9rem; margin: 0 0 .5rem; }
h2 { margin: 2.6rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--rule); }
h3 { margin: 1.6rem 0 .4rem; font-size: 1.05rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0 1rem; font-size: .92rem; }
caption { text-align: left; color: var(--dim); padding-bottom: .3rem; }
th, td { padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
th { color: var(--dim); font-weight: 600; } .number { text-align: right; font-variant-numeric: tabular-nums; }
td { overflow-wrap: break-word; max-width: 40rem; } td.number, th { white-space: nowrap; }
p, li, summary { overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
figure { overflow-x: auto; }
figure img { max-width: 100%; min-width: min(100%, 40rem); border: 1px solid var(--rule); border-radius: 4px; }
details { margin: .4rem 0; } summary { cursor: pointer; color: var(--dim); }
pre { background: var(--wash); padding: .7rem .9rem; border-radius: 4px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.45 ui-monospace, monospace; max-height: 22rem; overflow-y: auto; }
@media (max-width: 40rem) { main { padding: 1rem .8rem 3rem; } figure img { max-width: none; width: 44rem; } }
nav { columns: 14rem; margin: 1rem 0; font-size: .95rem; } nav a { display: block; color: inherit; }
""".strip()


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """The page. Its Content-Security-Policy also forbids scripts and network access."""
    body = "\n".join(_render_html(block, index, blocks) for index, block in enumerate(blocks))
    return visible(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _render_html(block: Block, index: int, blocks: Sequence[Block]) -> str:
    match block:
        case Heading(text, 1):
            return f"<h1>{escape(text)}</h1>"
        case Heading(text, level):
            return f'<h{level} id="part-{index}">{escape(text)}</h{level}>'
        case Paragraph(text):
            return f"<p>{escape(text)}</p>" + (_contents(blocks) if index == 1 else "")
        case Figure(_, svg, alt):
            data = base64.b64encode(svg).decode()
            return f'<figure><img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}"></figure>'
        case Excerpt(title, text):
            return f'<details><summary>{escape(title)}</summary><pre dir="auto">{escape(text)}</pre></details>'
        case Table():
            return _html_table(block)


def _contents(blocks: Sequence[Block]) -> str:
    links = [
        f'<a href="#part-{index}">{escape(block.text)}</a>'
        for index, block in enumerate(blocks)
        if isinstance(block, Heading) and block.level == 2
    ]
    return f"<nav>{''.join(links)}</nav>" if links else ""


def _html_table(table: Table) -> str:
    left = len(table.columns) - table.numeric
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    head = "".join(_cell("th", text, index >= left) for index, text in enumerate(table.columns))
    rows = "\n".join(
        f"<tr>{''.join(_cell('td', text, index >= left) for index, text in enumerate(row))}</tr>" for row in table.rows
    )
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _cell(tag: str, text: str, numeric: bool) -> str:
    kind = ' class="number"' if numeric else ""
    direction = "" if numeric or text.isascii() else ' dir="auto"'  # text from right to left begins at the right
    return f"<{tag}{kind}{direction}>{escape(text)}</{tag}>"
