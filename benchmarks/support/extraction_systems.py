"""Quality of blocks beside other systems on the three annotated sets: in folds by site, and with each set held out."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import trafilatura
from measure import Figure
from rich.console import Console
from rich.table import Table
from support import extraction_folds
from support.annotated_chunks import Annotated, Counts, counts, total
from support.article_extraction import Score, score
from support.extraction_folds import ARTICLES, CHUNKS, KINDS, READABILITY, ExtractedPage
from support.extraction_speeds import ours

from gristmill.data_pipeline.extraction.fit import Labelled

RECALL = {"include_comments": False, "favor_recall": True}
SYSTEMS: dict[str, Callable[[bytes], str]] = {
    "trafilatura": ours("trafilatura", "utf-8"),
    "trafilatura_precision": ours("trafilatura_precision", "utf-8"),
    "trafilatura_recall": lambda html: trafilatura.extract(html.decode(), **RECALL) or "",
    "resiliparse": ours("resiliparse", "utf-8"),
    "readability_like": extraction_folds.readability_like,
}
PUBLISHED = 0.958  # article F1 of trafilatura in the benchmark's README


def quality_figures(folder: Path) -> list[Figure]:
    """Prints the tables of docs/extraction.md; returns a figure for each of their scores that was asked for."""
    sets = {name: pages for name, pages in extraction_folds.labelled_sets(folder).items() if name != KINDS}
    held_out = extraction_folds.in_folds(extraction_folds.labelled_sets(folder))
    held_out = [found for found in held_out if found.of != KINDS]
    by_system = {"blocks, in folds by site": held_out}
    by_system |= {name: run_system(name, sets) for name in SYSTEMS}
    print_systems(by_system)
    print_errors(held_out, by_system["trafilatura"])
    chunks = chunk_counts(held_out)
    figures = [
        Figure("extract_blocks_trafilatura_pages", chunks.f1, "F1", goal=0.935),
        Figure("extract_blocks_trafilatura_pages_precision", chunks.precision, "precision"),
        Figure("extract_blocks_trafilatura_pages_recall", chunks.recall, "recall"),
        Figure("extract_blocks_articles", body_score(held_out, ARTICLES).f1, "F1", goal=0.955),
    ]
    for name in SYSTEMS:
        peer = {"peer": PUBLISHED, "peer_name": "published"} if name == "trafilatura" else {}
        figures.append(Figure(f"extract_{name}_trafilatura_pages", chunk_counts(by_system[name]).f1, "F1"))
        figures.append(Figure(f"extract_{name}_f1", body_score(by_system[name], ARTICLES).f1, "F1", **peer))
    return figures


def transfer_figures(folder: Path) -> list[Figure]:
    """Prints the table of sets held out; returns a figure for two of them."""
    sets = extraction_folds.labelled_sets(folder)
    transferred = [found for name in sets for found in extraction_folds.without_set(sets, name)]
    held_out = {"blocks, in folds by site": extraction_folds.in_folds(sets)}
    print_transfer({"fitted on the others": transferred} | held_out | {"trafilatura": run_system("trafilatura", sets)})
    return [
        Figure("extract_blocks_transfer_to_trafilatura_pages", chunk_counts(transferred).f1, "F1"),
        Figure("extract_blocks_transfer_to_articles", body_score(transferred, ARTICLES).f1, "F1"),
    ]


def run_system(name: str, sets: dict[str, list[Labelled]]) -> list[ExtractedPage]:
    run = cache(SYSTEMS[name])
    return [ExtractedPage(of, one, run(one.page.html)) for of, held in sets.items() for one in held]


def chunk_counts(found: Sequence[ExtractedPage]) -> Counts:
    return total(
        counts(Annotated("", b"", one.labelled.page.wanted, one.labelled.page.unwanted), one.text)
        for one in found
        if one.of == CHUNKS
    )


def body_score(found: Sequence[ExtractedPage], of: str) -> Score:
    """Of the sets that hold the main text."""
    return score((one.labelled.page.body or "", one.text) for one in found if one.of == of)


def print_errors(found: Sequence[ExtractedPage], teachers: Sequence[ExtractedPage]) -> None:
    """How many errors of blocks on annotated chunks trafilatura shares."""
    wrong = missed = also_wrong = also_missed = 0
    for own, other in zip(found, teachers, strict=True):
        page = own.labelled.page
        for chunk in page.unwanted:
            kept, also = (has_chunk(one.text, chunk) for one in (own, other))
            wrong, also_wrong = wrong + kept, also_wrong + (kept and also)
        for chunk in page.wanted:
            lost, also = (not has_chunk(one.text, chunk) for one in (own, other))
            missed, also_missed = missed + lost, also_missed + (lost and also)
    print(f"blocks keeps {wrong} unwanted chunks ({also_wrong} of them trafilatura too)")
    print(f"and misses {missed} wanted ones ({missed - also_missed} of them trafilatura finds)")
    empty = [sum(not one.text.strip() for one in texts) for texts in (found, teachers)]
    print(f"blocks finds no text in {empty[0]} of {len(found)} pages, trafilatura in {empty[1]}")


def has_chunk(text: str, chunk: str) -> bool:
    return " ".join(chunk.split()) in " ".join(text.split())


def print_systems(by_system: dict[str, list[ExtractedPage]]) -> None:
    table = Table("extractor", "chunk F1", "precision", "recall", "article F1", "precision", "recall", "Readability F1")
    for name, found in by_system.items():
        chunks, articles = chunk_counts(found), body_score(found, ARTICLES)
        values = (chunks.f1, chunks.precision, chunks.recall, articles.f1, articles.precision, articles.recall)
        table.add_row(name, *(f"{value:.4f}" for value in (*values, body_score(found, READABILITY).f1)))
    Console(width=140).print(table)


def print_transfer(by_system: dict[str, list[ExtractedPage]]) -> None:
    """blocks fitted on the other two sets, without the sites of the third, on the third; beside the systems."""
    table = Table("set held out", "pages", "score", *by_system)
    for of in (CHUNKS, ARTICLES, READABILITY):
        values = [chunk_counts(found).f1 if of == CHUNKS else body_score(found, of).f1 for found in by_system.values()]
        pages = sum(one.of == of for one in next(iter(by_system.values())))
        name = "chunk F1" if of == CHUNKS else "F1 of 4-grams"
        table.add_row(of, str(pages), name, *(f"{value:.4f}" for value in values))
    Console(width=140).print(table)
