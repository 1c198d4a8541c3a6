"""Texts in lower case, as str.lower writes them."""

import numpy as np

from gristmill.data_pipeline.signals.bits import BLOCK, ZERO, decode, encode, first_bit
from gristmill.data_pipeline.signals.buffer import PADDING, TextBuffer, joined
from gristmill.data_pipeline.signals.code_points import NUM_CODE_POINTS
from gristmill.data_pipeline.signals.intrinsics import bytes_within, copy_lowered, pointer
from gristmill.foundation.cached_njit import cached_njit
from gristmill.foundation.kept_values import kept_array

# U+0130 becomes two characters, U+03A3 depends on those beside it: texts with one of them are lowered in Python.
IRREGULAR = 0x0130, 0x03A3
_LAST_CASED = 0x1FFFF
MAX_GROWTH = 2  # the lower case of a character takes at most 3 bytes for 2 (U+023A)


def lowered(texts: TextBuffer, wanted: np.ndarray) -> TextBuffer:
    """The wanted texts (bool[N]) in lower case; empty ones in the place of the others."""
    count, size = len(texts), int(np.diff(texts.offsets)[wanted].sum())
    out, offsets = np.empty(MAX_GROWTH * size + count + PADDING, np.uint8), np.zeros(count + 1, np.int64)
    is_irregular = np.zeros(count, np.bool_)
    _lower_texts(texts.text, texts.offsets, wanted, _lower_codes(), out, offsets, is_irregular)
    found = TextBuffer(out[: int(offsets[-1]) + PADDING], offsets)
    if not is_irregular.any():
        return found
    pieces = [texts.raw(k).decode().lower().encode() if is_irregular[k] else found.raw(k) for k in range(count)]
    return TextBuffer(*joined(pieces))


@kept_array
def _lower_codes() -> np.ndarray:
    """int32[0x110000]: the lower case of every code point; -1 for the irregular ones."""
    codes_C = np.arange(NUM_CODE_POINTS, dtype=np.int32)
    surrogates = range(0xD800, 0xE000)
    regular = [code for code in range(_LAST_CASED + 1) if code not in IRREGULAR and code not in surrogates]
    codes_C[regular] = np.frombuffer("".join(map(chr, regular)).lower().encode("utf-32-le"), np.int32)
    codes_C[list(IRREGULAR)] = -1
    return codes_C


@cached_njit(nogil=True)
def _lower_texts(text_array, offsets, wanted, codes, out_array, out_offsets, is_irregular):
    text, out = pointer(text_array, 0), pointer(out_array, 0)
    put = np.int64(0)
    for k in range(len(offsets) - 1):
        if wanted[k]:
            stop = _lower_text(text, offsets[k], offsets[k + 1] - 1, codes, out, put)
            is_irregular[k] = stop < 0
            put = put if stop < 0 else stop
        out[put] = 0x0A
        put += 1
        out_offsets[k + 1] = put


@cached_njit(nogil=True)
def _lower_text(text, at, end, codes, out, put):
    """Returns where the text ends in out, -1 if it is irregular. Writes up to a block behind its end."""
    while at < end:
        copy_lowered(out, put, text, at)
        beyond = bytes_within(text, at, 0x80, 0x80)
        size = min(BLOCK if beyond == ZERO else first_bit(beyond), end - at)
        at += size
        put += size
        while at < end and text[at] >= 0x80:
            code, size = decode(text, at)
            at += size
            lower = np.int64(codes[code])
            if lower < 0:
                return np.int64(-1)
            put = encode(lower, out, put)
    return put
