"""The extractor `blocks`: the main text of a page from its classified text blocks, and the page's kind."""

import re
import threading
import zlib
from typing import Any, NamedTuple

import numpy as np
import orjson

from gristmill.data_pipeline.extraction.attributes import (
    ELEMENT,
    ELEMENT_FLAGS,
    END,
    IN_CODE,
    IN_TABLE,
    IS_COMMENT,
    LINK_BYTES,
    NUM_TOKENS,
    PARENT,
    START,
    TOKEN_BITS,
    count_byte,
)
from gristmill.data_pipeline.extraction.block_features import KIND_FEATURES, NUM_PAGE_FEATURES, page_features
from gristmill.data_pipeline.extraction.blocks_config import NUM_KINDS, PAGE_KINDS, BlocksConfig, HostBlocks
from gristmill.data_pipeline.extraction.bylines import post_authors
from gristmill.data_pipeline.extraction.embedded_text import MIN_CHARACTERS, embedded_text
from gristmill.data_pipeline.extraction.layout import LayoutOptions, PostAuthor, layout, layout_with_spans
from gristmill.data_pipeline.extraction.metadata import page_metadata
from gristmill.data_pipeline.extraction.page import (
    NO_TOKENS,
    Page,
    PageBuffers,
    classify,
    page_threshold,
    read_page,
    without_marks,
)
from gristmill.data_pipeline.extraction.page_stats import P_KINDS, REPEATS, WORDS
from gristmill.data_pipeline.extraction.weights import Trees, Weights, borrowed_trees, probability, sum_trees
from gristmill.data_pipeline.signals.intrinsics import FLOAT_LANES, bytes_within, trailing_zeros
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Kind of a page (article, listing, product, ...) from its layout: class and id tokens, hints in the markup, and what
# the page consists of. Names and order of the kinds: blocks_config.PAGE_KINDS.

MAX_HINT_BYTES = 100_000  # of the page that is searched for hints
# Of each sort of hint: what it begins with, how many places are looked at, and how it goes on there.
_HINTS = (
    (b"og:type", 40, re.compile(rb"""og:type["'][^>]{0,80}?content=["']?([\w.:]{2,40})""")),
    (b"generator", 40, re.compile(rb"""generator["']?[^>]{0,40}?content=["']([A-Za-z]{2,40})""")),
    (b'"@type"', 40, re.compile(rb'"@type"\s{0,3}:\s{0,3}\[?"(\w{2,40})"')),
    (b"schema.org/", 40, re.compile(rb"schema\.org/(\w{2,40})")),
    (b"canonical", 1, re.compile(rb"""canonical["'][^>]{0,200}?href=["']?https?://([^"'>\s?#]+)""")),
    (b"og:url", 1, re.compile(rb"""og:url["'][^>]{0,80}?content=["']?https?://([^"'>\s?#]+)""")),
)
_FIRST_ADDRESS = 4  # sorts from here on are the page's own address
MAX_PATH_WORDS = 40
_STARTS = np.zeros((len(_HINTS), 12), np.uint8)
for _sort, (_start, _, _) in enumerate(_HINTS):
    _STARTS[_sort, : len(_start)] = np.frombuffer(_start, np.uint8)
_FIRST_THREE = np.unique(_STARTS[:, :3], axis=0)  # bytes
_LENGTHS = np.array([len(start) for start, _, _ in _HINTS])
_LIMITS = np.array([limit for _, limit, _ in _HINTS])
_MAX_PLACES = sum(limit for _, limit, _ in _HINTS)
_WORD = re.compile(rb"[a-z]{2,30}")


def hint_tokens(html: bytes) -> list[int]:
    """Places in the table of tokens for the page's Open Graph and schema.org types, its generator, and the words of its
    own address."""
    end = min(len(html), MAX_HINT_BYTES)
    places = np.empty((_MAX_PLACES, 2), np.int64)
    num_places = _find_hints(np.frombuffer(html, np.uint8, end), places)
    hints: set[tuple[int, bytes]] = set()
    for sort, at in places[:num_places].tolist():
        match = _HINTS[sort][2].match(html, at, end)
        if match is None:
            continue
        if sort < _FIRST_ADDRESS:
            hints.add((sort, match[1].lower()))
        else:
            host, _, path = match[1].lower().partition(b"/")
            hints |= {(_FIRST_ADDRESS, word) for word in _WORD.findall(host)}
            hints |= {(_FIRST_ADDRESS + 1, word) for word in _WORD.findall(path)[:MAX_PATH_WORDS]}
            hints.add((_FIRST_ADDRESS + 2, b"%d" % min(path.strip(b"/").count(b"/") + (len(path) > 1), 6)))
    return [zlib.crc32(word, sort) >> (32 - TOKEN_BITS) for sort, word in sorted(hints)]


