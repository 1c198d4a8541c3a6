"""The extractor `blocks` on pages of sites it was not fitted on: fitted once for each of five folds by site, and once
without each data set. Fitted weights are kept under build/extraction, by the digest of what they depend on."""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.extraction import fit
from gristmill.data_pipeline.extraction.attributes import DEPTH, ELEMENT
from gristmill.data_pipeline.extraction.block_features import KIND_FEATURES
from gristmill.data_pipeline.extraction.blocks import classified, hint_tokens
from gristmill.data_pipeline.extraction.context_features import SECOND_FEATURES
from gristmill.data_pipeline.extraction.fit import Labelled, label_pages
from gristmill.data_pipeline.extraction.html_extraction import utf8_html
from gristmill.data_pipeline.extraction.labelled_pages import FOLDS, LabelledPage, fold_of, labelled_pages
from gristmill.data_pipeline.extraction.page import (
    NO_TOKENS,
    Page,
    block_texts,
    first_rows,
    read_page,
    second_inputs,
)
from gristmill.data_pipeline.extraction.page_stats import LCA_READABLE, P_READABLE_BEST
from gristmill.data_pipeline.extraction.weights import Weights, load_weights, save_weights
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.cli import train_extractor

KEPT = Path(__file__).parents[2] / "build" / "extraction"
CHUNKS, ARTICLES, READABILITY, KINDS = "trafilatura_eval", "article_extraction", "readability", "wcxb_dev"


class ExtractedPage(NamedTuple):
    """A page of a data set and the text that was extracted from it."""

    of: str
    labelled: Labelled
    text: str


def labelled_sets(html: Path) -> dict[str, list[Labelled]]:
    """The pages of the four data sets below html/, with the labels of their blocks."""
    found = {}
    for name in (CHUNKS, ARTICLES, READABILITY, KINDS):
        pages = labelled_pages(html / name)
        found[name] = [
            Labelled(page, labels, weights, shares, fold_of(page.site))
            for page, labels, weights, shares in zip(pages, *_labels(name, pages), strict=True)
        ]
    return found


def _labels(name: str, pages: list[LabelledPage]) -> tuple[list[np.ndarray], ...]:
    """(labels, weights, shares) of each page's blocks; trafilatura, which makes them, takes half a minute."""
    made_from = [fit.pages_digest(pages).encode(), code_of_fit(), features_sample(pages)]
    kept = KEPT / f"labels-{name}-{hashlib.sha256(b''.join(made_from)).hexdigest()[:16]}.npz"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        found = label_pages(pages, Reporter.silent())
        np.savez_compressed(
            kept,
            sizes=np.array([len(one.labels) for one in found]),
            labels=np.concatenate([one.labels for one in found]),
            weights=np.concatenate([one.weights for one in found]),
            shares=np.concatenate([one.shares for one in found]),
        )
    with np.load(kept) as file:
        ends = np.cumsum(file["sizes"])[:-1]
        return tuple(np.split(file[name], ends) for name in ("labels", "weights", "shares"))


@cache
def code_of_fit() -> bytes:
    """Digest of the code that labels blocks and fits."""
    digest = hashlib.sha256()
    for name in ("fit", "labelled_pages"):
        digest.update(Path(fit.__file__).with_name(f"{name}.py").read_bytes())
    digest.update(Path(train_extractor.__file__).read_bytes())
    return digest.hexdigest().encode()


def features_sample(pages: Sequence[LabelledPage]) -> bytes:
    """Digest of the text, tokens and features of every tenth page: another tokenizer or feature makes fits anew."""
    digest = hashlib.sha256(" ".join(SECOND_FEATURES + KIND_FEATURES).encode())
    for one in pages[::10]:
        page = read_page(one.html, NO_TOKENS, with_pairs=True)
        rows = first_rows(page)
        second = second_inputs(page, rows, np.float32(0.5) * rows[:, 0] % 1).rows
        hints = np.array(hint_tokens(one.html))
        for array in (page.text, page.pairs, rows, second, hints):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def in_folds(sets: dict[str, list[Labelled]]) -> list[ExtractedPage]:
    """Every page as weights extract it that were fitted on the other folds."""
    weights = fold_weights(sets)
    return [ExtractedPage(name, one, extracted(one, weights[one.fold])) for name, held in sets.items() for one in held]


def fold_weights(sets: dict[str, list[Labelled]]) -> dict[int, Weights]:
    """By fold, weights of which no part was fitted on its pages."""
    return _fitted([one for held in sets.values() for one in held], range(FOLDS))


def without_set(sets: dict[str, list[Labelled]], name: str) -> list[ExtractedPage]:
    """The pages of one data set, as weights extract them that were fitted on the others' pages of other sites."""
    sites = {one.page.site for one in sets[name]}
    others = [one for other, held in sets.items() if other != name for one in held if one.page.site not in sites]
    (weights,) = _fitted(others, (fit.ALL_FOLDS,)).values()
    return [ExtractedPage(name, one, extracted(one, weights)) for one in sets[name]]


def _fitted(pages: Sequence[Labelled], folds: Sequence[int]) -> dict[int, Weights]:
    digest = hashlib.sha256(code_of_fit() + features_sample([one.page for one in pages]))
    for one in pages:
        digest.update(one.page.html)
        digest.update(one.labels.tobytes() + one.weights.tobytes())
    paths = {fold: KEPT / f"weights-{digest.hexdigest()[:16]}-{fold}.npz" for fold in folds}
    if not all(path.exists() for path in paths.values()):
        KEPT.mkdir(parents=True, exist_ok=True)
        for fold, weights in fit.fit_without_folds(pages, folds, train_extractor.train_network).items():
            save_weights(paths[fold], weights)
    return {fold: load_weights(str(path)) for fold, path in paths.items()}


def extracted(one: Labelled, weights: Weights) -> str:
    return "\n".join(kept_texts(one, weights))


def kept_texts(one: Labelled, weights: Weights) -> list[str]:
    """The blocks of the main text."""
    return _chosen(*classified(one.page.html, weights, None))


def utf8(html: bytes) -> bytes:
    return utf8_html(html, None)[0]


def readability_like(html: bytes) -> str:
    """The whole element with the best score by Readability's formula (paragraphs' commas and lengths, less links).
    html: UTF-8."""
    page = read_page(html, NO_TOKENS)
    depth = page.elements[int(page.totals[P_READABLE_BEST]), DEPTH]
    return "\n".join(_chosen(page, page.sums[page.blocks[:, ELEMENT], LCA_READABLE] == depth))


def _chosen(page: Page, kept: np.ndarray) -> list[str]:
    return [text for text, keep in zip(block_texts(page), kept, strict=True) if keep]
