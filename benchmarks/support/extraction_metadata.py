"""Metadata of blocks against trafilatura's on the annotated pages, and against what addresses and texts say."""

import base64
import io
import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import trafilatura
import zstandard
from measure import Figure
from rich.console import Console
from rich.table import Table

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig, MetadataField
from gristmill.data_pipeline.extraction.html_extraction import NotExtracted, extract_page
from gristmill.data_pipeline.extraction.labelled_pages import LabelledPage, labelled_pages
from gristmill.data_pipeline.signals.language import LanguageConfig, detect

SETS = ("trafilatura_eval", "article_extraction", "readability")
SINGLE = ("title", "date", "author", "language", "canonical", "license")  # fields of one value
OPTIONS = BlocksConfig(metadata=get_args(MetadataField))
MIN_LANGUAGE_CHARS = 500
_DATE_IN_ADDRESS = re.compile(r"/(20\d\d)[/-]?(0[1-9]|1[0-2])[/-]?(0[1-9]|[12]\d|3[01])(?:/|-|_|\b)")
_WORD = re.compile(r"\w+")


@dataclass
class Compared:
    """A page's fields. text: its main text. address: where the set has it."""

    address: str
    text: str
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)


def print_metadata(folder: Path, every: int = 1) -> None:
    """every: of the pages, one of so many."""
    pages = [page for name in SETS for page in labelled_pages(folder / name)][::every]
    compared = [compare(page) for page in pages]
    print_agreement(compared)
    print_truth(compared)


def compare(page: LabelledPage) -> Compared:
    try:
        found = extract_page(page.html, "utf-8", "blocks", OPTIONS)
    except NotExtracted:
        return Compared(page.name, "")
    html = page.html.decode("utf-8", "replace")
    document = trafilatura.bare_extraction(html, include_comments=False, include_links=True, include_formatting=True)
    described = trafilatura.extract_metadata(html)
    theirs = {} if described is None else _single_values(described)
    if document is not None and document.body is not None:
        heads = ["".join(head.itertext()) for head in document.body.iter("head")]
        theirs["headings"] = [" ".join(head.split()) for head in heads]
        theirs["links"] = [link.get("target") for link in document.body.iter("ref") if link.get("target")]
    ours = dict(found.metadata)
    ours["headings"] = [text for _, text in ours.get("headings", [])]
    return Compared(page.name, found.text, ours, theirs)


def print_agreement(compared: Sequence[Compared]) -> None:
    """Fields of one value, and headings and links by the F1 of their sets."""
    print_relations({name: relations(name, [(page.ours, page.theirs) for page in compared]) for name in SINGLE})
    for name in ("headings", "links"):
        common = ours = theirs = 0
        for page in compared:
            own, other = set(page.ours.get(name, ())), set(page.theirs.get(name, ()))
            common, ours, theirs = common + len(own & other), ours + len(own), theirs + len(other)
        f1 = 2 * common / (ours + theirs)
        print(f"{name}: {ours} of blocks, {theirs} of trafilatura, {common} of both; F1 {f1:.3f}")


