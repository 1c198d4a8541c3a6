"""Fit the extractor's weights from labelled pages: token weights, page kinds, two stages of trees and the
network of the second, each on values of folds that did not fit them. The caller gives the network's fit, which takes
torch. One thread and fixed seeds: equal pages give equal weights on one machine."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightgbm
import numpy as np
import trafilatura

from gristmill.data_pipeline.extraction.attributes import (
    ELEMENT,
    END,
    NUM_TOKENS,
    PARENT,
    START,
    TABLE_SIZE,
    TOKEN_BITS,
)
from gristmill.data_pipeline.extraction.block_features import KIND_FEATURES
from gristmill.data_pipeline.extraction.blocks import hint_tokens, kind_features, set_kinds
from gristmill.data_pipeline.extraction.blocks_config import NUM_KINDS, PAGE_KINDS
from gristmill.data_pipeline.extraction.context_features import NUM_SECOND, Network, scale_inputs
from gristmill.data_pipeline.extraction.html_extraction import NotExtracted, extract
from gristmill.data_pipeline.extraction.labelled_pages import (
    BODY_WEIGHT,
    FOLDS,
    LabelledPage,
    block_labels,
    fold_of,
    labelled_pages,
    words,
)
from gristmill.data_pipeline.extraction.page import (
    NO_TOKENS,
    Page,
    SecondInputs,
    block_texts,
    first_rows,
    read_page,
    second_inputs,
)
from gristmill.data_pipeline.extraction.page_stats import WORDS
from gristmill.data_pipeline.extraction.weights import (
    KIND_STEPS,
    Trees,
    Weights,
    flatten,
    in_half_precision,
    pack,
    predict_rows,
    save_weights,
)
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

MIN_SITES = 3  # with a token; rarer ones get no weight
PRIOR_SITES = 4.0  # sites of average content that a token's own are mixed with
SETTINGS: dict[str, Any] = {
    "objective": "binary", "num_leaves": 31, "min_data_in_leaf": 40, "max_bin": 63,
    "feature_fraction": 0.35, "bagging_fraction": 0.7, "bagging_freq": 1, "lambda_l2": 2.0,
    "num_threads": 1, "deterministic": True, "force_row_wise": True, "seed": 16, "verbosity": -1,
}  # fmt: skip
# Of the two stages. The first rules blocks out and describes their surroundings, the second decides with the network.
NUM_TREES, LEARNING_RATES = (72, 104), (0.12, 0.05)
NEGATIVE_SAMPLING = 3
KIND_SETTINGS = SETTINGS | {"num_leaves": 8, "min_data_in_leaf": 10, "learning_rate": 0.08}
NUM_KIND_TREES = 40
MIN_KIND_PAGES = 5  # with a token; rarer ones say nothing of the kind


class Labelled(NamedTuple):
    """A page with its blocks' labels, weights and share_weights."""

    page: LabelledPage
    labels: np.ndarray
    weights: np.ndarray
    shares: np.ndarray
    fold: int


class PageTokens(NamedTuple):
    """tokens, shares: tokens of block-level elements, and the share of main text in those elements; words of short
    blocks, and the share of main text in those blocks. seen: all tokens and words of the page, for its kind."""

    tokens: np.ndarray
    shares: np.ndarray
    seen: np.ndarray


class Example(NamedTuple):
    """A page for the network: its blocks' inputs, labels (0 or 1), weights and words, float32[N]; the words of its main
    text; whether its F1 counts, which takes an annotation of the whole text."""

    inputs: SecondInputs
    labels: np.ndarray
    weights: np.ndarray
    words: np.ndarray
    total: float
    has_f1: bool


class NetworkTrainer(NamedTuple):
    """train: fits the network of the second stage. settings: versions and constants, for the weights' provenance."""

    train: Callable[[Sequence[Example]], Network]
    settings: dict[str, Any]