@cached_njit(nogil=True)
def _find_hints(head, places):
    """Fill places with (sort, position) of the first places of each sort of hint; returns their number."""
    size, num_places, at = len(head), 0, 0
    left = _LIMITS.copy()
    while at < size:
        mask = np.uint64(0xFFFFFFFFFFFFFFFF)
        if at + 66 <= size:
            mask = np.uint64(0)
            for row in range(len(_FIRST_THREE)):
                first, second, third = _FIRST_THREE[row]
                first_two = bytes_within(head, at, first, np.uint8(1)) & bytes_within(head, at + 1, second, np.uint8(1))
                mask |= first_two & bytes_within(head, at + 2, third, np.uint8(1))
        while mask != 0:
            place = at + np.int64(trailing_zeros(mask))
            mask &= mask - np.uint64(1)
            for sort in range(len(left)):
                if left[sort] > 0 and _stands_at(head, place, sort):
                    places[num_places, 0], places[num_places, 1] = sort, place
                    num_places += 1
                    left[sort] -= 1
        at += 64
    return num_places


@cached_njit(nogil=True)
def _stands_at(head, place, sort):
    length, k = _LENGTHS[sort], 0
    if place + length > len(head):
        return False
    while k < length and head[place + k] == _STARTS[sort, k]:
        k += 1
    return k == length


@cached_njit(nogil=True)
def kind_features(sums, page, seen, token_table, row):
    """Fill row (float32[len(KIND_FEATURES)]). seen: bool[TABLE_SIZE]; token_table: float32[TABLE_SIZE, NUM_KINDS]."""
    page_features(sums, page, row, 0)
    row[NUM_PAGE_FEATURES:] = 0
    eights = seen.view(np.uint64)  # few places of the table are seen
    for eight in range(len(eights)):
        if eights[eight] == 0:
            continue
        for token in range(8 * eight, 8 * eight + 8):
            if seen[token]:
                at = NUM_PAGE_FEATURES if token < NUM_TOKENS else NUM_PAGE_FEATURES + NUM_KINDS + 1
                row[at + NUM_KINDS] += 1
                for kind in range(NUM_KINDS):
                    row[at + kind] += token_table[token, kind]


@cached_njit(nogil=True)
def predict_kinds(row, trees, page):
    """Write the probabilities of the kinds into page, from P_KINDS on. trees: equally many for each kind."""
    total, num_trees = 0.0, (len(trees.starts) - 1) // NUM_KINDS
    panel = np.zeros((len(trees.columns), FLOAT_LANES), np.float32)
    panel[:, 0] = row[trees.columns]
    sums, totals = np.empty(FLOAT_LANES, np.float32), np.empty(FLOAT_LANES)
    for kind in range(NUM_KINDS):
        sum_trees(trees, panel, kind * num_trees, (kind + 1) * num_trees, sums, totals)
        page[P_KINDS + kind] = probability(totals[0])
        total += page[P_KINDS + kind]
    for kind in range(NUM_KINDS):
        page[P_KINDS + kind] /= total


def set_kinds(page: Page, html: bytes, kind_tokens: np.ndarray, trees: Trees) -> None:
    """Predict the page's kind: the probabilities are in its totals then, for the features of its blocks."""
    row = np.zeros(len(KIND_FEATURES), np.float32)
    page.seen[hint_tokens(html)] = True
    _set_kinds(page.sums, page.totals, page.seen, kind_tokens, trees, row)


@cached_njit(nogil=True)
def _set_kinds(sums, page, seen, kind_tokens, trees, row):
    kind_features(sums, page, seen, kind_tokens, row)
    predict_kinds(row, borrowed_trees(trees), page)


def page_kind(page: Page) -> tuple[str, float]:
    """(the most probable kind, its probability) of a page whose kinds are set."""
    probabilities = page.totals[P_KINDS:]
    best = int(np.argmax(probabilities))
    return PAGE_KINDS[best], float(probabilities[best])