def relations(name: str, pages: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Counter[str]:
    """How often the field of both sides is related how. pages: (ours, theirs)."""
    return Counter(relation(ours.get(name), theirs.get(name)) for ours, theirs in pages)


def print_relations(counts: Mapping[str, Counter[str]]) -> None:
    """A field is equal where it has the same words in any order."""
    table = Table(
        "field", "both", "equal", "one in the other", "different", "blocks only", "trafilatura only", "neither"
    )
    for name, of_field in counts.items():
        columns = [of_field[way] for way in ("equal", "contained", "different", "ours", "theirs", "neither")]
        table.add_row(name, str(sum(columns[:3])), *map(str, columns))
    Console(width=130).print(table)


def relation(own: str | None, other: str | None) -> str:
    if not own or not other:
        return "ours" if own else "theirs" if other else "neither"
    first, second = set(_WORD.findall(own.casefold())), set(_WORD.findall(other.casefold()))
    if first == second:
        return "equal"
    return "contained" if first <= second or second <= first else "different"


LABELLED = ("title", "author", "date")  # that WCXB's annotations name
UNLABELLED = ("canonical", "license")


def labelled_figures(path: Path, every: int) -> list[Figure]:
    """`extract_metadata_FIELD`: mean F1 of words of titles and authors, share of equal dates, over the pages of WCXB
    that have the label; pages without a value count as 0. Of the fields without labels the share of pages, of those
    where both sides have a value, on which it is equal; their counts are printed. every: of the pages, one of so
    many."""
    sides = []
    scores: dict[str, list[tuple[float, float]]] = {name: [] for name in LABELLED}
    with path.open("rb") as raw:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(raw), encoding="utf-8")
        for line in itertools.islice(lines, 0, None, every):
            page = json.loads(line)
            raw_html = page["html"].encode() if "html" in page else base64.b64decode(page["html_base64"])
            ours, theirs = _metadata_of(raw_html)
            sides.append((ours, theirs))
            for name in LABELLED:
                if page[name]:
                    scores[name].append(tuple(_agreement(name, page[name], side.get(name)) for side in (ours, theirs)))
    figures = []
    for name, pairs in scores.items():
        own, other = (statistics.mean(side) for side in zip(*pairs, strict=True))
        label = f"trafilatura {trafilatura.__version__}, {len(pairs)} pages"
        figures.append(Figure(f"extract_metadata_{name}", own, "mean agreement", other, label, own / other, 1))
    counts = {name: relations(name, sides) for name in UNLABELLED}
    print_relations(counts)
    for name, of_field in counts.items():
        both = of_field["equal"] + of_field["contained"] + of_field["different"]
        unit = f"equal to trafilatura's, share of {both} pages"
        figures.append(Figure(f"extract_metadata_{name}", of_field["equal"] / max(both, 1), unit))
    return figures


def _metadata_of(html: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        ours = dict(extract_page(html, None, "blocks", OPTIONS).metadata)
    except NotExtracted:
        ours = {}
    described = trafilatura.extract_metadata(html)
    return ours, {} if described is None else _single_values(described)


def _single_values(described: Any) -> dict[str, Any]:
    """The fields that trafilatura's document has a value of."""
    names = {name: "url" if name == "canonical" else name for name in SINGLE}
    return {name: value for name, key in names.items() if (value := getattr(described, key))}


def _agreement(name: str, label: str, value: str | None) -> float:
    """F1 of words, or for a date 1.0 where the days are equal."""
    if not value:
        return 0.0
    if name == "date":
        return float(value[:10] == label[:10])
    expected, words = (Counter(_WORD.findall(text.casefold())) for text in (label, value))
    common = sum((expected & words).values())
    return 2 * common / (expected.total() + words.total()) if common else 0.0


def print_truth(compared: Sequence[Compared]) -> None:
    """Dates against those in addresses, languages against those that are detected in the main text."""
    table = Table("field", "truth", "pages", "blocks: right", "wrong", "none", "trafilatura: right", "wrong", "none")
    table.add_row("date", "in the address", *scores([(date, page, "date") for date, page in addressed(compared)]))
    table.add_row("language", "detected", *scores([(code, page, "language") for code, page in detected(compared)]))
    Console(width=130).print(table)


def addressed(compared: Sequence[Compared]) -> Iterator[tuple[str, Compared]]:
    for page in compared:
        if found := _DATE_IN_ADDRESS.search(page.address):
            yield "-".join(found.groups()), page


def detected(compared: Sequence[Compared]) -> Iterator[tuple[str, Compared]]:
    long = [page for page in compared if len(page.text) >= MIN_LANGUAGE_CHARS]
    names = detect([page.text for page in long], LanguageConfig()).column(0).to_pylist()
    return zip(names, long, strict=True)


def scores(pages: Sequence[tuple[str, Compared, str]]) -> list[str]:
    found = [str(len(pages))]
    for side in ("ours", "theirs"):
        values = [(truth, getattr(page, side).get(name)) for truth, page, name in pages]
        right = sum(truth == value for truth, value in values)
        none = sum(not value for _, value in values)
        found += [str(right), str(len(values) - right - none), str(none)]
    return found
