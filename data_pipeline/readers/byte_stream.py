"""Blocks of bytes, read by line or by number: what WARC and ARC are made of."""

from collections.abc import Iterator

MAX_HEADER_BYTES = 1 << 20  # of one line, and of a whole header


class Malformed(Exception):
    """What stands here is no WARC or ARC record; the next one is looked for from line to line."""


class ByteStream:
    """Every byte is looked at once or twice, however long the lines are; no more is held than one line or what `read`
    is asked for, and a block."""

    def __init__(self, source: Iterator[bytes]):
        self._source = source
        self._held = b""
        self._at = 0  # in _held, of the next byte
        self.offset = 0  # in the stream, of the next byte

    def line(self) -> bytes:
        """Up to and with the next newline; less at the end, b"" behind it. Raises Malformed, having read nothing of it,
        for a line over MAX_HEADER_BYTES."""
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
        """Behind the next newline, or at the end."""
        while (at := self._held.find(b"\n", self._at)) < 0:
            self.offset += len(self._held) - self._at
            self._at = len(self._held)
            if not self._more():
                return
        self._take(at + 1 - self._at)

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer at the end."""
        held = []
        while size > 0 and (self._at < len(self._held) or self._more()):
            held.append(self._take(min(size, len(self._held) - self._at)))
            size -= len(held[-1])
        return held[0] if len(held) == 1 else b"".join(held)

    def skip(self, size: int) -> int:
        """How many bytes were passed over: `size`, fewer at the end. None is held."""
        left = size
        while left > 0 and (self._at < len(self._held) or self._more()):
            step = min(left, len(self._held) - self._at)
            self._at += step
            self.offset += step
            left -= step
        return size - left

    def _more(self) -> bool:
        """Whether there is another block, which then stands behind what is left of the last."""
        block = next(self._source, b"")
        self._held = self._held[self._at :] + block
        self._at = 0
        return bool(block)

    def _take(self, size: int) -> bytes:
        taken = self._held[self._at : self._at + size]
        self._at += size
        self.offset += size
        return taken
