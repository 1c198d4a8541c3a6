"""Fit the extractor's weights from labelled pages: token weights, then the two stages of trees, each on values of folds
that did not fit them. LightGBM is deterministic here: one thread, fixed seeds."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightgbm
import numpy as np
import trafilatura

from gristmill.data_pipeline.extraction.attributes import TOKEN_BITS
from gristmill.data_pipeline.extraction.html_extraction import NotExtracted, extract
from gristmill.data_pipeline.extraction.labelled_pages import FOLDS, LabelledPage, fold_of, labelled_pages
from gristmill.data_pipeline.extraction.labels import BODY_WEIGHT, block_labels
from gristmill.data_pipeline.extraction.page import (
    MIN_FIRST,
    NO_TOKENS,
    Page,
    block_texts,
    first_rows,
    read_page,
    second_rows,
)
from gristmill.data_pipeline.extraction.page_arrays import ELEMENT, END, PARENT, START
from gristmill.data_pipeline.extraction.trees import Trees, pack, predict_rows
from gristmill.data_pipeline.extraction.weights import Weights, save_weights
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter

MIN_SITES = 3  # with a token; rarer ones get no weight
PRIOR_SITES = 4.0  # sites of average content that a token's own are mixed with
SETTINGS: dict[str, Any] = {
    "objective": "binary", "learning_rate": 0.08, "num_leaves": 31, "min_data_in_leaf": 40, "max_bin": 63,
    "feature_fraction": 0.35, "bagging_fraction": 0.7, "bagging_freq": 1, "lambda_l2": 2.0,
    "num_threads": 1, "deterministic": True, "force_row_wise": True, "seed": 16, "verbosity": -1,
}  # fmt: skip
NUM_TREES = (120, 120)
NEGATIVE_SAMPLING = 3


class Labelled(NamedTuple):
    """A page with its blocks' labels and weights."""

    page: LabelledPage
    labels: np.ndarray
    weights: np.ndarray
    fold: int


def fit_weights(folders: Sequence[Path], output: Path, reporter: Reporter) -> Weights:
    """Fit on the labelled pages of the folders and write the weights file. Raises InputError for folders without
    readable pages, if the pages are of fewer sites than there are folds, and if their blocks have one label only."""
    found = [page for folder in folders for page in labelled_pages(folder)]
    num_sites = len({page.site for page in found})
    if len({fold_of(page.site) for page in found}) < FOLDS:
        raise InputError(f"the pages are of {num_sites} sites, too few for {FOLDS} folds by site; add pages")
    pages = label_pages(found, reporter)
    check_labels(pages)
    provenance = {
        "folders": [folder.resolve().name for folder in folders],
        "pages": len(pages),
        "sites": num_sites,
        "blocks": sum(len(one.labels) for one in pages),
        "pages_digest": pages_digest(found),
        "lightgbm": lightgbm.__version__,
        "trafilatura": trafilatura.__version__,
        "settings": {**SETTINGS, "num_trees": list(NUM_TREES), "negative_sampling": NEGATIVE_SAMPLING},
    }
    weights = fit(pages, provenance)
    save_weights(output, weights)
    return weights


def label_pages(pages: Sequence[LabelledPage], reporter: Reporter) -> list[Labelled]:
    """Label the blocks of every page: by its body, or by its chunks and trafilatura."""
    labelled = []
    with reporter.meter("label pages", len(pages), "pages") as meter:
        for page in pages:
            texts = block_texts(read_page(page.html, NO_TOKENS))
            labels, weights = block_labels(page, texts, teacher_text(page) if page.body is None else "")
            labelled.append(Labelled(page, labels, weights, fold_of(page.site)))
            meter.advance()
    return labelled


def check_labels(pages: Sequence[Labelled]) -> None:
    """Every fit leaves one fold out. Raises InputError if what remains has no main text, or nothing else."""
    for fold in range(FOLDS):
        labels = [label > 0 for one in pages if one.fold != fold for label in one.labels]
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


def token_counts(one: Labelled) -> dict[int, float]:
    """Token -> share of main text in the elements of the page that carry it."""
    page = read_page(one.page.html, NO_TOKENS, with_pairs=True)
    size = (page.blocks[:, END] - page.blocks[:, START]).astype(np.float64) * (one.weights > 0)
    sums = np.zeros((len(page.elements), 2))
    np.add.at(sums, page.blocks[:, ELEMENT], np.stack([size, size * one.labels], axis=1))
    for e in range(len(sums) - 1, 0, -1):
        sums[page.elements[e, PARENT]] += sums[e]
    pairs = page.pairs[page.pairs[:, 0] < len(sums)]
    of_tokens: dict[int, np.ndarray] = {}
    for element, token in np.unique(pairs, axis=0).tolist():
        of_tokens[token] = of_tokens.get(token, 0) + sums[element]
    return {token: held[1] / held[0] for token, held in of_tokens.items() if held[0] > 0}


