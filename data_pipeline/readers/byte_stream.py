"""Buffered byte stream, read by line or by number of bytes, for the WARC and ARC readers."""

from collections.abc import Iterator

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
        held = []
        while size > 0 and (self._at < len(self._held) or self._more()):
            held.append(self._take(min(size, len(self._held) - self._at)))
            size -= len(held[-1])
        return held[0] if len(held) == 1 else b"".join(held)

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
