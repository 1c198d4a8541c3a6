"""Compares settings of trafilatura on pages with known text; chooses one by cross-validation over sites."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import trafilatura
from rich.console import Console
from rich.table import Table
from support.annotated_chunks import FOLDS, Counts, annotated_pages, counts, fold_of, site, total
from support.article_extraction import addresses, pages, score
from trafilatura.deduplication import LRUCache

from gristmill.data_pipeline.extraction.html_extraction import TRAFILATURA_OPTIONS, NotExtracted, decode_html, extract

FOCUS = {"balanced": {}, "precision": {"favor_precision": True}, "recall": {"favor_recall": True}}
VARIANTS = {
    "": {},
    "no tables": {"include_tables": False},
    "fast": {"fast": True},
    "comments": {"include_comments": True},
}
FORMER = "precision"  # what the pipeline ran until the options were chosen here
DRAWS = 2000  # of sites, for the interval of a difference


class Measured(NamedTuple):
    """What one setting gives. chunks: by page of trafilatura_eval; articles: (truth, found) by page of
    article_extraction; rate: MB of HTML a second of processor time."""

    chunks: Sequence[Counts]
    articles: Sequence[tuple[str, str]]
    rate: float


class Scored(NamedTuple):
    chunks: Counts
    article_f1: float
    joint: float  # the mean of the two F1, each weighted by its pages: what a setting is chosen by


def settings() -> dict[str, dict[str, Any]]:
    """{name: options of trafilatura.extract}; `balanced comments` are trafilatura's own defaults."""
    named: dict[str, dict[str, Any]] = {
        f"{focus} {variant}".strip(): {"include_comments": False, **options, **more}
        for (focus, options), (variant, more) in itertools.product(FOCUS.items(), VARIANTS.items())
    }
    named["balanced formatting"] = {"include_comments": False, "include_formatting": True}
    # A cache for each page: trafilatura's own lives as long as the process, and texts would depend on the pages' order.
    named["balanced deduplicate"] = {"include_comments": False, "deduplicate": True}
    return named


def print_comparison(articles: Path, chunks: Path, max_pages: int | None) -> None:
    """One table of all settings, one of the settings that cross-validation chooses."""
    measured = {name: measure(run, articles, chunks, max_pages) for name, run in extractors().items()}
    sites = Sites(
        [page.address for page in itertools.islice(annotated_pages(chunks), max_pages)],
        addresses(articles)[:max_pages],
    )
    print_settings(measured, sites)
    print_choices({name: one for name, one in measured.items() if name != "resiliparse"}, sites)


def extractors() -> dict[str, Callable[[bytes], str]]:
    def with_trafilatura(options: dict[str, Any]) -> Callable[[bytes], str]:
        def run(html: bytes) -> str:
            own_cache = {"deduplicate": LRUCache(maxsize=4096)} if options.get("deduplicate") else {}
            return trafilatura.extract(decode_html(html, None).text, **(options | own_cache)) or ""

        return run

    def resiliparse(html: bytes) -> str:
        try:
            return extract(html, None, "resiliparse")
        except NotExtracted:
            return ""

    return {name: with_trafilatura(options) for name, options in settings().items()} | {"resiliparse": resiliparse}


def measure(run: Callable[[bytes], str], articles: Path, chunks: Path, max_pages: int | None) -> Measured:
    seconds, read = 0.0, 0

    def timed(html: bytes) -> str:
        nonlocal seconds, read
        started = time.process_time()
        text = run(html)
        seconds, read = seconds + time.process_time() - started, read + len(html)
        return text

    of_chunks = [counts(page, timed(page.html)) for page in itertools.islice(annotated_pages(chunks), max_pages)]
    of_articles = [(truth, timed(html)) for html, truth in itertools.islice(pages(articles), max_pages)]
    return Measured(of_chunks, of_articles, read / 1e6 / seconds)


