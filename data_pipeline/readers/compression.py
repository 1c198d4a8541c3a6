"""Decompression of files as streams, in bounded memory; damaged files are read up to the damage."""

import bz2
import lzma
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import zstandard

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
        return
    if suffix not in SUFFIXES:
        while block := file.read(BLOCK_BYTES):
            yield block
        return
    yield from _joined(_decompressed(file, suffix))


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
            except (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, ValueError, EOFError) as error:
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
        return zlib.decompressobj(wbits=31)
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
        self._held = b""
        self._at = 0  # in _held, of the next byte
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
