"""Character encoding detection of HTML pages, as browsers do it.

Source: WHATWG, HTML, 13.2.3.2 (encoding sniffing, prescan) and Encoding, 4.2 (labels). If the page declares
nothing, browsers guess; here UTF-8 is tried before a guess."""

import re
from typing import NamedTuple

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

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
    """text: the page. was_repaired: invalid bytes became U+FFFD."""

    text: str
    was_repaired: bool


def decode_html(html: bytes, charset: str | None) -> Decoded:
    """Decode by the byte order mark, else the HTTP header (charset), else the meta element or XML declaration, else as
    UTF-8 if the page mostly is UTF-8, else by detection from the bytes. Unknown charsets are ignored.

    Mostly: at least as many well-formed non-ASCII sequences as invalid bytes. "caf\\xc3\\xa9 caf\\xe9" is UTF-8
    with one bad byte, "caf\\xe9" is windows-1252. Unlike in browsers, a declaration that does not fit the bytes is
    ignored if the page is valid UTF-8: pages that were saved again often keep the old declaration."""
    for mark, name in MARKS:
        if html.startswith(mark):
            return _decoded(html[len(mark) :], name)
    for codec in (codec_of(charset), declared_codec(html[:PRESCAN_BYTES])):
        if codec is not None:
            declared = _decoded(html, codec)
            return _decoded(html, "utf-8") if declared.was_repaired and _is_utf8(html) else declared
    found = _decoded(html, "utf-8")
    if not found.was_repaired or _mostly_utf8(html, found.text):
        return found
    return _decoded(html, codec_of(detect_encoding(html)) or WINDOWS_1252)


def utf8_html(html: bytes, charset: str | None) -> tuple[bytes, bool]:
    """(the page as decode_html reads it, in UTF-8; was_repaired). A page of valid UTF-8 is not copied."""
    if not html.startswith((MARKS[1][0], MARKS[2][0])):
        codec = codec_of(charset) or declared_codec(html[:PRESCAN_BYTES])
        if (codec in (None, "utf-8") and _is_utf8(html)) or (codec in ASCII_CODECS and html.isascii()):
            return html.removeprefix(MARKS[0][0]), False
    page = decode_html(html, charset)
    return page.text.encode("utf-8", "replace"), page.was_repaired


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
            return Decoded(html.decode(codec), False)
        except UnicodeDecodeError:
            return Decoded(html.decode("latin-1").translate(_TABLE_1252), False)
    try:
        return Decoded(html.decode(codec), False)
    except UnicodeDecodeError:
        return Decoded(html.decode(codec, "replace"), True)


def _is_utf8(html: bytes) -> bool:
    try:
        html.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _mostly_utf8(html: bytes, text: str) -> bool:
    replaced = text.count("\ufffd") - html.count(b"\xef\xbf\xbd")
    beyond_ascii = len(text) - len(text.encode("ascii", "ignore"))
    return beyond_ascii - replaced >= replaced
