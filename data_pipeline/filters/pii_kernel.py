"""Which texts may hold personal data, in one compiled pass over their UTF-8 bytes.

A text is named for marks that every match of filters/pii.py has; some named texts have no match."""

import numpy as np

from gristmill.data_pipeline.signals.bits import BLOCK, ONE, TOP, ZERO, below, first_bit, without_first
from gristmill.data_pipeline.signals.intrinsics import bytes_within, letters_within, pointer
from gristmill.foundation.cached_njit import cached_njit

EMAIL, IP, PHONE = 1, 2, 4
MAX_DOT_DISTANCE = 8  # from the first dot of an address to the third: two numbers of three digits and a dot


@cached_njit(nogil=True)
def find_marks(data, offsets, kinds, found):
    """Sets the bits of `kinds` in found: uint8[N] that the texts data[offsets[k] : offsets[k + 1]] may hold.

    EMAIL: an @ between characters of an address. IP: three dots between digits, close to each other. PHONE: a space,
    dot or hyphen between digits."""
    for k in range(len(offsets) - 1):
        start, end = offsets[k], offsets[k + 1]
        if end + BLOCK <= len(data):
            found[k] = _marks(pointer(data, 0), start, end, kinds)
        else:  # a block may reach behind the last bytes
            copy = np.zeros(end - start + BLOCK, np.uint8)
            copy[: end - start] = data[start:end]
            found[k] = _marks(pointer(copy, 0), 0, end - start, kinds)


@cached_njit(nogil=True)
def _marks(text, start, end, kinds):
    found, first_dot, second_dot = 0, start - 2 * BLOCK, start - 2 * BLOCK  # the last two dots between digits
    for base in range(start, end, BLOCK):
        inside = below(end - base)
        digit = bytes_within(text, base, 0x30, 10)
        if kinds & EMAIL:
            sign = bytes_within(text, base, 0x40, 1) & inside
            if sign != ZERO:
                address = digit | letters_within(text, base, 0x61, 26)
                address |= bytes_within(text, base, 0x5F, 1) | bytes_within(text, base, 0x2D, 1)
                found |= EMAIL if _between(sign, address) != ZERO else 0
        if kinds & IP:
            dots = _between(bytes_within(text, base, 0x2E, 1) & inside, digit)
            while dots != ZERO:
                dot = base + first_bit(dots)
                dots = without_first(dots)
                found |= IP if dot - first_dot <= MAX_DOT_DISTANCE else 0
                first_dot, second_dot = second_dot, dot
        if kinds & PHONE:
            separator = bytes_within(text, base, 0x20, 1) | bytes_within(text, base, 0x2D, 2)
            found |= PHONE if _between(separator & inside, digit) != ZERO else 0
    return found


@cached_njit(nogil=True, forceinline=True)
def _between(marks, neighbours):
    """The marks with a neighbour on either side; those at the ends of the block are taken to have one outside it."""
    return marks & (neighbours << ONE | ONE) & (neighbours >> ONE | ONE << TOP)
