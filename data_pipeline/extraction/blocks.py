"""The extractor `blocks`: the main text of a page from its classified text blocks."""

import re
import threading
from collections.abc import Iterator
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
    PARENT,
    START,
    TAG,
)
from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.metadata import page_metadata
from gristmill.data_pipeline.extraction.page import Page, PageBuffers, classify, read_page
from gristmill.data_pipeline.extraction.repeated_blocks import HostBlocks
from gristmill.data_pipeline.extraction.tags import CELL, ITEM, TAG_IDS, TAG_KINDS
from gristmill.data_pipeline.extraction.weights import Weights

MAX_TAGS = 1_000_000  # about 250 bytes of memory each; pages of 10 MB have up to 300,000
MAX_KEPT_TAGS = 100_000  # capacity that a thread keeps for its next page
MIN_COMMENT_BYTES, MAX_COMMENT_LINKS = 20, 0.33  # of a block of a comment section
ROW = TAG_IDS["tr"]
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
    """text: the page's main text, a line a block. metadata: what config asks for. num_repeated: blocks that were left
    out as boilerplate of the host."""

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
    metadata = page_metadata(html, page, kept, config.metadata) if config.metadata else {}
    return MainBlocks(_joined(page, kept, config), metadata, len(repeated))


def kept_blocks(html: bytes, weights: Weights, config: BlocksConfig) -> list[bytes]:
    """The texts of the blocks that `extract_blocks` keeps, in UTF-8, before boilerplate of the host is left out."""
    page, kept = _classified(html, weights, config)
    return _block_bytes(page, np.flatnonzero(kept))


def _classified(html: bytes, weights: Weights, config: BlocksConfig) -> tuple[Page, np.ndarray]:
    """(the page, its blocks to keep as bool[B])."""
    check_page(html)
    if _SPACE.space.tags > MAX_KEPT_TAGS:
        _SPACE.space = PageBuffers()
    page = read_page(html, weights.token_weights, _SPACE.space)
    return page, with_options(page, classify(page, weights.first, weights.second) >= config.threshold, config)


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
    """The text of the kept blocks that the options leave, a line each. kept: bool[B]."""
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
    flags = page.elements[page.blocks[:, ELEMENT], ELEMENT_FLAGS]
    return "".join(_lines(page, np.flatnonzero(kept), flags, config)).lstrip("\n")


def _lines(page: Page, chosen: np.ndarray, flags: np.ndarray, config: BlocksConfig) -> Iterator[str]:
    text, last_row, last_item = page.text.tobytes(), 0, 0
    rows = page.blocks[chosen][:, (ELEMENT, START, END)].tolist()
    for (element, start, end), flag in zip(rows, flags[chosen].tolist(), strict=True):
        line = text[start:end].decode("utf-8", "replace")
        if flag & IN_CODE:
            line = line.rstrip() if config.code else " ".join(line.split())
        elif not config.line_breaks:
            line = line.replace("\n", " ")
        before = "\n"
        if config.table_rows and flag & IN_TABLE:
            row = _row(page.elements, element)
            before = " | " if row and row == last_row else "\n"
            last_row = row
        if config.list_markers:
            item = element if TAG_KINDS[page.elements[element, TAG]] & ITEM else 0
            before += "- " if item and item != last_item else ""
            last_item = item or last_item
        yield before + line


def _row(elements: np.ndarray, element: int) -> int:
    """The row of the cell that directly holds the text; 0 if it is in no cell."""
    if not TAG_KINDS[elements[element, TAG]] & CELL:
        return 0
    parent = int(elements[element, PARENT])
    return parent if elements[parent, TAG] == ROW else 0
