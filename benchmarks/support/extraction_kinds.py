"""Word F1 on WCXB's development pages, by kind of page: blocks in folds by site, and trafilatura; the worst pages and
the causes of their errors."""

import importlib.util
import io
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard
from measure import Figure
from rich.console import Console
from rich.table import Table
from support import extraction_folds
from support.extraction_speeds import ours

from gristmill.data_pipeline.extraction.attributes import (
    ELEMENT,
    ELEMENT_FLAGS,
    END,
    IN_TABLE,
    IS_COMMENT,
    IS_NAVIGATION,
    LINK_BYTES,
    START,
    TAG,
    TAG_FLAGS,
)
from gristmill.data_pipeline.extraction.blocks import page_kind
from gristmill.data_pipeline.extraction.blocks_config import PAGE_KINDS
from gristmill.data_pipeline.extraction.labelled_pages import LabelledPage, labelled_pages
from gristmill.data_pipeline.extraction.page import Page, block_texts
from gristmill.data_pipeline.extraction.page_stats import (
    I_COUNT,
    ITEM,
    MAX_PROSE_LINKS,
    MIN_PROSE_BYTES,
    P,
    item_slot,
)
from gristmill.data_pipeline.extraction.tags import TAG_IDS

WORD = re.compile(r"\w+")
BOOTSTRAPS, SEED = 4000, 41
WORST = 20
# Goals of F1 by kind; of all pages together.
GOALS = {"listing": 0.75, "collection": 0.72, "service": 0.84, "article": 0.95}
GOAL = 0.90
MIN_ITEMS = 3  # siblings of one path that make a list of cards, rows or posts
MIN_CEILING = 0.5  # below it, the annotated text is not in the page's HTML
EMPTY, ABSENT = "annotation is empty", "annotated text is not in the HTML"
# Sorts of blocks, the first that fits.
COMMENTS, NAVIGATION, TABLE, ITEMS, PROSE, SHORT = (
    "comments", "nav, header, footer, aside", "table", "repeated items", "prose", "headings and short lines",
)  # fmt: skip


class Snippets(NamedTuple):
    """Annotated snippets of a page's main text (`with`), those of the rest of the page (`without`), and of each how
    many stand in an extracted text."""

    wanted: int
    unwanted: int
    wanted_kept: int
    unwanted_kept: int


class PageScore(NamedTuple):
    """A page's F1 of each system, the ceiling that its blocks allow, its predicted kind, its wrong words, and the
    snippets in each system's text (blocks, trafilatura).

    errors: by (missed or extra, sort of block), words that are annotated and not kept, and words that are kept and not
    annotated."""

    page: LabelledPage
    blocks: float
    trafilatura: float
    ceiling: float
    kind: str
    errors: Counter[tuple[str, str]]
    snippets: tuple[Snippets, Snippets]

    @property
    def cause(self) -> str:
        """Reason for most of the page's wrong words."""
        if not word_counts(self.page.body or ""):
            return EMPTY
        if self.ceiling < MIN_CEILING:
            return ABSENT
        return ": ".join(self.errors.most_common(1)[0][0]) if self.errors else "none"


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
    trafilatura = ours("trafilatura", "utf-8")
    snippets = annotated_snippets(folder / extraction_folds.KINDS / "pages.jsonl.zst")
    scores = []
    for labelled in sets[extraction_folds.KINDS]:
        truth = word_counts(labelled.page.body or "")
        page, kept = extraction_folds.classified(labelled.page.html, weights[labelled.fold], None)
        block_text = block_texts(page)
        texts = [word_counts(text) for text in block_text]
        text = sum((words for words, keep in zip(texts, kept, strict=True) if keep), Counter[str]())
        best = sum((words for words, label in zip(texts, labelled.labels, strict=True) if label), Counter[str]())
        peer_text = trafilatura(labelled.page.html)
        values = (word_f1(text, truth), word_f1(word_counts(peer_text), truth), word_f1(best, truth))
        kept_text = " ".join(text for text, keep in zip(block_text, kept, strict=True) if keep)
        counts = tuple(count_snippets(system, *snippets[labelled.page.name]) for system in (kept_text, peer_text))
        sizes = np.array([words.total() for words in texts], np.int64)
        errors = block_errors(page, sizes, kept, labelled.labels)
        scores.append(PageScore(labelled.page, *values, page_kind(page)[0], errors, counts))
    return scores