class Sites:
    """The pages' addresses; picks pages by fold."""

    def __init__(self, chunk_addresses: Sequence[str], article_addresses: Sequence[str]):
        self.chunk_sites = [site(address) for address in chunk_addresses]
        self._chunk_folds = [fold_of(address) for address in chunk_addresses]
        self._article_folds = [fold_of(address) for address in article_addresses]

    def scored(self, measured: Measured, folds: Sequence[int] = range(FOLDS)) -> Scored:
        of_chunks = [each for each, fold in zip(measured.chunks, self._chunk_folds, strict=True) if fold in folds]
        of_articles = [each for each, fold in zip(measured.articles, self._article_folds, strict=True) if fold in folds]
        chunks, article = total(of_chunks), score(of_articles).f1
        joint = (len(of_chunks) * chunks.f1 + len(of_articles) * article) / (len(of_chunks) + len(of_articles))
        return Scored(chunks, article, joint)

    def choices(self, measured: dict[str, Measured]) -> Iterator[tuple[int, str]]:
        """(fold, best setting on the other folds)."""
        for fold in range(FOLDS):
            others = [other for other in range(FOLDS) if other != fold]
            yield fold, max(measured, key=lambda name: self.scored(measured[name], others).joint)

    def held_out(self, measured: dict[str, Measured]) -> Measured:
        """Results on every page with the setting chosen without the page's fold."""
        chosen = dict(self.choices(measured))
        return Measured(
            [measured[chosen[fold]].chunks[k] for k, fold in enumerate(self._chunk_folds)],
            [measured[chosen[fold]].articles[k] for k, fold in enumerate(self._article_folds)],
            0.0,
        )

    def interval(self, one: Measured, other: Measured) -> tuple[float, float]:
        """95 % interval of the difference in F1 of two settings, by a bootstrap over sites."""
        names = sorted(set(self.chunk_sites))
        of_sites = np.zeros((2, len(names), 3), np.int64)
        for place, name in enumerate(self.chunk_sites):
            for which, measured in enumerate((one, other)):
                of_sites[which, names.index(name)] += measured.chunks[place]
        drawn = np.random.default_rng(0).integers(len(names), size=(DRAWS, len(names)))
        found, missed, wrong = np.moveaxis(of_sites[:, drawn].sum(axis=2), -1, 0)
        f1 = 2 * found / (2 * found + missed + wrong)
        low, high = np.quantile(f1[0] - f1[1], [0.025, 0.975])
        return float(low), float(high)


def print_settings(measured: dict[str, Measured], sites: Sites) -> None:
    table = Table("setting", "chunk F1", "precision", "recall", "mean of folds", "article F1", "joint", "MB/s")
    used = {str(options): name for name, options in TRAFILATURA_OPTIONS.items()}
    options = settings()
    for name, one in measured.items():
        whole = sites.scored(one)
        mean = sum(sites.scored(one, [fold]).chunks.f1 for fold in range(FOLDS)) / FOLDS
        extractor = used.get(str(options.get(name)))
        table.add_row(
            name if extractor is None else f"{name} (extractor: {extractor})",
            *(f"{value:.4f}" for value in (whole.chunks.f1, whole.chunks.precision, whole.chunks.recall, mean)),
            *(f"{value:.4f}" for value in (whole.article_f1, whole.joint)),
            f"{one.rate:.1f}",
        )
    Console(width=140).print(table)


def print_choices(measured: dict[str, Measured], sites: Sites) -> None:
    table = Table(
        "held-out fold", "chosen on the others", "chunk F1", "article F1", f"{FORMER}: chunk F1", "article F1"
    )
    former, held_out = measured[FORMER], sites.held_out(measured)
    for fold, name in sites.choices(measured):
        add_choice(table, str(fold), name, sites.scored(measured[name], [fold]), sites.scored(former, [fold]))
    add_choice(table, "all", "", sites.scored(held_out), sites.scored(former))
    Console(width=140).print(table)
    low, high = sites.interval(held_out, former)
    print(f"chunk F1, held out, less that of {FORMER}: 95 % of draws of sites between {low:+.4f} and {high:+.4f}")


def add_choice(table: Table, fold: str, name: str, chosen: Scored, former: Scored) -> None:
    values = (chosen.chunks.f1, chosen.article_f1, former.chunks.f1, former.article_f1)
    table.add_row(fold, name, *(f"{value:.4f}" for value in values))
