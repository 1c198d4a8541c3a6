"""Text extraction from HTML pages. Limits depend on the page's size, not on time, so results are reproducible."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import DOMContext, HTMLTree, traverse_dom

from gristmill.data_pipeline.extraction.blocks import NotAPage, extract_blocks, kept_blocks
from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.html_encoding import REPLACED_BYTES, decode_html, utf8_html
from gristmill.data_pipeline.extraction.repeated_blocks import HostBlocks
from gristmill.data_pipeline.extraction.weights import load_weights
from gristmill.foundation.deferred_module import DeferredModule

trafilatura = DeferredModule("trafilatura")  # 0.25 s, for HTML alone

Extractor = Literal["blocks", "trafilatura", "trafilatura_precision", "resiliparse"]

# Chosen by cross-validation (`python benchmarks/extract.py --options`). deduplicate is no option here: trafilatura
# keeps its cache from page to page, so a page's text would depend on those read before it.
TRAFILATURA_OPTIONS: dict[Extractor, dict[str, Any]] = {
    "trafilatura": {"include_comments": False},
    "trafilatura_precision": {"include_comments": False, "favor_precision": True},
}

# Extraction takes minutes for larger pages (dumps, crawler traps), and a time limit would make the corpus depend on the
# machine.
MAX_HTML_BYTES = 10_000_000

# resiliparse visits all ancestors of every element, so its time is proportional to the sum of the elements' depths.
# 20,000 open <div> in a row sum up to 2e8 and take half a minute; a page of 100,000 elements at a depth of 40 to 4e6.
MAX_SUMMED_DEPTH = 20_000_000


class NotExtracted(Exception):
    """No text could be extracted from the page. kind: the reason it is counted under."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


SITE_BOILERPLATE = "site_boilerplate"  # the name under which pages are counted that lost boilerplate of their host

BLOCKS_DEFAULTS = BlocksConfig()


def extract(html: bytes, charset: str | None, extractor: Extractor, blocks: BlocksConfig = BLOCKS_DEFAULTS) -> str:
    """The page's main text. charset: from the HTTP header, if given.

    blocks is our own (docs/extraction.md), the most accurate and fastest. trafilatura_precision, FineWeb's setting,
    drops doubtful text and loses more of the text. resiliparse is some ten times as fast as trafilatura. Raises
    NotExtracted if the page is larger than MAX_HTML_BYTES or no text is found in it."""
    return extract_page(html, charset, extractor, blocks).text


class Extracted(NamedTuple):
    """repairs: names of the repairs made while decoding the page. metadata: what the options of blocks ask for."""

    text: str
    repairs: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = MappingProxyType({})


def extract_page(
    html: bytes,
    charset: str | None,
    extractor: Extractor,
    blocks: BlocksConfig,
    of_host: HostBlocks | None = None,
) -> Extracted:
    """As `extract`, with the repairs and the page's metadata. of_host: boilerplate that blocks leaves out."""
    _check_size(html)
    if extractor == "blocks":
        return _blocks(html, charset, blocks, of_host)
    page = decode_html(html, charset)
    text = _resiliparse(page.text) if extractor == "resiliparse" else _trafilatura(page.text, extractor)
    if not text.strip():
        raise NotExtracted("no_text", f"{extractor} finds no text in the page")
    return Extracted(text, (REPLACED_BYTES,) if page.was_repaired else ())


def _check_size(html: bytes) -> None:
    if len(html) > MAX_HTML_BYTES:
        raise NotExtracted("page_too_large", f"{len(html)} bytes of HTML; the limit is {MAX_HTML_BYTES}")


def _blocks(html: bytes, charset: str | None, config: BlocksConfig, of_host: HostBlocks | None) -> Extracted:
    page, was_repaired = utf8_html(html, charset)
    try:
        text, metadata, num_repeated = extract_blocks(page, load_weights(config.weights), config, of_host)
    except NotAPage as refused:
        raise NotExtracted(refused.kind, str(refused)) from None
    if not text.strip():
        if num_repeated:
            raise NotExtracted("only_boilerplate", "every block of the main text is boilerplate of the host")
        raise NotExtracted("no_text", "blocks finds no main text in the page")
    repairs = [REPLACED_BYTES] * was_repaired + [SITE_BOILERPLATE] * (num_repeated > 0)
    return Extracted(text, tuple(repairs), metadata)


def main_blocks(html: bytes, charset: str | None, config: BlocksConfig) -> list[bytes]:
    """The texts of the blocks that blocks keeps, in UTF-8. Raises NotExtracted."""
    _check_size(html)
    try:
        return kept_blocks(utf8_html(html, charset)[0], load_weights(config.weights), config)
    except NotAPage as refused:
        raise NotExtracted(refused.kind, str(refused)) from None


def _trafilatura(page: str, extractor: Extractor) -> str:
    try:
        return trafilatura.extract(page, **TRAFILATURA_OPTIONS[extractor]) or ""
    except Exception as error:  # it raises various errors on malformed trees
        raise NotExtracted("extractor_failed", f"trafilatura: {type(error).__name__}: {error}") from error


def _resiliparse(page: str) -> str:
    if page.count("<") ** 2 > 2 * MAX_SUMMED_DEPTH and (found := summed_depth(page)) > MAX_SUMMED_DEPTH:
        raise NotExtracted(
            "nested_too_deep",
            f"the elements' depths sum up to {found}; the limit is {MAX_SUMMED_DEPTH}",
        )
    return extract_plain_text(page, main_content=True, alt_texts=False, comments=False, preserve_formatting=True)


def summed_depth(page: str) -> int:
    """The sum of the depths of all nodes. In <html><head></head><body><p></p></body></html>, below the document node:
    1 + 2 + 2 + 3."""
    total = 0

    def enter(context: DOMContext) -> None:
        nonlocal total
        total += context.depth

    if (document := HTMLTree.parse(page).document) is not None:
        traverse_dom(document, enter)
    return total
