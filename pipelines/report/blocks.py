"""A report is a list of blocks, written once and rendered twice: as Markdown and as one HTML page."""

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
    """numeric: how many of the last columns hold numbers, which stand to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: int = 0
    caption: str = ""


@dataclass(frozen=True)
class Excerpt:
    """Text from a corpus or a model, shown as it is. It is the one place where foreign text enters the page."""

    title: str
    text: str


@dataclass(frozen=True)
class Figure:
    """svg: the picture; name: its file beside the Markdown page; alt: what it shows, in words."""

    name: str
    svg: bytes
    alt: str


Block = Heading | Paragraph | Table | Excerpt | Figure
