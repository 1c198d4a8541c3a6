"""Labelled pages for fitting the extractor, and the labels of their text blocks.

A folder has one of five layouts:
- `pages.jsonl.zst` with `{id, url, page_type, main_content, html or html_base64}` (WCXB): main text and page kind.
- `ground-truth.json` with `{address: {file, with: [...], without: [...]}}`: chunks of text that belong to the main text
  and chunks that do not (trafilatura's evaluation).
- `ground-truth.json` with `{id: {articleBody, url}}`, pages in `html/<id>.html.gz` (article-extraction-benchmark).
- `expected.json.gz` with `{name: HTML of the main text}`, pages in `<name>.html.gz` (Readability's test pages).
- any other folder: its `.html`, `.htm` and `.gz` files, labelled by trafilatura alone."""

import base64
import bisect
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import NamedTuple

import courlan
import numpy as np
import zstandard

from gristmill.data_pipeline.extraction.blocks_config import PAGE_KINDS
from gristmill.data_pipeline.extraction.html_extraction import decode_html
from gristmill.foundation.errors import InputError

FOLDS = 5
_ADDRESS = re.compile(
    rb"""(?:rel=["']?canonical["']?[^>]{0,300}href|["']og:url["'][^>]{0,300}content)=["']?(https?://[^"'>\s]+)"""
)
_TAG = re.compile(r"<[^<>]*>")


