"""The extractor `blocks` against trafilatura by language, on pages that it was not fitted on."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from support.annotated_chunks import Annotated, Counts, counts, total
from support.article_extraction import score

from gristmill.data_pipeline.extraction.html_extraction import Extractor
from gristmill.data_pipeline.extraction.labelled_pages import words
from gristmill.data_pipeline.readers.document import Record
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.signals.language import LanguageConfig, detect
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile

MIN_PAGES = 5  # of a language with a row of its own


class Pair(NamedTuple):
    """The texts of one page; annotated: its chunks, if it has some."""

    ours: str
    teachers: str
    annotated: Annotated | None = None


def crawl_pairs(files: Sequence[Path]) -> list[Pair]:
    """The pages of WARC files that either of the two finds text in."""
    found = []
    for path in files:
        ours, teachers = _texts(path, "blocks"), _texts(path, "trafilatura")
        found += [Pair(ours.get(k, ""), teachers.get(k, "")) for k in sorted(ours.keys() | teachers.keys())]
    return found


def _texts(path: Path, extractor: Extractor) -> dict[int, str]:
    source = SourceConfig(name="s", format="warc", paths=(str(path),), extractor=extractor)
    part = FileRange(RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path)), str(path))
    return {record.number: record.text for record in read_range(part, source) if isinstance(record, Record)}


def print_languages(pairs: Iterable[Pair]) -> None:
    """Pages, agreement of the two (F1 of word 4-grams, trafilatura's text taken as the truth; ideographs and kana are
    words), and where chunks are annotated the F1 of both."""
    held = list(pairs)
    names = detect([pair.teachers or pair.ours for pair in held], LanguageConfig()).column(0).to_pylist()
    by_language: dict[str, list[Pair]] = {}
    for name, pair in zip(names, held, strict=True):
        by_language.setdefault(name, []).append(pair)
    small = [name for name, pages in by_language.items() if len(pages) < MIN_PAGES]
    by_language["others"] = [pair for name in small for pair in by_language.pop(name)]
    table = Table("language", "pages", "agreement F1", "chunk F1, blocks", "chunk F1, trafilatura")
    for name, pages in sorted(by_language.items(), key=lambda item: -len(item[1])):
        if pages:
            table.add_row(name, str(len(pages)), *_row(pages))
    table.add_row("all", str(len(held)), *_row(held))
    Console(width=100).print(table)


def _row(pages: Sequence[Pair]) -> tuple[str, str, str]:
    agreement = score((" ".join(words(pair.teachers)), " ".join(words(pair.ours))) for pair in pages).f1
    annotated = [pair for pair in pages if pair.annotated is not None]
    if not annotated:
        return f"{agreement:.3f}", "", ""
    return (
        f"{agreement:.3f}",
        _f1(annotated, [p.ours for p in annotated]),
        _f1(annotated, [p.teachers for p in annotated]),
    )


def _f1(pages: Sequence[Pair], texts: Sequence[str]) -> str:
    of_pages: list[Counts] = [
        counts(pair.annotated, text) for pair, text in zip(pages, texts, strict=True) if pair.annotated is not None
    ]
    return f"{total(of_pages).f1:.3f}"
