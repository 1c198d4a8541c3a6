"""Detection of UTF-16 and UTF-32 text, with or without a byte order mark, and its conversion to UTF-8."""

import codecs
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

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
    head = b""
    while len(head) < LOOKED_AT_BYTES:
        try:
            block = next(blocks, b"")
        except Exception as error:
            return head, _raising(error)
        if not block:
            break
        head += block
    return head, blocks


def _raising(error: Exception) -> Iterator[bytes]:
    raise error
    yield b""


# Repair of common deviations from the JSON standard: byte order marks, NaN and Infinity, lone surrogates.

SURROGATES, CONSTANTS = "lone_surrogates", "json_constants"
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1


def repaired(line: bytes) -> tuple[Any, tuple[str, ...]]:
    """Return (the value, the names of the repairs that were needed).

    A leading byte order mark is dropped; NaN, Infinity and numbers outside the range of a float become null; a lone
    surrogate, escaped or encoded, becomes U+FFFD; a surrogate pair encoded as two characters becomes the one it stands
    for. Raises UnicodeDecodeError for other invalid UTF-8, ValueError if the repaired line is still not JSON."""
    repairs = []
    if line.startswith(UTF8_MARK):
        repairs.append(BYTE_ORDER_MARK)
        line = line[len(UTF8_MARK) :]
    constants = 0

    def null(_: str) -> None:
        nonlocal constants
        constants += 1

    def number(written: str) -> float | None:
        value = float(written)
        if math.isfinite(value):
            return value
        null(written)
        return None

    def integer(written: str) -> int | float | None:
        value = int(written) if len(written) < 21 else None
        return value if value is not None and MIN_INTEGER <= value <= MAX_INTEGER else number(written)

    try:
        value = json.loads(_decoded(line), parse_constant=null, parse_float=number, parse_int=integer)
        whole = _without_surrogates(value)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if constants:
        repairs.append(CONSTANTS)
    if whole is not value:
        repairs.append(SURROGATES)
    return whole, tuple(repairs)


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        try:
            return line.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise error from None


def _without_surrogates(value: Any) -> Any:
    """The value itself if its strings hold no surrogates, else a repaired copy."""
    if type(value) is str:
        return without_surrogates(value)
    if type(value) is dict:
        pairs = {_without_surrogates(key): _without_surrogates(member) for key, member in value.items()}
        same = all(a is b and value[a] is pairs[b] for a, b in zip(value, pairs, strict=False))
        return value if same and len(pairs) == len(value) else pairs
    if type(value) is list:
        items = [_without_surrogates(member) for member in value]
        return value if all(a is b for a, b in zip(value, items, strict=True)) else items
    return value


def without_surrogates(text: str) -> str:
    """The text itself if it holds no surrogates; else with pairs joined and U+FFFD for each lone one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