KIND_DIGITS = 3
MAX_TAGS = 1_000_000  # about 250 bytes of memory each; pages of 10 MB have up to 300,000
MAX_KEPT_TAGS = 100_000  # capacity that a thread keeps for its next page
MIN_REPEATED_WORDS, MAX_REPEATS = 4, 3  # of a block that is left out as a copy of one before it
MIN_COMMENT_BYTES, MAX_COMMENT_LINKS = 20, 0.33  # of a block of a comment section
_FIRST_TAG = re.compile(rb"\s*+(?>(?>\xef\xbb\xbf|<!--.*?-->|<[?!][^>]*>)\s*+)*+<([A-Za-z:]+)", re.DOTALL)
_MARKED_POSTS = re.compile(  # types of schema.org, and signs of Flarum, phpBB, XenForo, Discourse and bbPress
    rb"DiscussionForumPosting|QAPage|schema\.org/Comment\b|\bid=\"(?:flarum-|(?:phpbb|XF|XenForo)\")"
    rb"|\bcontent=\"Discourse |\btopic-template-default\b"
)
FEEDS = {b"rss", b"feed", b"rdf:rdf", b"urlset", b"sitemapindex", b"opml", b"error", b"response"}


class _Space(threading.local):
    def __init__(self) -> None:
        self.space = PageBuffers()


_SPACE = _Space()  # one a thread


class NotAPage(Exception):
    """The bytes are no HTML page, or one over a limit. kind: the reason it is counted under."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class MainBlocks(NamedTuple):
    """text: the page's main text. metadata: the page's kind, and what config asks for; `spans` as lists of
    layout.PageSpan; `text_source` if the text is of the page's data. num_repeated: blocks that were left out as
    boilerplate of the host."""

    text: str
    metadata: dict[str, Any]
    num_repeated: int


def extract_blocks(html: bytes, weights: Weights, config: BlocksConfig, of_host: HostBlocks | None) -> MainBlocks:
    """html: UTF-8. of_host: the boilerplate of the page's host, which is left out. Raises NotAPage."""
    page, kept = _classified(html, weights, config)
    repeated = np.zeros(0, np.int64)
    if of_host is not None:
        chosen = np.flatnonzero(kept)
        repeated = chosen[of_host.mask(_block_bytes(page, chosen))]
        kept[repeated] = False
    kind, confidence = page_kind(page)
    metadata = {"page_kind": kind, "page_kind_score": round(confidence, KIND_DIGITS)}
    if config.metadata:
        metadata |= page_metadata(html, page, kept, config.metadata)
    options, has_spans = _layout_options(config), "spans" in config.metadata
    authors: list[PostAuthor] = []
    if config.post_authors and (kind == "forum" or _MARKED_POSTS.search(html)):
        authors, kept = post_authors(html, page.elements, page.blocks, kept)
    if has_spans:
        text, spans = layout_with_spans(page, kept, options, authors)
    else:
        text, spans = layout(page, kept, options, authors), []
    if config.embedded_text and len(text) < MIN_CHARACTERS and (embedded := embedded_text(html, options)):
        text, spans = embedded
        metadata["text_source"] = "page_data"
    return MainBlocks(text, metadata | ({"spans": [list(span) for span in spans]} if has_spans else {}), len(repeated))


def kept_blocks(html: bytes, weights: Weights, config: BlocksConfig) -> list[bytes]:
    """The texts of the blocks that `extract_blocks` keeps, in UTF-8, before boilerplate of the host is left out."""
    page, kept = _classified(html, weights, config)
    return _block_bytes(page, np.flatnonzero(kept))


def _classified(html: bytes, weights: Weights, config: BlocksConfig) -> tuple[Page, np.ndarray]:
    """(the page, its blocks to keep as bool[B])."""
    num_tags = check_page(html)
    if _SPACE.space.tags > MAX_KEPT_TAGS:
        _SPACE.space = PageBuffers()
    page, kept = classified(html, weights, config.threshold, _SPACE.space, num_tags)
    return page, with_options(page, kept, config)


def classified(
    html: bytes,
    weights: Weights,
    threshold: float | None,
    space: PageBuffers | None = None,
    num_tags: int | None = None,
) -> tuple[Page, np.ndarray]:
    """(the page with its kinds, its blocks of main text as bool[B]). threshold: None for the page's own."""
    page = read_page(html, weights.token_weights, space, num_tags=num_tags)
    set_kinds(page, html, weights.kind_tokens, weights.kinds)
    probabilities = classify(page, weights.first, weights.second, weights.network)
    kept = probabilities >= (page_threshold(page, probabilities) if threshold is None else threshold)
    kept, page = without_copies(page, kept), without_marks(page)
    return page, kept & (page.blocks[:, START] < page.blocks[:, END])


