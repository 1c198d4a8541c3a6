"""Bytes of raw files as streams, in bounded memory: decompression, which reads damaged files up to the damage, and
conversion of UTF-16 and UTF-32 to UTF-8."""

import bz2
import codecs
import itertools
import json
import lzma
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import zstandard
from zlib_ng import zlib_ng  # zlib's interface and bytes; decompresses twice as fast

# Small enough that a decompressed block stays in the CPU cache until its lines are parsed: 1 << 20 took a third longer
# for JSON lines in zstd.
BLOCK_BYTES = 1 << 17
LZ4_BLOCK_BYTES = 1 << 16
# zstandard's decompressobj has no limit on its output; of 512 bytes of input it makes at most 16 MiB (a block of
# 128 KiB takes at least 4 bytes, RFC 8878, 3.1.1.2). Slices of 256 bytes to 64 KiB decompress equally fast.
ZSTD_SLICE_BYTES = 512
# The most decompressed bytes that one call of the other decompressors returns.
PLAIN_BYTES = 1 << 20
# What an xz decoder may allocate: `xz -9` needs 65 MiB, and a damaged header may ask for 4 GiB.
XZ_MEMORY_BYTES = 256 << 20
LINE_END_BYTES = 2  # of "\r\n", which is not part of a record
SUFFIXES = ("gz", "zst", "bz2", "xz", "lz4")
COMPRESSION_RATIO = 4  # of text in zstd or gzip, about
FRAME_HEADER_BYTES = 18  # of zstd, at most (RFC 8878, 3.1.1.1)


class Damaged(Exception):
    """The stream ends too early (kind `truncated`) or cannot be decompressed (`damaged`). Raised after all readable
    bytes were yielded."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class TooLong:
    """A line over the size limit, whose content was dropped. num_bytes: with its line end."""

    num_bytes: int


def content_bytes(head: bytes, name: str, compressed_bytes: int) -> int:
    """About how many bytes a compressed file holds: what its zstd frame says, if it says so, else COMPRESSION_RATIO
    times its own. head: the first FRAME_HEADER_BYTES."""
    num_bytes = -1
    if name.endswith(".zst"):
        with suppress(zstandard.ZstdError):
            num_bytes = zstandard.frame_content_size(head)
    return num_bytes if num_bytes > compressed_bytes else COMPRESSION_RATIO * compressed_bytes


def blocks(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Decompress a file into blocks of at most 16 MiB, whatever the compression ratio. The name's suffix (.gz .zst .bz2
    .xz .lz4) selects the format.

    Concatenated compressed streams are read to the last one. Raises Damaged after the last readable byte."""
    suffix = name.rpartition(".")[2]
    if suffix == "lz4":
        yield from _lz4(file)
    elif suffix in SUFFIXES:
        yield from _joined(_decompressed(file, suffix))
    else:
        while block := file.read(BLOCK_BYTES):
            yield block


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Merge pieces to at least BLOCK_BYTES, so that many small streams do not become as many small blocks. Bytes
    that were read before the damage are yielded before Damaged is raised."""
    joined: list[bytes] = []
    size = 0
    try:
        for piece in pieces:
            joined.append(piece)
            size += len(piece)
            if size >= BLOCK_BYTES:
                yield joined[0] if len(joined) == 1 else b"".join(joined)
                joined, size = [], 0
    except Damaged:
        if joined:
            yield b"".join(joined)
        raise
    if joined:
        yield b"".join(joined)


def _decompressed(file: BinaryIO, suffix: str) -> Iterator[bytes]:
    stream: Any = None
    while compressed := file.read(BLOCK_BYTES):
        while compressed:
            if stream is None:
                compressed = compressed.lstrip(b"\0") if suffix == "gz" else compressed  # padding between members
                if not compressed:
                    break
                stream = _decompressor(suffix)
            try:
                yield from _FEEDS[suffix](stream, compressed)
            except (zlib_ng.error, zstandard.ZstdError, lzma.LZMAError, OSError, ValueError, EOFError) as error:  # type: ignore[misc]
                raise Damaged("damaged", f"damaged {suffix} data: {error}") from error
            compressed = b""
            if stream.eof:
                compressed, stream = stream.unused_data, None
    if stream is not None:
        if suffix == "gz" and (rest := stream.flush()):
            yield rest
        raise Damaged("truncated", f"truncated {suffix} file: its end is missing")


class _ZstdStream:
    """zstandard's decompressobj, fed in slices."""

    def __init__(self) -> None:
        self._stream = zstandard.ZstdDecompressor().decompressobj()
        self.unused_data = b""

    @property
    def eof(self) -> bool:
        return self._stream.eof

    def feed(self, compressed: bytes) -> Iterator[bytes]:
        view = memoryview(compressed)
        for start in range(0, len(view), ZSTD_SLICE_BYTES):
            if plain := self._stream.decompress(view[start : start + ZSTD_SLICE_BYTES]):
                yield plain
            if self._stream.eof:
                self.unused_data = self._stream.unused_data + bytes(view[start + ZSTD_SLICE_BYTES :])
                return


def _feed_zlib(stream: Any, compressed: bytes) -> Iterator[bytes]:
    while compressed and not stream.eof:
        if plain := stream.decompress(compressed, PLAIN_BYTES):
            yield plain
        compressed = stream.unconsumed_tail


def _feed_bounded(stream: Any, compressed: bytes) -> Iterator[bytes]:
    """For bz2 and lzma, which keep the input they have not used."""
    if plain := stream.decompress(compressed, PLAIN_BYTES):
        yield plain
    while not stream.eof and not stream.needs_input:
        if plain := stream.decompress(b"", PLAIN_BYTES):
            yield plain


