"""Compressed files as a stream of plain bytes, read as far as they can be."""

import bz2
import lzma
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import zstandard

# Small enough that what a block becomes stays in the processor's cache until its lines are read: 1 << 20 took a third
# longer for JSON lines in zstd.
BLOCK_BYTES = 1 << 17
LZ4_BLOCK_BYTES = 1 << 16
SUFFIXES = ("gz", "zst", "bz2", "xz", "lz4")


class Damaged(Exception):
    """The stream ends too early (kind `truncated`) or cannot be decompressed (`damaged`). All that could be read was
    handed out first."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


def blocks(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The plain bytes of the file, in blocks; the name's suffix (.gz .zst .bz2 .xz .lz4) says how it is compressed.

    Files of several compressed streams in a row are read through. Raises Damaged after the last readable byte."""
    suffix = name.rpartition(".")[2]
    if suffix == "lz4":
        yield from _lz4(file)
        return
    if suffix not in SUFFIXES:
        while block := file.read(BLOCK_BYTES):
            yield block
        return
    yield from _decompressed(file, suffix)


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
                plain = stream.decompress(compressed)
            except (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, ValueError) as error:
                raise Damaged("damaged", f"damaged {suffix} data: {error}") from error
            if plain:
                yield plain
            compressed = b""
            if stream.eof:
                compressed, stream = stream.unused_data, None
    if stream is not None:
        if suffix == "gz" and (rest := stream.flush()):
            yield rest
        raise Damaged("truncated", f"truncated {suffix} file: its end is missing")


def _lz4(file: BinaryIO) -> Iterator[bytes]:
    """LZ4 frames. A read that meets the damage gives nothing, so what stands before it is then read byte by byte."""
    done = 0
    stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "lz4")
    try:
        while plain := stream.read(LZ4_BLOCK_BYTES):
            yield plain
            done += len(plain)
        return
    except OSError as error:
        kind = "truncated" if "Truncated" in str(error) else "damaged"
        reason = "truncated lz4 file: its end is missing" if kind == "truncated" else f"damaged lz4 data: {error}"
    file.seek(0)
    again = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "lz4")
    for _ in range(done // LZ4_BLOCK_BYTES):
        again.read(LZ4_BLOCK_BYTES)
    rest = bytearray()
    try:
        while plain := again.read(1):
            rest += plain
    except OSError:
        yield bytes(rest)
    raise Damaged(kind, reason)


def _decompressor(suffix: str) -> Any:
    if suffix == "gz":
        return zlib.decompressobj(wbits=31)
    if suffix == "zst":
        return zstandard.ZstdDecompressor().decompressobj()
    return bz2.BZ2Decompressor() if suffix == "bz2" else lzma.LZMADecompressor()


def whole_lines(stream: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces that end where lines do; the last one may end without.

    Raises Damaged after the last whole line before the damage: half a record is no record."""
    rest = b""
    for block in stream:
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
    if rest:
        yield rest