def without_copies(page: Page, kept: np.ndarray) -> np.ndarray:
    """The kept blocks without those that repeat a kept one before them below another element, as on pages that have a
    layout for phones too. Tables and code repeat lines on purpose, and so does a text with more than MAX_REPEATS.
    kept: bool[B]."""
    repeated = np.empty(len(kept), np.int32)
    num_repeated = _find_repeated(page.elements, page.blocks, page.counts, kept, repeated)
    if not num_repeated:
        return kept
    chosen = repeated[:num_repeated]
    parents: dict[bytes, set[int]] = {}
    of_chosen = page.elements[page.blocks[chosen, ELEMENT], PARENT].tolist()
    for k, text, parent in zip(chosen.tolist(), _block_bytes(page, chosen), of_chosen, strict=True):
        before = parents.setdefault(text, set())
        kept[k] = not before or parent in before
        before.add(parent)
    return kept


@cached_njit(nogil=True)
def _find_repeated(elements, blocks, counts, kept, repeated):
    """Fill repeated with the numbers of the kept blocks that may be copies; returns how many they are."""
    num_repeated = 0
    for k in range(len(blocks)):
        is_repeated = kept[k] and 1 < counts[k, REPEATS] <= MAX_REPEATS and counts[k, WORDS] >= MIN_REPEATED_WORDS
        if is_repeated and elements[blocks[k, ELEMENT], ELEMENT_FLAGS] & (IN_TABLE | IN_CODE) == 0:
            repeated[num_repeated] = k
            num_repeated += 1
    return num_repeated


def _block_bytes(page: Page, chosen: np.ndarray) -> list[bytes]:
    text = page.text.tobytes()
    return [text[start:end] for start, end in page.blocks[chosen][:, (START, END)].tolist()]


def check_page(html: bytes) -> int:
    """The number of tags. Raises NotAPage for JSON, an XML feed, and more than MAX_TAGS tags."""
    tags = count_byte(np.frombuffer(html, np.uint8), 60)
    if tags > MAX_TAGS:
        raise NotAPage("page_too_large", f"{tags} tags; the limit is {MAX_TAGS}")
    first_tag = _FIRST_TAG.match(html[:4096])
    if first_tag and first_tag[1].lower() in FEEDS:
        raise NotAPage("not_html", f"an XML document <{first_tag[1].decode()}>, not a page")
    if html[:64].lstrip()[:1] in (b"{", b"["):
        try:
            orjson.loads(html)
        except orjson.JSONDecodeError:
            return tags
        raise NotAPage("not_html", "JSON, not a page")
    return tags


def with_options(page: Page, kept: np.ndarray, config: BlocksConfig) -> np.ndarray:
    """The kept blocks with comments and without tables, as the options say. kept: bool[B]."""
    if config.tables and not config.comments:
        return kept
    elements, blocks = page.elements, page.blocks
    flags = elements[blocks[:, ELEMENT], ELEMENT_FLAGS]
    if config.comments:
        size = blocks[:, END] - blocks[:, START]
        prose = (size >= MIN_COMMENT_BYTES) & (blocks[:, LINK_BYTES] < MAX_COMMENT_LINKS * size)
        kept = kept | ((flags & IS_COMMENT) != 0) & prose
    if not config.tables:
        kept = kept & ((flags & IN_TABLE) == 0)
    return kept


def _layout_options(config: BlocksConfig) -> LayoutOptions:
    return LayoutOptions(config.format, config.table_rows, config.list_markers, config.code, config.line_breaks)


def whole_text(html: bytes, config: BlocksConfig) -> str:
    """All text of an HTML fragment, such as a chapter or a post, laid out as config says. Raises NotAPage."""
    html = html.decode("utf-8", "replace").encode()
    tags = count_byte(np.frombuffer(html, np.uint8), 60)
    if tags > MAX_TAGS:
        raise NotAPage("page_too_large", f"{tags} tags; the limit is {MAX_TAGS}")
    page = without_marks(read_page(html, NO_TOKENS))
    return layout(page, page.blocks[:, START] < page.blocks[:, END], _layout_options(config))