def fit_weights(folders: Sequence[Path], output: Path, trainer: NetworkTrainer, reporter: Reporter) -> Weights:
    """Fit on the labelled pages of the folders and write the weights file. Raises InputError for folders without
    readable pages, if the pages are of fewer sites than there are folds, and if their blocks have one label only."""
    labelled = [page for folder in folders for page in labelled_pages(folder)]
    num_sites = len({page.site for page in labelled})
    if len({fold_of(page.site) for page in labelled}) < FOLDS:
        raise InputError(f"the pages are of {num_sites} sites, too few for {FOLDS} folds by site; add pages")
    pages = label_pages(labelled, reporter)
    check_labels(pages)
    provenance = {
        "folders": [folder.resolve().name for folder in folders],
        "pages": len(pages),
        "sites": num_sites,
        "blocks": sum(len(labelled_page.labels) for labelled_page in pages),
        "pages_digest": pages_digest(labelled),
        "lightgbm": lightgbm.__version__,
        "trafilatura": trafilatura.__version__,
        "settings": SETTINGS
        | {
            "num_trees": list(NUM_TREES),
            "learning_rates": list(LEARNING_RATES),
            "negative_sampling": NEGATIVE_SAMPLING,
        },
        "network": trainer.settings,
    }
    weights = fit_without_folds(pages, (ALL_FOLDS,), trainer.train)[ALL_FOLDS]._replace(provenance=provenance)
    save_weights(output, weights)
    return weights


def label_pages(pages: Sequence[LabelledPage], reporter: Reporter) -> list[Labelled]:
    """Label the blocks of every page: by its body, or by its chunks and trafilatura."""
    labelled = []
    with reporter.meter("label pages", len(pages), "pages") as meter:
        for page in pages:
            texts = block_texts(read_page(page.html, NO_TOKENS))
            labels_and_weights = block_labels(page, texts, teacher_text(page) if page.body is None else "")
            labelled.append(Labelled(page, *labels_and_weights, fold_of(page.site)))
            meter.advance()
    return labelled


def check_labels(pages: Sequence[Labelled]) -> None:
    """Every fit leaves one fold out. Raises InputError if what remains has no main text, or nothing else."""
    for fold in range(FOLDS):
        labels = [label > 0 for page in pages if page.fold != fold for label in page.labels]
        if all(labels) or not any(labels):
            raise InputError(
                f"of {len(labels)} blocks of the pages without fold {fold} by site, {sum(labels)} are main text: "
                "nothing to learn; give folders of annotated pages (docs/extraction.md, Fitting)"
            )


def teacher_text(page: LabelledPage) -> str:
    try:
        return extract(page.html, "utf-8", "trafilatura")
    except NotExtracted:
        return ""


def pages_digest(pages: Sequence[LabelledPage]) -> str:
    digest = hashlib.sha256()
    for page in pages:
        digest.update(page.html)
        digest.update(repr(page[:2] + page[3:]).encode("utf-8", "replace"))
    return digest.hexdigest()


def token_counts(labelled: Labelled) -> PageTokens:
    """Read the page for the shares of main text of its tokens."""
    page = read_page(labelled.page.html, NO_TOKENS, with_pairs=True)
    size = (page.blocks[:, END] - page.blocks[:, START]).astype(np.float64) * (labelled.weights > 0)
    sums = np.zeros((len(page.elements), 2))
    np.add.at(sums, page.blocks[:, ELEMENT], np.stack([size, size * labelled.labels], axis=1))
    _sum_subtrees(page.elements, sums)
    pairs = page.pairs[page.pairs[:, 0] < len(sums)].astype(np.int64)
    elements, tokens = np.divmod(np.unique(pairs[:, 0] << TOKEN_BITS | pairs[:, 1]), 1 << TOKEN_BITS)
    present, places = np.unique(tokens, return_inverse=True)
    totals = np.zeros((len(present), 2))
    np.add.at(totals, places, sums[elements])
    known = totals[:, 0] > 0
    words, word_shares = _word_shares(page.label_words, labelled)
    page.seen[hint_tokens(labelled.page.html)] = True
    return PageTokens(
        np.concatenate([present[known], words]),
        np.concatenate([totals[known, 1] / totals[known, 0], word_shares]),
        np.flatnonzero(page.seen),
    )


def _word_shares(label_words: np.ndarray, labelled: Labelled) -> tuple[np.ndarray, np.ndarray]:
    """(words of short blocks, of each the share of its blocks that are main text). label_words: of Page."""
    blocks, words = np.unique(label_words[labelled.weights[label_words[:, 0]] > 0], axis=0).T
    present, places, counts = np.unique(words, return_inverse=True, return_counts=True)
    return present.astype(np.int64), np.bincount(places, labelled.labels[blocks], len(present)) / counts


@cached_njit(nogil=True)
def _sum_subtrees(elements, sums):
    for e in range(len(sums) - 1, 0, -1):
        for column in range(sums.shape[1]):
            sums[elements[e, PARENT], column] += sums[e, column]