def token_weights(counts: Sequence[dict[int, float]], sites: Sequence[str]) -> np.ndarray:
    """Log-odds of main text of every token, less those of the average token; shrunk by PRIOR_SITES."""
    of_sites: dict[tuple[int, str], list[float]] = {}
    for count, site in zip(counts, sites, strict=True):
        for token, share in count.items():
            of_sites.setdefault((token, site), []).append(share)
    total, number = np.zeros(1 << TOKEN_BITS), np.zeros(1 << TOKEN_BITS)
    for (token, _), shares in sorted(of_sites.items()):
        total[token] += np.mean(shares)
        number[token] += 1
    prior = np.clip(total.sum() / max(number.sum(), 1), 1e-3, 1 - 1e-3)
    share = (total + PRIOR_SITES * prior) / (number + PRIOR_SITES)
    share = np.clip(share, 1e-3, 1 - 1e-3)
    weights = np.log(share / (1 - share)) - np.log(prior / (1 - prior))
    # in half precision, as the weights file holds them
    return np.where(number >= MIN_SITES, weights, 0).astype(np.float16).astype(np.float32)


def fit(pages: Sequence[Labelled], provenance: dict[str, Any]) -> Weights:
    """Token weights and both stages, each fitted on values that did not see the page: the first stage's rows use token
    weights of the other folds, the second stage's the first stage of the other folds."""
    counts = [token_counts(one) for one in pages]
    folds = sorted({one.fold for one in pages})
    read, rows = read_out_of_fold(pages, counts, folds)
    held = list(zip(rows, pages, strict=True))
    first_out_of_fold = {fold: _train([each for each in held if each[1].fold != fold]) for fold in folds}
    seconds: list[np.ndarray] = []
    chosen: list[np.ndarray] = []
    for one, page, row in zip(pages, read, rows, strict=True):
        p = predict_rows(first_out_of_fold[one.fold], row)
        seconds.append(second_rows(page, row, p))
        chosen.append(p >= MIN_FIRST)
    second = train(
        np.concatenate([row[keep] for row, keep in zip(seconds, chosen, strict=True)]),
        np.concatenate([one.labels[keep] for one, keep in zip(pages, chosen, strict=True)]),
        np.concatenate([one.weights[keep] for one, keep in zip(pages, chosen, strict=True)]),
        NUM_TREES[1],
    )
    return Weights(token_weights(counts, [one.page.site for one in pages]), _train(held), second, provenance)


def read_out_of_fold(
    pages: Sequence[Labelled], counts: Sequence[dict[int, float]], folds: Sequence[int]
) -> tuple[list[Page], list[np.ndarray]]:
    """Every page read with the token weights of the other folds, and its rows of features."""
    tables = {
        fold: token_weights(
            [count for count, one in zip(counts, pages, strict=True) if one.fold != fold],
            [one.page.site for one in pages if one.fold != fold],
        )
        for fold in folds
    }
    read = [read_page(one.page.html, tables[one.fold]) for one in pages]
    return read, [first_rows(page) for page in read]


def _train(held: Sequence[tuple[np.ndarray, Labelled]]) -> Trees:
    """The first stage, fitted on the rows of these pages."""
    return train(
        np.concatenate([row for row, _ in held]),
        np.concatenate([one.labels for _, one in held]),
        np.concatenate([one.weights for _, one in held]),
        NUM_TREES[0],
    )


def train(rows: np.ndarray, labels: np.ndarray, weights: np.ndarray, num_trees: int) -> Trees:
    """Of the blocks outside the main text that no annotation names, one of NEGATIVE_SAMPLING is drawn and weighs as
    much as all: most are menus, and all of them would double the time."""
    common = ~labels & (weights <= BODY_WEIGHT)
    drawn = ~common | (np.random.default_rng(SETTINGS["seed"]).random(len(labels)) < 1 / NEGATIVE_SAMPLING)
    weights = np.where(common, weights * NEGATIVE_SAMPLING, weights)
    data = lightgbm.Dataset(rows[drawn], labels[drawn].astype(np.float32), weight=weights[drawn], params=SETTINGS)
    return pack(lightgbm.train(SETTINGS, data, num_trees).dump_model())