class LabelledPage(NamedTuple):
    """html: UTF-8. wanted, unwanted: chunks of text inside and outside of the main text. body: the whole main
    text. kind: one of PAGE_KINDS, if it is annotated."""

    name: str
    site: str
    html: bytes
    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    body: str | None = None
    kind: str | None = None


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
    except (
        OSError,
        EOFError,
        zlib.error,
        zstandard.ZstdError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise InputError(
            f"{folder}: its labels cannot be read ({type(error).__name__}: {error}); the layouts are described in "
            "docs/extraction.md"
        ) from error
    if not pages:
        raise InputError(f"{folder}: no pages; give a folder with ground-truth.json, expected.json.gz or .html files")
    return pages


def _pages(folder: Path) -> Iterator[LabelledPage]:
    if (folder / "pages.jsonl.zst").is_file():
        yield from _pages_of_kinds(folder / "pages.jsonl.zst")
    elif (folder / "ground-truth.json").is_file():
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


def _pages_of_kinds(path: Path) -> Iterator[LabelledPage]:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            page = json.loads(line)
            if page["page_type"] not in PAGE_KINDS:
                raise ValueError(f"page_type {page['page_type']!r} is none of {', '.join(PAGE_KINDS)}")
            raw = page["html"].encode("utf-8", "replace") if "html" in page else base64.b64decode(page["html_base64"])
            html = _decoded(raw)
            site = site_of(page["url"]) if page["url"] else _site_in(html) or page["id"]
            yield LabelledPage(page["id"], site, html, body=page["main_content"] or "", kind=page["page_type"])


def _utf8(path: Path) -> bytes:
    raw = path.read_bytes()
    return _decoded(gzip.decompress(raw) if path.suffix == ".gz" else raw)


def _decoded(html: bytes) -> bytes:
    return decode_html(html, None).text.encode("utf-8", "replace")


def _site_in(html: bytes) -> str | None:
    address = _ADDRESS.search(html)
    return site_of(address[1].decode("utf-8", "replace")) if address else None


def _plain(html: str) -> str:
    return unescape(_TAG.sub("\n", html))


# Labels and weights of a page's text blocks: gold chunks and bodies first, else what trafilatura extracts.

# Ideographs, kana and hangul syllables are words of their own.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+")
NGRAM = 4
GOLD_WEIGHT, BODY_WEIGHT, TEACHER_WEIGHT, SHORT_WEIGHT = 8.0, 2.0, 1.0, 0.3
# Of a page without an annotated kind. There are fewer of them, and their annotations follow other rules: without it the
# chunk F1 of trafilatura's pages falls (docs/extraction.md, Fitting).
UNTYPED_WEIGHT = 4.0
# A block counts by its share of the page's main text, as in F1 of words: a listing of 30 lines as much as an article.
MIN_SHARE_WEIGHT, MAX_SHARE, MEAN_SHARE, MIN_BODY_WORDS = 0.05, 0.25, 0.01125, 20
MIN_BODY_SHARE = 0.4  # of the page's words, which a shorter main text counts as: its page has more that can be wrong
MIN_COVERAGE = 0.4  # of the body's words in blocks of main text; the blocks of other pages weigh nothing
MAX_DISTANCE = 60  # words between a short text and its place in the body


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def block_labels(page: LabelledPage, texts: Sequence[str], teacher: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(labels bool[B], weights float32[B], shares float32[B]) of the blocks' texts. shares: share_weights, 1 where
    no body is annotated. teacher: what trafilatura extracts from the page."""
    factor = UNTYPED_WEIGHT if page.kind is None else 1.0
    if page.body is not None:
        labels, weights = labels_of_body(texts, page.body, factor * BODY_WEIGHT)
        if not is_covered(texts, labels, page.body):
            weights[:] = 0
        return labels, weights, share_weights(texts, page.body)
    labels, weights = labels_of_body(texts, teacher, TEACHER_WEIGHT)
    for chunk in page.unwanted:
        for k in blocks_of(chunk, texts):
            labels[k], weights[k] = False, GOLD_WEIGHT
    for chunk in page.wanted:
        chunk_blocks = blocks_of(chunk, texts)
        kept = [k for k in chunk_blocks if labels[k]] or chunk_blocks
        labels[kept], weights[kept] = True, GOLD_WEIGHT
    return labels, factor * weights, np.ones(len(texts), np.float32)


def is_covered(texts: Sequence[str], labels: np.ndarray, body: str) -> bool:
    """Whether the page has the text of its annotation: no choice of blocks is right on one that has not, such as a page
    whose annotation is empty or whose text scripts write."""
    covered = sum(len(words(text)) for text, label in zip(texts, labels, strict=True) if label)
    return covered >= max(MIN_COVERAGE * len(words(body)), 1)


def share_weights(texts: Sequence[str], body: str) -> np.ndarray:
    """float32[B]: the words of each block over those of the body, or over MIN_BODY_SHARE of the page's if those are
    more, in units of the mean over all annotated blocks."""
    sizes = np.array([len(words(text)) for text in texts], np.float32)
    total = max(len(words(body)), MIN_BODY_WORDS, MIN_BODY_SHARE * float(sizes.sum()))
    shares = np.minimum(sizes / total, MAX_SHARE)
    return (MIN_SHARE_WEIGHT + (1 - MIN_SHARE_WEIGHT) * shares / MEAN_SHARE).astype(np.float32)


def labels_of_body(texts: Sequence[str], body: str, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """A block is main text if at least half of its word 4-grams are in the body; one of fewer than four words, if its
    words are a line of the body (or, with little weight, anywhere in it). Of equal blocks as many as the body has."""
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
    return without_extra_copies(texts, of_body, labels), weights


def without_extra_copies(texts: Sequence[str], body: Sequence[str], labels: np.ndarray) -> np.ndarray:
    """The labels without copies of a text beyond those that the body has, such as the links of a menu that are headings
    of the main text too: those farthest from where the body has it, or without places the later ones; and without
    texts of fewer than four words farther than MAX_DISTANCE from it. body: its words.

    Places in the body are estimated from the longer texts that page and body have once, the longest run of them in
    order."""
    block_words = [tuple(words(text)) for text in texts]
    offsets = np.cumsum([0, *map(len, block_words)])
    copies: dict[tuple[str, ...], list[int]] = {}
    for k in np.flatnonzero(labels):
        copies.setdefault(block_words[k], []).append(int(k))
    joined = f" {' '.join(body)} "
    spaces = np.flatnonzero(np.array(list(joined)) == " ")
    places = {text: np.searchsorted(spaces, _occurrences(f" {' '.join(text)} ", joined)) for text in copies}
    is_once = {text: len(text) >= NGRAM and len(at) == len(copies[text]) == 1 for text, at in places.items()}
    once = [(int(offsets[copies[text][0]]), int(at[0])) for text, at in places.items() if is_once[text]]
    anchors = _longest_in_order(sorted(once))
    kept = labels.copy()
    for text, blocks in copies.items():
        if 0 < len(places[text]) < len(blocks):
            kept[blocks] = False
            estimates = _places_in_body(offsets[blocks], anchors) if anchors else np.arange(len(blocks))
            kept[_nearest(blocks, estimates, places[text] if anchors else np.arange(len(places[text])))] = True
        if anchors and len(text) < NGRAM and len(places[text]):
            kept[[k for k in blocks if _distance(offsets[k], anchors, places[text]) > MAX_DISTANCE]] = False
    return kept


def _occurrences(text: str, joined: str) -> list[int]:
    starts, at = [], joined.find(text)
    while at >= 0:
        starts.append(at)
        at = joined.find(text, at + 1)
    return starts


def _longest_in_order(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Longest run of pairs, sorted by their first values, whose second values rise. [(0, 5), (1, 1), (2, 3)] ->
    [(1, 1), (2, 3)]."""
    lasts: list[int] = []  # smallest last value of the runs of each length
    ends: list[int] = []
    before: list[int] = []
    for k, (_, value) in enumerate(pairs):
        length = bisect.bisect_left(lasts, value)
        lasts[length : length + 1] = [value]
        ends[length : length + 1] = [k]
        before.append(ends[length - 1] if length else -1)
    run, k = [], ends[-1] if ends else -1
    while k >= 0:
        run.append(pairs[k])
        k = before[k]
    return run[::-1]


def _places_in_body(offsets: np.ndarray, anchors: Sequence[tuple[int, int]]) -> np.ndarray:
    """Words of the body before each offset, in words of the page; as many before and behind the anchors as on the
    page."""
    of_page, of_body = np.array(anchors).T
    outside = np.minimum(offsets - of_page[0], 0) + np.maximum(offsets - of_page[-1], 0)
    return np.interp(offsets, of_page, of_body) + outside


def _distance(offset: int, anchors: Sequence[tuple[int, int]], places: np.ndarray) -> int:
    """Words between the nearest of the places and where one of the two anchors around the offset puts it."""
    at = bisect.bisect_left(anchors, (offset, 0))
    around = [of_body + offset - of_page for of_page, of_body in anchors[max(at - 1, 0) : at + 1]]
    return int(np.abs(np.subtract.outer(around, places)).min())


def _nearest(blocks: Sequence[int], estimates: np.ndarray, places: np.ndarray) -> list[int]:
    """Choose a block for each place, the pairs of the least distance first. estimates: places of the blocks."""
    distances = np.abs(estimates[:, None] - places[None, :])
    chosen: set[int] = set()
    taken: set[int] = set()
    for pair in np.argsort(distances, axis=None, kind="stable").tolist():
        row, column = divmod(pair, len(places))
        if row not in chosen and column not in taken:
            chosen.add(row)
            taken.add(column)
        if len(taken) == len(places):
            break
    return [blocks[row] for row in sorted(chosen)]


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
