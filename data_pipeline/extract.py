"""From an HTML page to its text, the same on every machine: no clock decides, only the page's size."""

import re
from typing import Literal

import trafilatura
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

Extractor = Literal["trafilatura", "resiliparse"]

# A page beyond this is a dump or a trap: extraction takes minutes there, and a limit by the clock would make the
# corpus depend on the machine.
MOST_HTML_BYTES = 10_000_000

_META = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]+)""", re.IGNORECASE)
_META_BYTES = 4096  # HTML's own rule is 1,024; pages put scripts first
_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))


class NotExtracted(Exception):
    """No text came out of the page. kind: what counts are kept by."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


def extract(html: bytes, charset: str | None, extractor: Extractor) -> str:
    """The page's main text. charset: what the HTTP header says, if anything.

    trafilatura finds the text best, resiliparse some 15 times as fast. Raises NotExtracted if the page is larger
    than MOST_HTML_BYTES or no text is found in it."""
    if len(html) > MOST_HTML_BYTES:
        raise NotExtracted(
            "page_too_large", f"{len(html)} bytes of HTML, the most that is extracted is {MOST_HTML_BYTES}"
        )
    page = decode_html(html, charset)
    text = _resiliparse(page) if extractor == "resiliparse" else _trafilatura(page)
    if not text.strip():
        raise NotExtracted("no_text", f"{extractor} finds no text in the page")
    return text


def decode_html(html: bytes, charset: str | None) -> str:
    """The page as characters: by its byte order mark, else the HTTP header, else its meta element, else UTF-8 if it
    is that, else what its bytes look like. A charset nobody knows is passed over; bad bytes become U+FFFD."""
    for mark, name in _MARKS:
        if html.startswith(mark):
            return html[len(mark) :].decode(name, "replace")
    declared = _META.search(html[:_META_BYTES])
    for said in (charset, declared[1].decode("ascii") if declared else None):
        known = map_encoding_to_html5(said, fallback_utf8=False) if said else None
        if known:
            return bytes_to_str(html, known)
    try:
        return html.decode("utf-8")
    except UnicodeDecodeError:
        return bytes_to_str(html, detect_encoding(html) or "utf-8")


def _trafilatura(page: str) -> str:
    try:
        return trafilatura.extract(page, include_comments=False, favor_precision=True) or ""
    except (ValueError, TypeError, AttributeError, RecursionError) as error:  # what lxml's odd trees make it raise
        raise NotExtracted("extractor_failed", f"trafilatura: {type(error).__name__}: {error}") from error


def _resiliparse(page: str) -> str:
    return extract_plain_text(page, main_content=True, alt_texts=False, comments=False, preserve_formatting=True)
