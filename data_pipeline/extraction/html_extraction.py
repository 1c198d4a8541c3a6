"""Text extraction from HTML pages. Limits depend on the page's size, not on time, so results are reproducible."""

import codecs
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5
from resiliparse.parse.html import DOMContext, HTMLTree, traverse_dom

from gristmill.data_pipeline.extraction.blocks import NotAPage, extract_blocks, kept_blocks
from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig, HostBlocks
from gristmill.data_pipeline.extraction.weights import load_weights
from gristmill.data_pipeline.signals.bits import is_utf8
from gristmill.data_pipeline.signals.intrinsics import LANES
from gristmill.foundation.startup import DeferredModule

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
    if "spans" in metadata:
        metadata["spans"] = _spans_of_bytes(html, charset, page, metadata["spans"])
    repairs = [REPLACED_BYTES] * was_repaired + [SITE_BOILERPLATE] * (num_repeated > 0)
    return Extracted(text, tuple(repairs), metadata)


def _spans_of_bytes(html: bytes, charset: str | None, page: bytes, spans: list[list[int]]) -> list[list[int]]:
    """The spans with positions in html instead of in page, which is html in UTF-8."""
    if page is html or not spans:
        return spans
    positions = raw_positions(html, charset, [position for span in spans for position in span[2:]])
    return [[*span[:2], *positions[2 * k : 2 * k + 2]] for k, span in enumerate(spans)]


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
    if page.count("<") ** 2 > 2 * MAX_SUMMED_DEPTH and (summed := summed_depth(page)) > MAX_SUMMED_DEPTH:
        raise NotExtracted(
            "nested_too_deep",
            f"the elements' depths sum up to {summed}; the limit is {MAX_SUMMED_DEPTH}",
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


# Character encoding detection of HTML pages, as browsers do it.
#
# Source: WHATWG, HTML, 13.2.3.2 (encoding sniffing, prescan) and Encoding, 4.2 (labels). If the page declares
# nothing, browsers guess; here UTF-8 is tried before a guess.

MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
PRESCAN_BYTES = 4096  # HTML's own rule is 1,024; pages put scripts first
WINDOWS_1252 = "cp1252"
# resiliparse gives WHATWG's label table as names of Python's codecs; of these, Python's codec of that name knows fewer
# characters than the encoding that the standard names.
CODECS = {
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
    "iso8859-11": "cp874",
    "iso8859-8-i": "iso8859-8",
}
# What the detector takes text in windows-1252 for.
_RARE_LATIN = frozenset(f"iso8859-{number}" for number in (1, 3, 4, 10, 13, 14, 15, 16))
_BALTIC_ALPHABETS = [(letters + letters.upper()).encode("cp1257") for letters in ("ąčęėįšųūž", "āčēģīķļņšūž")]
_BALTIC_SHARE, _BALTIC_LETTERS = 0.95, 5  # of the letters beyond ASCII; Italian's are nearly all one of them
OTHER_LABELS = {"x-mac-cyrillic": "mac-cyrillic", "x-mac-ukrainian": "mac-cyrillic", "x-user-defined": WINDOWS_1252}
# The bytes that windows-1252 gives no character are C1 controls there (Encoding, index windows-1252).
_CONTROLS_OF_1252 = {byte: chr(byte) for byte in (0x81, 0x8D, 0x8F, 0x90, 0x9D)}
_TABLE_1252 = {byte: _CONTROLS_OF_1252.get(byte) or bytes([byte]).decode(WINDOWS_1252) for byte in range(0x80, 0xA0)}

_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
_META = re.compile(rb"<meta[\s/]([^>]*)", re.IGNORECASE)
_ATTRIBUTE = re.compile(rb"""([^\s/>"'=]+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"']+)))?""")
_CHARSET = re.compile(rb"""charset\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s;"']+))""", re.IGNORECASE)
_XML = re.compile(rb"""<\?xml\s[^>]*?encoding\s*=\s*["']([A-Za-z0-9._-]+)["']""")

# Codecs whose bytes below 128 are ASCII, always (in iso-2022-jp and hz they are not).
ASCII_CODECS = frozenset(
    {"cp874", "koi8-r", "koi8-u", "mac-cyrillic", "cp949", "cp866", "euc_jp", "gb18030"}
    | {f"cp{number}" for number in range(1250, 1259)}
    | {f"iso8859-{number}" for number in range(1, 17)}
)

REPLACED_BYTES = "replaced_bytes"  # the name the repair is counted under


class Decoded(NamedTuple):
    """text: the page. was_repaired: invalid bytes became U+FFFD. codec: Python's name of the encoding. mark_bytes: of
    the byte order mark before the text."""

    text: str
    was_repaired: bool
    codec: str
    mark_bytes: int = 0


def decode_html(html: bytes, charset: str | None) -> Decoded:
    """Decode by the byte order mark, else the HTTP header (charset), else the meta element or XML declaration, else as
    UTF-8 if the page mostly is UTF-8, else by detection from the bytes. Unknown charsets are ignored.

    Mostly: at least as many well-formed non-ASCII sequences as invalid bytes. "caf\\xc3\\xa9 caf\\xe9" is UTF-8
    with one bad byte, "caf\\xe9" is windows-1252. Unlike in browsers, a declaration that does not fit the bytes is
    ignored if the page is valid UTF-8: pages that were saved again often keep the old declaration."""
    for mark, name in MARKS:
        if html.startswith(mark):
            return _decoded(html[len(mark) :], name)._replace(mark_bytes=len(mark))
    for codec in (codec_of(charset), declared_codec(html[:PRESCAN_BYTES])):
        if codec is not None:
            declared = _decoded(html, codec)
            return _decoded(html, "utf-8") if declared.was_repaired and _is_utf8(html) else declared
    decoded = _decoded(html, "utf-8")
    if not decoded.was_repaired or _mostly_utf8(html, decoded.text):
        return decoded
    return _decoded(html, guessed_charset(html))


def guessed_charset(content: bytes) -> str:
    """The codec of text that declares none and is not UTF-8, by resiliparse's detector (uchardet). It takes text in
    windows-1252 for encodings that hardly any page has (ISO 8859-13, DOS); those are windows-1252, or windows-1257
    where next to all letters are Lithuanian or Latvian."""
    guess = detect_encoding(content, html5_compatible=False)
    codec = "cp949" if guess == "cp949" else codec_of(guess)  # WHATWG's labels are without this name
    if codec is None or codec == "utf-8" or codec in _RARE_LATIN or codec == WINDOWS_1252:
        return "cp1257" if codec in _RARE_LATIN and _is_baltic(content) else WINDOWS_1252
    return codec


def _is_baltic(content: bytes) -> bool:
    letters = content.translate(None, bytes(range(0xC0)))  # windows-1257 has all letters of both languages there
    others = min(len(letters.translate(None, alphabet)) for alphabet in _BALTIC_ALPHABETS)
    return len(set(letters)) >= _BALTIC_LETTERS and others <= (1 - _BALTIC_SHARE) * len(letters)


def utf8_html(html: bytes, charset: str | None) -> tuple[bytes, bool]:
    """(the page as decode_html reads it, in UTF-8; was_repaired). A page of valid UTF-8 is not copied."""
    if not html.startswith((MARKS[1][0], MARKS[2][0])):
        codec = codec_of(charset) or declared_codec(html[:PRESCAN_BYTES])
        if (codec in (None, "utf-8") and _is_utf8(html)) or (codec in ASCII_CODECS and html.isascii()):
            return html.removeprefix(MARKS[0][0]), False
    page = decode_html(html, charset)
    return page.text.encode("utf-8", "replace"), page.was_repaired


def raw_positions(html: bytes, charset: str | None, positions: Sequence[int]) -> list[int]:
    """The byte positions in html of byte positions in what `utf8_html` makes of it. They are exact but next to invalid
    bytes, where one replaced character stands for several."""
    page = decode_html(html, charset)
    utf8 = np.frombuffer(page.text.encode("utf-8", "replace"), np.uint8)
    characters = np.searchsorted(np.flatnonzero((utf8 & 0xC0) != 0x80), positions)
    starts = _character_starts(html[page.mark_bytes :], page.codec, len(page.text))
    return [page.mark_bytes + starts[character] for character in characters.tolist()]


def _character_starts(html: bytes, codec: str, num_characters: int) -> Sequence[int]:
    """The byte at which each character starts, and the end. Decoders of Python do not tell it: byte by byte they do."""
    if len(html) == num_characters:
        return range(num_characters + 1)
    decoder, starts, start = codecs.getincrementaldecoder(codec)("replace"), [], 0
    for at in range(len(html)):
        produced = len(decoder.decode(html[at : at + 1], at == len(html) - 1))
        if produced:
            starts += [start] * max(produced - 1, 1)
            starts += [at] * (produced > 1)
            start = at + 1
    return [*starts, len(html)]


def codec_of(label: str | None) -> str | None:
    """The Python codec of a WHATWG label: " Latin1 " -> cp1252, x-sjis -> cp932; None for an unknown label."""
    label = (label or "").strip().lower()
    known = OTHER_LABELS.get(label) or (map_encoding_to_html5(label, fallback_utf8=False) if label else None)
    return None if known is None else CODECS.get(known, known)


def declared_codec(head: bytes) -> str | None:
    """The codec of the first meta element with a known charset, else of the XML declaration. A declared UTF-16 cannot
    be right if a meta element was found in ASCII, and means UTF-8 (HTML, prescan)."""
    for meta in _META.finditer(_COMMENT.sub(b"", head)):
        attributes: dict[bytes, bytes] = {}
        for name, *values in _ATTRIBUTE.findall(meta[1]):
            attributes.setdefault(name.lower(), next(filter(None, values), b""))
        label = attributes.get(b"charset")
        if label is None and attributes.get(b"http-equiv", b"").lower() == b"content-type":
            named = _CHARSET.search(attributes.get(b"content", b""))
            label = next(filter(None, named.groups()), None) if named else None
        codec = codec_of(label.decode("latin-1")) if label else None
        if codec is not None:
            return "utf-8" if codec.startswith("utf-16") else codec
    said = _XML.match(head)
    codec = codec_of(said[1].decode("ascii")) if said else None
    return "utf-8" if codec is not None and codec.startswith("utf-16") else codec


def _decoded(html: bytes, codec: str) -> Decoded:
    if codec == WINDOWS_1252:
        try:
            return Decoded(html.decode(codec), False, codec)
        except UnicodeDecodeError:
            return Decoded(html.decode("latin-1").translate(_TABLE_1252), False, codec)
    try:
        return Decoded(html.decode(codec), False, codec)
    except UnicodeDecodeError:
        return Decoded(html.decode(codec, "replace"), True, codec)


def _is_utf8(html: bytes) -> bool:
    """Whether the page is valid UTF-8, without making a text of it: the kernel looks up to 64 bytes ahead, so the last
    characters are decoded."""
    if html.isascii():
        return True
    cut = max(len(html) - 2 * LANES, 0)
    for _ in range(3):  # to the start of a character
        cut -= cut > 0 and html[cut] & 0xC0 == 0x80
    try:
        html[cut:].decode("utf-8")
    except UnicodeDecodeError:
        return False
    return is_utf8(np.frombuffer(html, np.uint8), 0, cut)


def _mostly_utf8(html: bytes, text: str) -> bool:
    replaced = text.count("\ufffd") - html.count(b"\xef\xbf\xbd")
    beyond_ascii = len(text) - len(text.encode("ascii", "ignore"))
    return beyond_ascii - replaced >= replaced
