"""Where a text is split into segments: between characters that are adjacent in no piece of the vocabulary."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gristmill.foundation.cached_njit import cached_njit
from gristmill.tokenizers.merges import SPACE_SIGN

BPE = 2  # TrainerSpec.ModelType
MARK = 0xFF  # a byte that no UTF-8 holds


def is_local(proto: Any) -> bool:
    """True if a SentencePiece model (its ModelProto) can be encoded segment by segment.

    That is BPE without a normaliser, a leading space or the removal of spaces. Unigram is excluded: sentencepiece sums
    its scores in float32, so on long texts the ids depend on the preceding text."""
    spec = proto.normalizer_spec
    changes_text = spec.precompiled_charsmap or spec.add_dummy_prefix or spec.remove_extra_whitespaces
    return proto.trainer_spec.model_type == BPE and spec.escape_whitespaces and not changes_text


def adjacent_bytes(pieces: Sequence[str]) -> np.ndarray:
    """bool[65536]: entry 256 * a + b says that byte b follows byte a somewhere inside a piece, "▁" read as a space.

    Characters are never cut: a byte that continues one follows any. MARK follows any byte and any byte follows it."""
    adjacent = np.zeros((256, 256), dtype=np.bool_)
    between = bytes([MARK])
    raw = np.frombuffer(between.join(piece.replace("▁", " ").encode() for piece in pieces), dtype=np.uint8)
    adjacent[raw[:-1], raw[1:]] = True
    adjacent[:, 0x80:0xC0] = True
    adjacent[MARK, :] = adjacent[:, MARK] = True
    return adjacent.reshape(-1)


def marked_spaces(buffer: np.ndarray) -> np.ndarray:
    """The bytes of the texts, with every literal "▁" changed so that no segment begins or ends next to it: its first
    byte follows any byte, and any byte follows its last one."""
    raw = buffer.tobytes()
    if SPACE_SIGN.encode() not in raw:
        return buffer
    return np.frombuffer(raw.replace(SPACE_SIGN.encode(), bytes((0x80, 0x80, MARK))), np.uint8)


@cached_njit()
def split_segments(marked, ends, place, window, adjacent, starts, finished):
    """Writes the first byte of every segment of about a window of bytes, followed by the end of the last one, and for
    every text that ends there the number of segments up to its end. marked: the texts as `marked_spaces` returns them.

    Returns the number of segments, and the position and text to continue with."""
    position, document = place
    limit = position + window
    count = 0
    starts[0] = position
    while document < len(ends) and position < limit:
        end = ends[document]
        stop = min(end, limit)
        for at in range(position + 1, stop):
            starts[count + 1] = at  # written over by the next one if this is no boundary
            count += not adjacent[np.int64(marked[at - 1]) << 8 | np.int64(marked[at])]
        at = max(position + 1, stop)
        while at < end and adjacent[np.int64(marked[at - 1]) << 8 | np.int64(marked[at])]:
            at += 1
        if position < end:
            count += 1
            starts[count] = position = min(at, end)
        if position == end:
            finished[document] = count
            document += 1
    return count, position, document