def annotated_snippets(path: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Page name -> (snippets of its main text, snippets of the rest) of WCXB."""
    with path.open("rb") as raw:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(raw), encoding="utf-8")
        pages = map(json.loads, lines)
        return {page["id"]: (page.get("with") or [], page.get("without") or []) for page in pages}


def count_snippets(text: str, wanted: Sequence[str], unwanted: Sequence[str]) -> Snippets:
    """A snippet stands in the text if its words do, in a row."""
    words = f" {' '.join(WORD.findall(text.lower()))} "
    kept = [
        sum(f" {' '.join(WORD.findall(snippet.lower()))} " in words for snippet in group)
        for group in (wanted, unwanted)
    ]
    return Snippets(len(wanted), len(unwanted), *kept)


def snippet_f1(counts: Sequence[Snippets]) -> float:
    """F1 of kept snippets: precision over kept ones, recall over those of the main text."""
    wanted, _, wanted_kept, unwanted_kept = map(sum, zip(*counts, strict=True))
    return 2 * wanted_kept / (wanted + wanted_kept + unwanted_kept)


def block_errors(page: Page, sizes: np.ndarray, kept: np.ndarray, labels: np.ndarray) -> Counter[tuple[str, str]]:
    """Words of the blocks on which `kept` and `labels` (bool[B]) differ. sizes: words, int64[B]."""
    errors: Counter[tuple[str, str]] = Counter()
    for k in np.flatnonzero(kept != labels):
        errors["extra" if kept[k] else "missed", block_sort(page, int(k))] += int(sizes[k])
    return +errors


def block_sort(page: Page, k: int) -> str:
    """Sort of the page's block k, by the elements around it, then by its own text."""
    block, element = page.blocks[k], int(page.blocks[k, ELEMENT])
    flags, item = int(page.elements[element, ELEMENT_FLAGS]), int(page.sums[element, ITEM])
    size = block[END] - block[START]
    around = IS_NAVIGATION | sum(int(TAG_FLAGS[TAG_IDS[name]]) for name in ("header", "footer", "aside"))
    is_list = item > 0 and page.items[item_slot(page.elements, item), I_COUNT] >= MIN_ITEMS
    for sort, fits in (
        (COMMENTS, flags & IS_COMMENT),
        (NAVIGATION, flags & around),
        (TABLE, flags & IN_TABLE),
        (ITEMS, is_list and page.elements[item, TAG] != P),
        (PROSE, size >= MIN_PROSE_BYTES and block[LINK_BYTES] < MAX_PROSE_LINKS * size),
    ):
        if fits:
            return sort
    return SHORT


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
    print_causes(scores)
    figures = [_figure("extract_wcxb", scores, GOAL)]
    for kind in PAGE_KINDS:
        figures.append(_figure(f"extract_wcxb_{kind}", of_kind(scores, kind), GOALS.get(kind)))
    own, peer = (snippet_f1([score.snippets[side] for score in scores]) for side in (0, 1))
    figures.append(Figure("extract_wcxb_snippets", own, "F1 of snippets", peer, "trafilatura", own / peer))
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
        table = Table(kind, "blocks", "trafilatura", "best choice", "words annotated", "predicted kind", "cause")
        for score in worst(scores, kind):
            values = (f"{value:.2f}" for value in score[1:4])
            num_words = str(word_counts(score.page.body or "").total())
            table.add_row(score.page.name, *values, num_words, score.kind, score.cause)
        Console(width=140).print(table)


def worst(scores: Sequence[PageScore], kind: str) -> list[PageScore]:
    return sorted(of_kind(scores, kind), key=lambda score: score.blocks)[:WORST]


def print_causes(scores: Sequence[PageScore]) -> None:
    """Causes of the worst pages of each kind; then, over all pages of a kind, the mean F1 that each cause costs, as
    its share of the page's wrong words."""
    causes = {kind: Counter(score.cause for score in worst(scores, kind)) for kind in PAGE_KINDS}
    table = Table("cause, of the worst pages", *PAGE_KINDS)
    for cause, _ in sum(causes.values(), Counter[str]()).most_common():
        table.add_row(cause, *(str(causes[kind][cause] or "") for kind in PAGE_KINDS))
    Console(width=160).print(table)
    losses: dict[str, Counter[str]] = {kind: Counter() for kind in PAGE_KINDS}
    for score in scores:
        lost = 1 - score.blocks
        whole = score.cause in (EMPTY, ABSENT) or not score.errors
        shares = {score.cause: 1.0} if whole else {
            ": ".join(error): size / score.errors.total() for error, size in score.errors.items()
        }  # fmt: skip
        for cause, share in shares.items():
            losses[score.page.kind or ""][cause] += lost * share / len(of_kind(scores, score.page.kind or ""))
    table = Table("cause, F1 lost on all pages", *PAGE_KINDS)
    for cause, _ in sum(losses.values(), Counter[str]()).most_common():
        table.add_row(cause, *(f"{losses[kind][cause]:.3f}" for kind in PAGE_KINDS))
    Console(width=160).print(table)
