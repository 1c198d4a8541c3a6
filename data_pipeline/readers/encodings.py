"""Detection of UTF-16 and UTF-32 text, with or without a byte order mark, and its conversion to UTF-8."""

import codecs
import itertools
from collections.abc import Iterator

UTF8_MARK = codecs.BOM_UTF8
# UTF-32 first: its little-endian mark begins with UTF-16's.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
LOOKED_AT_BYTES = 4096
# Without a mark: at least this share of the characters is ASCII (spaces, digits, markup), so this share of the 16-bit
# units has a zero byte on one side; a zero byte on the other side is U+XX00, which is rare.
MIN_ZEROS, MAX_ZEROS = 0.4, 0.02

# Names of repairs, as they are counted.
BYTE_ORDER_MARK, WIDE_ENCODING = "byte_order_mark", "utf_16"


def wide_encoding(head: bytes) -> str | None:
    """utf-16-le, utf-16-be, utf-32-le or utf-32-be by the file's first bytes; None for all other encodings."""
    for mark, name in MARKS:
        if head.startswith(mark):
            return name
    pairs = len(head) // 2
    if not pairs or not head[: 2 * pairs].count(0):
        return None
    first, second = head[0 : 2 * pairs : 2].count(0) / pairs, head[1 : 2 * pairs : 2].count(0) / pairs
    if second >= MIN_ZEROS and first <= MAX_ZEROS:
        return "utf-16-le"
    return "utf-16-be" if first >= MIN_ZEROS and second <= MAX_ZEROS else None


def in_utf8(blocks: Iterator[bytes]) -> tuple[Iterator[bytes], bool]:
    """Return (the text as UTF-8, whether it was in a wide encoding). Other text is passed on unchanged.

    Damage in the first bytes is raised when the returned iterator reaches it."""
    head, rest = _head(blocks)
    encoding = wide_encoding(head[:LOOKED_AT_BYTES])
    stream = itertools.chain((head,) if head else (), rest)
    return (stream, False) if encoding is None else (_without_mark(transcoded(stream, encoding)), True)


def _without_mark(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Remove the byte order mark, which is U+FEFF after transcoding."""
    yield next(blocks, b"").removeprefix(UTF8_MARK)
    yield from blocks


def transcoded(blocks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Transcode to UTF-8; invalid sequences become U+FFFD."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for block in blocks:
        if text := decoder.decode(block):
            yield text.encode("utf-8")
    if text := decoder.decode(b"", final=True):
        yield text.encode("utf-8")


def _head(blocks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return (the first LOOKED_AT_BYTES or more, fewer for a shorter file; the remaining blocks)."""
    held = b""
    while len(held) < LOOKED_AT_BYTES:
        try:
            block = next(blocks, b"")
        except Exception as error:
            return held, _raising(error)
        if not block:
            break
        held += block
    return held, blocks


def _raising(error: Exception) -> Iterator[bytes]:
    raise error
    yield b""
