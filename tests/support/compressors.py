"""Every compression that readers take, by the ending of a file's name."""

import bz2
import gzip
import lzma
from collections.abc import Callable

import pyarrow as pa
import zstandard


def _lz4(content: bytes) -> bytes:
    held = pa.BufferOutputStream()
    with pa.CompressedOutputStream(held, "lz4") as stream:
        stream.write(content)
    return held.getvalue().to_pybytes()


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lz4": _lz4,
}
