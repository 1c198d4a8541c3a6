"""Texts as one buffer of bytes, which the kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.signals.intrinsics import LANES, copy_block, pointer
from gristmill.foundation.cached_njit import cached_njit

PADDING = 96  # bytes behind the last text that kernels may read: a block, and a few behind its last byte


class TextArrays(NamedTuple):
    """A TextBuffer's arrays and the character table, as kernels take them."""

    text: np.ndarray
    offsets: np.ndarray
    flags: np.ndarray


@dataclass(frozen=True)
class TextBuffer:
    """N texts. text: uint8, each text followed by a newline, then PADDING bytes. offsets: int64[N + 1]; text k is
    text[offsets[k] : offsets[k + 1] - 1]."""

    text: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[str]) -> Self:
        return cls(*joined([text.encode() for text in texts]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, k: int) -> bytes:
        return self.text[self.offsets[k] : self.offsets[k + 1] - 1].tobytes()

    def view(self, k: int) -> memoryview:
        return self.text[self.offsets[k] : self.offsets[k + 1] - 1].data

    def strings(self) -> pa.Array:
        """A pyarrow array of strings, from a copy without the newlines."""
        count = len(self)
        offsets = (self.offsets - np.arange(count + 1)).astype(np.int32)
        data = np.empty(int(offsets[-1]) + LANES, np.uint8)
        _copy_texts(self.text, self.offsets, data)
        return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(data))

    def texts(self) -> list[str]:
        raw, ends = self.text.tobytes(), self.offsets.tolist()
        return [raw[ends[k] : ends[k + 1] - 1].decode() for k in range(len(self))]


def joined(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(text, offsets) of a TextBuffer."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1, out=offsets[1:])
    return np.frombuffer(b"\n".join([*texts, b"\0" * PADDING]), np.uint8), offsets


def add_newlines(data: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    """Writes the strings data[offsets[k] : offsets[k + 1]] to out, each with a newline behind it."""
    _add_newlines(data, offsets, out)


@cached_njit(nogil=True)
def _copy_texts(text, offsets, out):
    """Writes up to LANES bytes behind the last text."""
    put, source, target = 0, pointer(text, 0), pointer(out, 0)
    for k in range(len(offsets) - 1):
        size = offsets[k + 1] - 1 - offsets[k]
        for done in range(0, size, LANES):  # by blocks, as below
            copy_block(target, put + done, source, offsets[k] + done)
        put += size


@cached_njit(nogil=True)
def _add_newlines(data, offsets, out):
    put, source, target = 0, pointer(data, 0), pointer(out, 0)
    for k in range(len(offsets) - 1):
        at, end = offsets[k], offsets[k + 1]
        while at + LANES <= end:  # by blocks: a slice of numba takes as long as a text of 2 kB
            copy_block(target, put, source, at)
            at += LANES
            put += LANES
        while at < end:  # nothing behind the last string may be read
            out[put] = data[at]
            at += 1
            put += 1
        out[put] = 0x0A
        put += 1
