"""Word F1 on WCXB's development pages, by kind of page: blocks in folds by site, and trafilatura; the worst pages."""

import importlib.util
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from measure import Figure
from rich.console import Console
from rich.table import Table
from support import extraction_folds
from support.extraction_speeds import ours

from gristmill.data_pipeline.extraction.blocks_config import PAGE_KINDS
from gristmill.data_pipeline.extraction.labelled_pages import LabelledPage, labelled_pages
from gristmill.data_pipeline.extraction.page import block_texts
from gristmill.data_pipeline.extraction.page_kinds import page_kind

WORD = re.compile(r"\w+")
BOOTSTRAPS, SEED = 4000, 41
WORST = 20
# Goals of F1 by kind; of all pages together.
GOALS = {"listing": 0.75, "collection": 0.72, "service": 0.84, "article": 0.95}
GOAL = 0.90


class PageScore(NamedTuple):
    """A page's F1 of each system, the ceiling that its blocks allow, and its predicted kind."""

    page: LabelledPage
    blocks: float
    trafilatura: float
    ceiling: float
    kind: str


def word_counts(text: str) -> Counter[str]:
    return Counter(WORD.findall(text.lower()))


def word_f1(text: Counter[str], truth: Counter[str]) -> float:
    """F1 of the multisets of words: 1 if both are empty, 0 if one is. {a: 2}, {a: 1, b: 1} -> 0.5."""
    if not text or not truth:
        return float(not text and not truth)
    return 2 * (text & truth).total() / (text.total() + truth.total())


def page_scores(folder: Path) -> list[PageScore]:
    """Every page of wcxb_dev by weights that did not see its site."""
    sets = extraction_folds.labelled_sets(folder)
    weights = extraction_folds.fold_weights(sets)
    trafilatura = cache(ours("trafilatura", "utf-8"))
    scores = []
    for labelled in sets[extraction_folds.KINDS]:
        truth = word_counts(labelled.page.body or "")
        page, kept = extraction_folds.classified(labelled.page.html, weights[labelled.fold], None)
        texts = [word_counts(text) for text in block_texts(page)]
        text = sum((words for words, keep in zip(texts, kept, strict=True) if keep), Counter[str]())
        best = sum((words for words, label in zip(texts, labelled.labels, strict=True) if label), Counter[str]())
        peer = word_counts(trafilatura(labelled.page.html))
        values = (word_f1(text, truth), word_f1(peer, truth), word_f1(best, truth))
        scores.append(PageScore(labelled.page, *values, page_kind(page)[0]))
    return scores


def peer_figures(folder: Path, every: int) -> list[Figure]:
    """Prints the word F1 of other extractors by kind; returns `extract_wcxb_EXTRACTOR`. Without blocks, whose own F1
    takes the fits in folds. every: of the pages, one of so many."""
    pages = labelled_pages(folder / extraction_folds.KINDS)[::every]
    peers = {name: ours(name, "utf-8") for name in ("trafilatura", "resiliparse")}
    if importlib.util.find_spec("newspaper") is not None:
        peers["newspaper4k"] = by_newspaper
    f1 = {
        name: [word_f1(word_counts(extractor(page.html)), word_counts(page.body or "")) for page in pages]
        for name, extractor in peers.items()
    }
    table = Table("kind", "pages", *peers)
    for kind in PAGE_KINDS:
        chosen = [place for place, page in enumerate(pages) if page.kind == kind]
        means = (np.mean([scores[place] for place in chosen]) for scores in f1.values())
        table.add_row(kind, str(len(chosen)), *(f"{mean:.4f}" for mean in means))
    Console(width=120).print(table)
    unit = f"word F1, {len(pages)} pages"
    return [Figure(f"extract_wcxb_{name}", float(np.mean(scores)), unit) for name, scores in f1.items()]


def by_newspaper(html: bytes) -> str:
    """newspaper4k, where it is installed; it is no dependency."""
    import newspaper

    article = newspaper.Article("https://example.org/", fetch_images=False)
    article.download(input_html=html.decode("utf-8", "replace"))
    article.parse()
    return str(article.text)


def kind_figures(folder: Path) -> list[Figure]:
    """Prints the tables of docs/extraction.md; returns extract_wcxb and extract_wcxb_KIND with trafilatura's."""
    scores = page_scores(folder)
    print_scores(scores)
    print_kinds(scores)
    print_worst(scores)
    figures = [_figure("extract_wcxb", scores, GOAL)]
    for kind in PAGE_KINDS:
        figures.append(_figure(f"extract_wcxb_{kind}", of_kind(scores, kind), GOALS.get(kind)))
    right = np.mean([score.kind == score.page.kind for score in scores])
    return [*figures, Figure("extract_wcxb_kind_accuracy", float(right), "share of pages")]


def of_kind(scores: Sequence[PageScore], kind: str) -> list[PageScore]:
    return [score for score in scores if score.page.kind == kind]


def _figure(name: str, scores: Sequence[PageScore], goal: float | None) -> Figure:
    own, peer = (float(np.mean([getattr(score, of) for score in scores])) for of in ("blocks", "trafilatura"))
    return Figure(name, own, "word F1", peer, "trafilatura", own / peer, goal)


def difference(scores: Sequence[PageScore]) -> tuple[float, float, float]:
    """(mean difference to trafilatura, bounds of its 95 % interval), by a paired bootstrap over the pages."""
    gains = np.array([score.blocks - score.trafilatura for score in scores])
    drawn = np.random.default_rng(SEED).integers(len(gains), size=(BOOTSTRAPS, len(gains)))
    low, high = np.quantile(gains[drawn].mean(axis=1), (0.025, 0.975))
    return float(gains.mean()), float(low), float(high)


def print_scores(scores: Sequence[PageScore]) -> None:
    table = Table("kind", "pages", "blocks", "trafilatura", "difference", "95 % interval", "best choice of blocks")
    for kind in ("all", *PAGE_KINDS):
        chosen = list(scores) if kind == "all" else of_kind(scores, kind)
        means = [np.mean([getattr(score, of) for score in chosen]) for of in ("blocks", "trafilatura", "ceiling")]
        gain, low, high = difference(chosen)
        interval = f"[{low:+.3f}, {high:+.3f}]"
        table.add_row(
            kind, str(len(chosen)), f"{means[0]:.4f}", f"{means[1]:.4f}", f"{gain:+.4f}", interval, f"{means[2]:.4f}"
        )
    Console(width=120).print(table)


def print_kinds(scores: Sequence[PageScore]) -> None:
    """How often each kind is taken for each."""
    counts = Counter((score.page.kind, score.kind) for score in scores)
    table = Table("annotated kind", *(f"predicted {kind}" for kind in PAGE_KINDS))
    for kind in PAGE_KINDS:
        table.add_row(kind, *(str(counts[kind, other]) for other in PAGE_KINDS))
    Console(width=140).print(table)


def print_worst(scores: Sequence[PageScore]) -> None:
    for kind in PAGE_KINDS:
        table = Table(kind, "blocks", "trafilatura", "best choice", "words annotated", "predicted kind")
        for score in sorted(of_kind(scores, kind), key=lambda score: score.blocks)[:WORST]:
            values = (f"{value:.2f}" for value in score[1:4])
            table.add_row(score.page.name, *values, str(word_counts(score.page.body or "").total()), score.kind)
        Console(width=120).print(table)