def token_weights(counts: Sequence[PageTokens], sites: Sequence[str]) -> np.ndarray:
    """float32[TABLE_SIZE]: log-odds of main text of every token and word, less those of the average one; shrunk by
    PRIOR_SITES."""
    places = {site: place for place, site in enumerate(sorted(set(sites)))}
    keys = [count.tokens * len(places) + places[site] for count, site in zip(counts, sites, strict=True)]
    pairs, of_pair = np.unique(np.concatenate(keys), return_inverse=True)
    shares = np.concatenate([count.shares for count in counts])
    means = np.bincount(of_pair, shares, len(pairs)) / np.bincount(of_pair, minlength=len(pairs))
    tokens = pairs // max(len(places), 1)
    total = np.bincount(tokens, means, TABLE_SIZE)
    number = np.bincount(tokens, minlength=TABLE_SIZE)
    prior = np.empty(TABLE_SIZE)
    for part in (slice(0, NUM_TOKENS), slice(NUM_TOKENS, TABLE_SIZE)):
        prior[part] = np.clip(total[part].sum() / max(number[part].sum(), 1), 1e-3, 1 - 1e-3)
    share = (total + PRIOR_SITES * prior) / (number + PRIOR_SITES)
    share = np.clip(share, 1e-3, 1 - 1e-3)
    weights = np.log(share / (1 - share)) - np.log(prior / (1 - prior))
    # in half precision, as the weights file holds them
    return np.where(number >= MIN_SITES, weights, 0).astype(np.float16).astype(np.float32)


def kind_token_weights(counts: Sequence[PageTokens], pages: Sequence[LabelledPage]) -> np.ndarray:
    """float32[TABLE_SIZE, NUM_KINDS]: log of a token's frequency in the pages of a kind over that in all pages,
    shrunk by PRIOR_SITES; 0 for tokens of fewer than MIN_KIND_PAGES pages."""
    of_kind, sizes = np.zeros((TABLE_SIZE, NUM_KINDS)), np.zeros(NUM_KINDS)
    for count, page in zip(counts, pages, strict=True):
        if page.kind is not None:
            of_kind[count.seen, PAGE_KINDS.index(page.kind)] += 1
            sizes[PAGE_KINDS.index(page.kind)] += 1
    total = of_kind.sum(axis=1, keepdims=True)
    overall = np.maximum(total, 1) / max(sizes.sum(), 1)
    logs = np.log((of_kind + PRIOR_SITES * overall) / (sizes + PRIOR_SITES) / overall)
    steps = np.round(np.clip(np.where(total >= MIN_KIND_PAGES, logs, 0), -4, 4) * KIND_STEPS)
    return (steps / KIND_STEPS).astype(np.float32)


class PageKinds(NamedTuple):
    """Fitted values that a page is read with: weights of tokens, and the trees of the page kinds."""

    token_weights: np.ndarray
    kind_tokens: np.ndarray
    kinds: Trees

    def read(self, html: bytes) -> Page:
        page = read_page(html, self.token_weights)
        set_kinds(page, html, self.kind_tokens, self.kinds)
        return page


def fit_without_folds(
    pages: Sequence[Labelled], left_out: Sequence[int], train_network: Callable[[Sequence[Example]], Network]
) -> dict[int, Weights]:
    """By fold, weights of which no part was fitted on its pages; under ALL_FOLDS those fitted on all. Their provenance
    is empty.

    Every part learns from values that did not see the page they are of: a page's kind and its rows of the first stage
    use token weights of the other folds, its rows of the second stage the first stage of the other folds."""
    counts = [token_counts(labelled) for labelled in pages]
    folds = sorted({labelled.fold for labelled in pages})
    readers = page_kinds_out_of_fold(pages, counts, folds)
    rows = [first_rows(readers[labelled.fold].read(labelled.page.html)) for labelled in pages]
    firsts = {fold: train(_others(pages, fold), rows, pages, 0) for fold in sorted({*folds, *left_out})}
    examples = []
    for labelled, row in zip(pages, rows, strict=True):
        page = readers[labelled.fold].read(labelled.page.html)
        examples.append(example(labelled, page, second_inputs(page, row, predict_rows(firsts[labelled.fold], row))))
    features = [page_example.inputs.rows[:, :NUM_SECOND] for page_example in examples]
    chosen = [
        labelled._replace(labels=labelled.labels[page_example.inputs.chosen], weights=page_example.weights)
        for labelled, page_example in zip(pages, examples, strict=True)
    ]
    seconds = {fold: train(_others(pages, fold), features, chosen, 1) for fold in left_out}
    for page_example in examples:
        scale_inputs(page_example.inputs.rows, page_example.inputs.p)
    networks = {fold: train_network([examples[k] for k in _others(pages, fold)]) for fold in left_out}
    return {fold: Weights(*readers[fold], firsts[fold], seconds[fold], networks[fold], {}) for fold in left_out}


