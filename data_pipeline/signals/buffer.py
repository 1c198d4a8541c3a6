"""Texts as one buffer of bytes, as the kernels want them."""

from collections.abc import Sequence

import numpy as np

PADDING = 16  # bytes that may be read behind the last text


def joined(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 buffer, int64 offsets[N + 1]): each text followed by a newline, then padding, as the kernels want it."""
    offsets = np.cumsum([0, *(len(text) + 1 for text in texts)], dtype=np.int64)
    return np.frombuffer(b"\n".join([*texts, b"\0" * PADDING]), np.uint8), offsets
