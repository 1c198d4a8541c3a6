"""Search of a byte, 64 at a time."""

import numpy as np

from gristmill.data_pipeline.signals.intrinsics import bytes_within, trailing_zeros
from gristmill.foundation.cached_njit import cached_njit

PADDING = 64  # zero bytes behind the page, so that looking ahead needs no check


@cached_njit(nogil=True)
def find_byte(source, at, end, byte):
    """The position of the first `byte` from `at` on; `end` if there is none. source: uint8[end + PADDING]."""
    while at < end:
        mask = bytes_within(source, at, np.uint8(byte), np.uint8(1))
        if mask != 0:
            return min(at + np.int64(trailing_zeros(mask)), end)
        at += 64
    return end
