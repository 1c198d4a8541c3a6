"""Fit the extractor's weights from labelled pages: token weights, then the two stages of trees, each on values of folds
that did not fit them. LightGBM is deterministic here: one thread, fixed seeds."""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import courlan
import lightgbm
import numpy as np
import trafilatura

from gristmill.data_pipeline.extraction.attributes import ELEMENT, END, PARENT, START, TOKEN_BITS
from gristmill.data_pipeline.extraction.html_extraction import NotExtracted, decode_html, extract
from gristmill.data_pipeline.extraction.page import (
    MIN_FIRST,
    NO_TOKENS,
    Page,
    block_texts,
    first_rows,
    read_page,
    second_rows,
)
from gristmill.data_pipeline.extraction.weights import Trees, Weights, pack, predict_rows, save_weights
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter

# Labelled pages for fitting the extractor, read from folders of three layouts.
#
# - `ground-truth.json` with `{address: {file, with: [...], without: [...]}}`: chunks of text that belong to the main
# text and chunks that do not (trafilatura's evaluation). - `ground-truth.json` with `{id: {articleBody, url}}`, pages
# in `html/<id>.html.gz` (article-extraction-benchmark). - `expected.json.gz` with `{name: HTML of the main text}`,
# pages in `<name>.html.gz` (Readability's test pages). - any other folder: its `.html`, `.htm` and `.gz` files,
# labelled by trafilatura alone.

FOLDS = 5
_ADDRESS = re.compile(
    rb"""(?:rel=["']?canonical["']?[^>]{0,300}href|["']og:url["'][^>]{0,300}content)=["']?(https?://[^"'>\s]+)"""
)
_TAG = re.compile(r"<[^<>]*>")


class LabelledPage(NamedTuple):
    """html: UTF-8. wanted, unwanted: chunks of text inside and outside of the main text. body: the whole main text."""

    name: str
    site: str
    html: bytes
    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    body: str | None = None


def site_of(address: str) -> str:
    """The registered domain of an address; of an archived page that of the page; else the address itself.

    24 addresses of trafilatura's pages are `hard::` and a file's name: each is a site of its own."""
    return courlan.extract_domain(address[max(0, address.rfind("http")) :]) or address


def fold_of(site: str) -> int:
    """Pages of one site have one template, so they are in one fold."""
    return zlib.crc32(site.encode()) % FOLDS


def labelled_pages(folder: Path) -> list[LabelledPage]:
    """Raises InputError if the folder has no pages or its labels do not fit its files."""
    try:
        pages = list(_pages(folder))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{folder}: its labels cannot be read ({type(error).__name__}: {error}); the layouts are described in "
            "docs/extraction.md"
        ) from error
    if not pages:
        raise InputError(f"{folder}: no pages; give a folder with ground-truth.json, expected.json.gz or .html files")
    return pages


def _pages(folder: Path) -> Iterator[LabelledPage]:
    if (folder / "ground-truth.json").is_file():
        for name, truth in json.loads((folder / "ground-truth.json").read_bytes()).items():
            if "articleBody" in truth:
                html = _utf8(folder / "html" / f"{Path(name).name}.html.gz")
                yield LabelledPage(name, site_of(truth["url"]), html, body=truth["articleBody"])
            else:
                html = _utf8(folder / Path(truth["file"]).name)
                yield LabelledPage(name, site_of(name), html, tuple(truth["with"]), tuple(truth["without"]))
    elif (folder / "expected.json.gz").is_file():
        for name, expected in json.loads(gzip.decompress((folder / "expected.json.gz").read_bytes())).items():
            html = _utf8(folder / f"{Path(name).name}.html.gz")
            yield LabelledPage(name, _site_in(html) or name, html, body=_plain(expected))
    else:
        for path in sorted(folder.rglob("*")):
            if path.name.endswith((".html", ".htm", ".html.gz", ".htm.gz")):
                html = _utf8(path)
                yield LabelledPage(path.name, _site_in(html) or path.name, html)


def _utf8(path: Path) -> bytes:
    raw = path.read_bytes()
    return decode_html(gzip.decompress(raw) if path.suffix == ".gz" else raw, None).text.encode("utf-8", "replace")


def _site_in(html: bytes) -> str | None:
    address = _ADDRESS.search(html)
    return site_of(address[1].decode("utf-8", "replace")) if address else None


def _plain(html: str) -> str:
    return unescape(_TAG.sub("\n", html))


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


def token_counts(labelled: Labelled) -> dict[int, float]:
    """Token -> share of main text in the elements of the page that carry it."""
    page = read_page(labelled.page.html, NO_TOKENS, with_pairs=True)
    size = (page.blocks[:, END] - page.blocks[:, START]).astype(np.float64) * (labelled.weights > 0)
    sums = np.zeros((len(page.elements), 2))
    np.add.at(sums, page.blocks[:, ELEMENT], np.stack([size, size * labelled.labels], axis=1))
    for e in range(len(sums) - 1, 0, -1):
        sums[page.elements[e, PARENT]] += sums[e]
    pairs = page.pairs[page.pairs[:, 0] < len(sums)]
    of_tokens: dict[int, np.ndarray] = {}
    for element, token in np.unique(pairs, axis=0).tolist():
        of_tokens[token] = of_tokens.get(token, 0) + sums[element]
    return {token: sizes[1] / sizes[0] for token, sizes in of_tokens.items() if sizes[0] > 0}


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
    counts = [token_counts(labelled) for labelled in pages]
    folds = sorted({labelled.fold for labelled in pages})
    read, rows = read_out_of_fold(pages, counts, folds)
    rows_and_labels = list(zip(rows, pages, strict=True))
    first_out_of_fold = {fold: _train([pair for pair in rows_and_labels if pair[1].fold != fold]) for fold in folds}
    seconds: list[np.ndarray] = []
    chosen: list[np.ndarray] = []
    for labelled, page, row in zip(pages, read, rows, strict=True):
        p = predict_rows(first_out_of_fold[labelled.fold], row)
        seconds.append(second_rows(page, row, p))
        chosen.append(p >= MIN_FIRST)
    second = train(
        np.concatenate([row[keep] for row, keep in zip(seconds, chosen, strict=True)]),
        np.concatenate([labelled.labels[keep] for labelled, keep in zip(pages, chosen, strict=True)]),
        np.concatenate([labelled.weights[keep] for labelled, keep in zip(pages, chosen, strict=True)]),
        NUM_TREES[1],
    )
    return Weights(
        token_weights(counts, [labelled.page.site for labelled in pages]), _train(rows_and_labels), second, provenance
    )