def _others(pages: Sequence[Labelled], fold: int) -> list[int]:
    return [k for k, labelled in enumerate(pages) if labelled.fold != fold]


ALL_FOLDS = -1


def page_kinds_out_of_fold(
    pages: Sequence[Labelled], counts: Sequence[PageTokens], folds: Sequence[int]
) -> dict[int, PageKinds]:
    """By fold, the values that its pages are read with, fitted on the other folds; under ALL_FOLDS those fitted on all.

    The trees of a fold learn from token weights that did not see their page either."""
    tables = {}
    for fold in (*folds, ALL_FOLDS):
        kept = [k for k, labelled in enumerate(pages) if labelled.fold != fold]
        own = [counts[k] for k in kept]
        tables[fold] = (
            token_weights(own, [pages[k].page.site for k in kept]),
            kind_token_weights(own, [pages[k].page for k in kept]),
        )
    known = [k for k, labelled in enumerate(pages) if labelled.page.kind is not None]
    rows = np.zeros((len(known), len(KIND_FEATURES)), np.float32)
    for row, k in zip(rows, known, strict=True):
        page = read_page(pages[k].page.html, NO_TOKENS)
        seen = np.zeros(TABLE_SIZE, np.bool_)
        seen[counts[k].seen] = True
        kind_features(page.sums, page.totals, seen, tables[pages[k].fold][1], row)
    kinds = np.array([PAGE_KINDS.index(pages[k].page.kind or "") for k in known], np.int64)
    of_fold = np.array([pages[k].fold for k in known], np.int64)
    return {
        fold: PageKinds(*tables[fold], train_kinds(rows[of_fold != fold], kinds[of_fold != fold])) for fold in tables
    }


def train_kinds(rows: np.ndarray, kinds: np.ndarray) -> Trees:
    """Trees of every kind against the others. Without annotated kinds all are equally probable."""
    structures: list[dict[str, Any]] = []
    for kind in range(NUM_KINDS):
        labels = (kinds == kind).astype(np.float32)
        if 0 < labels.sum() < len(labels):
            data = lightgbm.Dataset(rows, labels, params=KIND_SETTINGS)
            model = lightgbm.train(KIND_SETTINGS, data, NUM_KIND_TREES).dump_model()
            structures += [tree["tree_structure"] for tree in model["tree_info"]]
        structures += [{"leaf_value": 0.0}] * ((kind + 1) * NUM_KIND_TREES - len(structures))
    return in_half_precision(flatten(structures))


def train(chosen: Sequence[int], rows: Sequence[np.ndarray], pages: Sequence[Labelled], stage: int) -> Trees:
    """Trees fitted on a sample of the chosen pages' rows: of the light blocks outside the main text, one of
    NEGATIVE_SAMPLING is drawn and weighs as much as all: most are menus, and all of them would double the time.
    stage: place in NUM_TREES and LEARNING_RATES."""
    settings = SETTINGS | {"learning_rate": LEARNING_RATES[stage]}
    labels = np.concatenate([pages[k].labels for k in chosen])
    weights = np.concatenate([pages[k].weights for k in chosen])
    common = ~labels & (weights <= BODY_WEIGHT)
    drawn = ~common | (np.random.default_rng(SETTINGS["seed"]).random(len(labels)) < 1 / NEGATIVE_SAMPLING)
    weights = np.where(common, weights * NEGATIVE_SAMPLING, weights)[drawn]
    sample = np.concatenate([rows[k] for k in chosen])[drawn]
    data = lightgbm.Dataset(sample, labels[drawn].astype(np.float32), weight=weights, params=settings)
    return in_half_precision(pack(lightgbm.train(settings, data, NUM_TREES[stage]).dump_model()))


def example(labelled: Labelled, page: Page, inputs: SecondInputs) -> Example:
    """The blocks of the second stage count by their share of the page; the first sees all blocks alike."""
    chosen, body = inputs.chosen, labelled.page.body
    labels, sizes = labelled.labels[chosen].astype(np.float32), page.counts[chosen, WORDS].astype(np.float32)
    weights = (labelled.weights * labelled.shares)[chosen].astype(np.float32)
    total = max(len(words(body or "")), float(labels @ sizes), 1.0)
    return Example(inputs, labels, weights, sizes, total, body is not None and bool(labelled.weights.any()))
