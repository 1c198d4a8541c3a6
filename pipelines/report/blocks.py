"""The blocks of a report, which are rendered as Markdown and as HTML."""

from dataclasses import dataclass


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
