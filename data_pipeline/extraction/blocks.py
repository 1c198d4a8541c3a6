"""The extractor `blocks`: the main text of a page from its classified text blocks."""

import re
import threading
from typing import Any, NamedTuple

import numpy as np
import orjson

from gristmill.data_pipeline.extraction.attributes import (
    ELEMENT,
    ELEMENT_FLAGS,
    END,
    IN_TABLE,
    IS_COMMENT,
    LINK_BYTES,
    START,
)
from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.layout import LayoutOptions, layout, layout_with_spans
from gristmill.data_pipeline.extraction.metadata import page_metadata
from gristmill.data_pipeline.extraction.page import NO_TOKENS, Page, PageBuffers, classify, page_threshold, read_page
from gristmill.data_pipeline.extraction.page_kinds import page_kind, set_kinds
from gristmill.data_pipeline.extraction.repeated_blocks import HostBlocks
from gristmill.data_pipeline.extraction.weights import Weights

KIND_DIGITS = 3
MAX_TAGS = 1_000_000  # about 250 bytes of memory each; pages of 10 MB have up to 300,000
MAX_KEPT_TAGS = 100_000  # capacity that a thread keeps for its next page
MIN_COMMENT_BYTES, MAX_COMMENT_LINKS = 20, 0.33  # of a block of a comment section
_FIRST_TAG = re.compile(rb"\s*+(?>(?>\xef\xbb\xbf|<!--.*?-->|<[?!][^>]*>)\s*+)*+<([A-Za-z:]+)", re.DOTALL)
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
    layout.PageSpan. num_repeated: blocks that were left out as boilerplate of the host."""

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
    if "spans" not in config.metadata:
        return MainBlocks(_joined(page, kept, config), metadata, len(repeated))
    text, spans = layout_with_spans(page.elements, page.blocks, page.text.tobytes(), kept, _layout_options(config))
    return MainBlocks(text, metadata | {"spans": [list(span) for span in spans]}, len(repeated))


def kept_blocks(html: bytes, weights: Weights, config: BlocksConfig) -> list[bytes]:
    """The texts of the blocks that `extract_blocks` keeps, in UTF-8, before boilerplate of the host is left out."""
    page, kept = _classified(html, weights, config)
    return _block_bytes(page, np.flatnonzero(kept))


def _classified(html: bytes, weights: Weights, config: BlocksConfig) -> tuple[Page, np.ndarray]:
    """(the page, its blocks to keep as bool[B])."""
    check_page(html)
    if _SPACE.space.tags > MAX_KEPT_TAGS:
        _SPACE.space = PageBuffers()
    page, kept = classified(html, weights, config.threshold, _SPACE.space)
    return page, with_options(page, kept, config)


def classified(
    html: bytes, weights: Weights, threshold: float | None, space: PageBuffers | None = None
) -> tuple[Page, np.ndarray]:
    """(the page with its kinds, its blocks of main text as bool[B]). threshold: None for the page's own."""
    page = read_page(html, weights.token_weights, space)
    set_kinds(page, html, weights.kind_tokens, weights.kinds)
    probabilities = classify(page, weights.first, weights.second)
    return page, probabilities >= (page_threshold(page, probabilities) if threshold is None else threshold)


def _block_bytes(page: Page, chosen: np.ndarray) -> list[bytes]:
    text = page.text.tobytes()
    return [text[start:end] for start, end in page.blocks[chosen][:, (START, END)].tolist()]


def check_page(html: bytes) -> None:
    """Raises NotAPage for JSON, an XML feed, and more than MAX_TAGS tags."""
    tags = html.count(b"<")
    if tags > MAX_TAGS:
        raise NotAPage("page_too_large", f"{tags} tags; the limit is {MAX_TAGS}")
    first_tag = _FIRST_TAG.match(html[:4096])
    if first_tag and first_tag[1].lower() in FEEDS:
        raise NotAPage("not_html", f"an XML document <{first_tag[1].decode()}>, not a page")
    if html[:64].lstrip()[:1] in (b"{", b"["):
        try:
            orjson.loads(html)
        except orjson.JSONDecodeError:
            return
        raise NotAPage("not_html", "JSON, not a page")


def main_text(page: Page, kept: np.ndarray, config: BlocksConfig) -> str:
    """The text of the kept blocks that the options leave. kept: bool[B]."""
    return _joined(page, with_options(page, kept, config), config)


def with_options(page: Page, kept: np.ndarray, config: BlocksConfig) -> np.ndarray:
    """The kept blocks with comments and without tables, as the options say. kept: bool[B]."""
    elements, blocks = page.elements, page.blocks
    flags = elements[blocks[:, ELEMENT], ELEMENT_FLAGS]
    if config.comments:
        size = blocks[:, END] - blocks[:, START]
        prose = (size >= MIN_COMMENT_BYTES) & (blocks[:, LINK_BYTES] < MAX_COMMENT_LINKS * size)
        kept = kept | ((flags & IS_COMMENT) != 0) & prose
    if not config.tables:
        kept = kept & ((flags & IN_TABLE) == 0)
    return kept


def _joined(page: Page, kept: np.ndarray, config: BlocksConfig) -> str:
    return layout(page.elements, page.blocks, page.text.tobytes(), kept, _layout_options(config))


def _layout_options(config: BlocksConfig) -> LayoutOptions:
    return LayoutOptions(config.format, config.table_rows, config.list_markers, config.code, config.line_breaks)


def whole_text(html: bytes, config: BlocksConfig) -> str:
    """All text of an HTML fragment, such as a chapter or a post, laid out as config says. Raises NotAPage."""
    html = html.decode("utf-8", "replace").encode()
    tags = html.count(b"<")
    if tags > MAX_TAGS:
        raise NotAPage("page_too_large", f"{tags} tags; the limit is {MAX_TAGS}")
    page = read_page(html, NO_TOKENS)
    return _joined(page, np.ones(len(page.blocks), np.bool_), config)