def read_out_of_fold(
    pages: Sequence[Labelled], counts: Sequence[dict[int, float]], folds: Sequence[int]
) -> tuple[list[Page], list[np.ndarray]]:
    """Every page read with the token weights of the other folds, and its rows of features."""
    tables = {
        fold: token_weights(
            [count for count, labelled in zip(counts, pages, strict=True) if labelled.fold != fold],
            [labelled.page.site for labelled in pages if labelled.fold != fold],
        )
        for fold in folds
    }
    read = [read_page(labelled.page.html, tables[labelled.fold]) for labelled in pages]
    return read, [first_rows(page) for page in read]


def _train(rows_and_labels: Sequence[tuple[np.ndarray, Labelled]]) -> Trees:
    """The first stage, fitted on the rows of these pages."""
    return train(
        np.concatenate([row for row, _ in rows_and_labels]),
        np.concatenate([labelled.labels for _, labelled in rows_and_labels]),
        np.concatenate([labelled.weights for _, labelled in rows_and_labels]),
        NUM_TREES[0],
    )


def train(rows: np.ndarray, labels: np.ndarray, weights: np.ndarray, num_trees: int) -> Trees:
    """Trees fitted on a sample: of the blocks outside the main text that no annotation names, one of NEGATIVE_SAMPLING
    is drawn and weighs as much as all: most are menus, and all of them would double the time."""
    common = ~labels & (weights <= BODY_WEIGHT)
    drawn = ~common | (np.random.default_rng(SETTINGS["seed"]).random(len(labels)) < 1 / NEGATIVE_SAMPLING)
    weights = np.where(common, weights * NEGATIVE_SAMPLING, weights)
    data = lightgbm.Dataset(rows[drawn], labels[drawn].astype(np.float32), weight=weights[drawn], params=SETTINGS)
    return pack(lightgbm.train(SETTINGS, data, num_trees).dump_model())


# Labels and weights of a page's text blocks: gold chunks and bodies first, else what trafilatura extracts.

# Ideographs, kana and hangul syllables are words of their own.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+")
NGRAM = 4
GOLD_WEIGHT, BODY_WEIGHT, TEACHER_WEIGHT, SHORT_WEIGHT = 8.0, 2.0, 1.0, 0.3


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def block_labels(page: LabelledPage, texts: Sequence[str], teacher: str) -> tuple[np.ndarray, np.ndarray]:
    """(labels bool[B], weights float32[B]) of the blocks' texts. teacher: what trafilatura extracts from the page."""
    if page.body is not None:
        return labels_of_body(texts, page.body, BODY_WEIGHT)
    labels, weights = labels_of_body(texts, teacher, TEACHER_WEIGHT)
    for chunk in page.unwanted:
        for k in blocks_of(chunk, texts):
            labels[k], weights[k] = False, GOLD_WEIGHT
    for chunk in page.wanted:
        chunk_blocks = blocks_of(chunk, texts)
        kept = [k for k in chunk_blocks if labels[k]] or chunk_blocks
        labels[kept], weights[kept] = True, GOLD_WEIGHT
    return labels, weights


def labels_of_body(texts: Sequence[str], body: str, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """A block is main text if at least half of its word 4-grams are in the body; one of fewer than four words, if its
    words are a line of the body (or, with little weight, anywhere in it)."""
    of_body = words(body)
    grams = [set(zip(*(of_body[k:] for k in range(size)), strict=False)) for size in range(1, NGRAM + 1)]
    lines = {tuple(words(line)) for line in body.split("\n")}
    labels, weights = np.zeros(len(texts), np.bool_), np.full(len(texts), weight, np.float32)
    for k, text in enumerate(texts):
        block_words = words(text)
        if not block_words:
            weights[k] = 0
        elif len(block_words) >= NGRAM:
            in_body = [gram in grams[-1] for gram in zip(*(block_words[j:] for j in range(NGRAM)), strict=False)]
            labels[k] = 2 * sum(in_body) >= len(in_body)
        elif tuple(block_words) in lines:
            labels[k] = True
        elif tuple(block_words) in grams[len(block_words) - 1]:
            labels[k], weights[k] = True, weight * SHORT_WEIGHT
    return labels, weights


def blocks_of(chunk: str, texts: Sequence[str]) -> list[int]:
    """The blocks that hold a part of an occurrence of the chunk, white space normalized."""
    normal = [" ".join(text.split()) for text in texts]
    wanted = " ".join(chunk.split())
    if not wanted:
        return []
    starts = np.cumsum([0, *(len(text) + 1 for text in normal)])
    chosen: list[int] = []
    page, at = " ".join(normal), -1
    while (at := page.find(wanted, at + 1)) >= 0:
        first = int(np.searchsorted(starts, at, side="right")) - 1
        last = int(np.searchsorted(starts, at + len(wanted) - 1, side="right")) - 1
        chosen += range(first, last + 1)
    return sorted(set(chosen))