_FEEDS: dict[str, Any] = {"gz": _feed_zlib, "zst": _ZstdStream.feed, "bz2": _feed_bounded, "xz": _feed_bounded}


def _decompressor(suffix: str) -> Any:
    if suffix == "gz":
        return zlib_ng.decompressobj(wbits=31)
    if suffix == "zst":
        return _ZstdStream()
    return bz2.BZ2Decompressor() if suffix == "bz2" else lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES)


def _lz4(file: BinaryIO) -> Iterator[bytes]:
    """Decompress LZ4 frames. A read that meets damage returns nothing, so the bytes before it are then read one by
    one. `readinto`, because `read(n)` of pyarrow 26 never frees the n bytes of a read that fails."""
    done = 0
    stream, block = _lz4_stream(file), memoryview(bytearray(LZ4_BLOCK_BYTES))
    try:
        while size := stream.readinto(block):
            yield bytes(block[:size])
            done += size
        return
    except OSError as error:
        kind = "truncated" if "Truncated" in str(error) else "damaged"
        reason = "truncated lz4 file: its end is missing" if kind == "truncated" else f"damaged lz4 data: {error}"
    file.seek(0)
    decompressor, first_byte, rest = _lz4_stream(file), bytearray(1), bytearray()
    for _ in range(done // LZ4_BLOCK_BYTES):
        decompressor.readinto(block)
    with suppress(OSError):
        while decompressor.readinto(first_byte):
            rest += first_byte
    if rest:
        yield bytes(rest)
    raise Damaged(kind, reason)


def _lz4_stream(file: BinaryIO) -> Any:
    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "lz4")


def whole_lines(stream: Iterator[bytes], max_bytes: int) -> Iterator[bytes | TooLong]:
    """Split a stream into pieces that end at line ends; the last one may end without. A line that does not fit into one
    block and is, with its end, over max_bytes becomes a TooLong; at most max_bytes of it are held in memory.

    Raises Damaged after the last complete line before the damage: partial records are not used."""
    pieces: list[bytes] = []
    size = 0  # of the incomplete line; `held` has all of it, or nothing once it is too long
    for block in stream:
        cut = block.rfind(b"\n") + 1
        start = 0
        if size and cut:
            start = block.find(b"\n") + 1
            if size + start > max_bytes:
                yield TooLong(size + start)
            else:
                pieces.append(block[:start])
                yield b"".join(pieces)
            pieces, size = [], 0
        if start < cut:
            yield block[start:cut]
        size += len(block) - cut
        if size > max_bytes:
            pieces = []
        elif size:
            pieces.append(block[cut:])
    if size > max_bytes:
        yield TooLong(size)
    elif size:
        yield b"".join(pieces)


# Buffered byte stream, read by line or by number of bytes, for the WARC and ARC readers.

MAX_HEADER_BYTES = 1 << 20  # of one line, and of a whole header


class Malformed(Exception):
    """The bytes at this position are not a WARC or ARC record; the reader searches the next record line by line."""


class ByteStream:
    """Buffers one line, or the bytes that `read` returns, and a block. The time is linear in the bytes, however long
    the lines are."""

    def __init__(self, source: Iterator[bytes]):
        self._source = source
        self._held, self._at = b"", 0  # at: in _held, of the next byte
        self.offset = 0  # in the stream, of the next byte

    def line(self) -> bytes:
        """The next line with its newline; the rest without one at the end of the stream, then b"". Raises Malformed for
        a line over MAX_HEADER_BYTES, and consumes nothing of it."""
        start = self._at
        while (at := self._held.find(b"\n", start)) < 0:
            waiting = len(self._held) - self._at
            if waiting > MAX_HEADER_BYTES:
                raise Malformed("a header line of over 1 MiB")
            if not self._more():
                return self._take(waiting)
            start = waiting
        return self._take(at + 1 - self._at)

    def skip_line(self) -> None:
        """Move past the next newline, or to the end."""
        while (at := self._held.find(b"\n", self._at)) < 0:
            self.offset += len(self._held) - self._at
            self._at = len(self._held)
            if not self._more():
                return
        self._take(at + 1 - self._at)

    def read(self, size: int) -> bytes:
        """Read `size` bytes, fewer at the end of the stream."""
        pieces = []
        while size > 0 and (self._at < len(self._held) or self._more()):
            pieces.append(self._take(min(size, len(self._held) - self._at)))
            size -= len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip(self, size: int) -> int:
        """Skip `size` bytes, fewer at the end of the stream; returns how many. They are not held in memory."""
        left = size
        while left > 0 and (self._at < len(self._held) or self._more()):
            step = min(left, len(self._held) - self._at)
            self._at += step
            self.offset += step
            left -= step
        return size - left

    def _more(self) -> bool:
        """Append the next block to the buffer; False at the end of the stream."""
        block = next(self._source, b"")
        self._held = self._held[self._at :] + block
        self._at = 0
        return bool(block)

    def _take(self, size: int) -> bytes:
        taken = self._held[self._at : self._at + size]
        self._at += size
        self.offset += size
        return taken


# Detection of UTF-16 and UTF-32 text, with or without a byte order mark, and its conversion to UTF-8.

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
    if name := next((name for mark, name in MARKS if head.startswith(mark)), None):
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
    except UnicodeDecodeError:
        with suppress(UnicodeDecodeError):
            return line.decode("utf-8", "surrogatepass")
        raise


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
