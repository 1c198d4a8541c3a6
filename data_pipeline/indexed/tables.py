"""Checks of the tables of an .idx and of the token ids of a .bin, in chunks, so that any size takes the same memory.

Megatron's builder writes sequences one after another (core/datasets/indexed_dataset.py, _IndexWriter), so pointers
follow from lengths, and one that does not fit names the damage."""

from pathlib import Path
from typing import NoReturn

import numpy as np

from gristmill.foundation.errors import InputError

# Entries looked at in one go: about 40 MB of arrays.
CHUNK = 1 << 20
WRITE_AGAIN = "the file is damaged: write the index again, or copy it again from where it came"


def check_sequences(path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, bin_bytes: int) -> None:
    """Sequence i begins where sequence i - 1 ends, the first at byte 0, and the last ends with the .bin.

    lengths: int32[S], in tokens; pointers: int64[S], in bytes. Raises InputError naming the first wrong entry."""
    position = 0
    for first in range(0, len(lengths), CHUNK):
        byte_lengths = lengths[first : first + CHUNK].astype(np.int64) * itemsize
        # At most 2^20 sequences of 2^31 tokens of 8 bytes: no overflow.
        ends = position + np.cumsum(byte_lengths)
        found = pointers[first : first + CHUNK]
        wrong = (byte_lengths < 0) | (found != ends - byte_lengths) | (ends > bin_bytes)
        if wrong.any():
            place = int(np.argmax(wrong))
            start, end = int(ends[place] - byte_lengths[place]), int(ends[place])
            _refuse_sequence(path, first + place, int(byte_lengths[place]) // itemsize, int(found[place]), start, end)
        position = int(ends[-1])
    if position != bin_bytes:
        raise InputError(
            f"{path}: its {len(lengths)} sequences end at byte {position}, the .bin has {bin_bytes} bytes; the two "
            "files do not belong together: write both again"
        )


def check_bounds(path: Path, bounds: np.ndarray, num_sequences: int) -> None:
    """Document bounds rise from 0 to the number of sequences. bounds: int64[D + 1].

    Raises InputError naming the first wrong document. An empty document (two equal bounds) is allowed, as Megatron
    writes one where a text has no tokens."""
    if int(bounds[0]) != 0:
        raise InputError(f"{path}: document 0 begins at sequence {int(bounds[0])}, not at 0; {WRITE_AGAIN}")
    for first in range(0, len(bounds) - 1, CHUNK):
        chunk = bounds[first : first + CHUNK + 1]
        wrong = (chunk[1:] < chunk[:-1]) | (chunk[1:] > num_sequences)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise InputError(
                f"{path}: document {first + place} is sequences {int(chunk[place])} to {int(chunk[place + 1])} of "
                f"{num_sequences}; document bounds rise from 0 to the number of sequences: {WRITE_AGAIN}"
            )
    if int(bounds[-1]) != num_sequences:
        raise InputError(
            f"{path}: the last document ends at sequence {int(bounds[-1])} of {num_sequences}, so the others belong "
            f"to no document; {WRITE_AGAIN}"
        )


def first_id_outside(tokens: np.ndarray, vocab_size: int) -> int | None:
    """Place of the first token id below 0 or at or above vocab_size, None if there is none.

    ([5, 99, 100], vocab_size=100) -> 2. A dtype that holds no such id costs nothing."""
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return None
    for first in range(0, len(tokens), 1 << 24):
        chunk = tokens[first : first + (1 << 24)]
        if int(chunk.max()) >= vocab_size or int(chunk.min()) < 0:
            return first + int(np.argmax((chunk >= vocab_size) | (chunk < 0)))
    return None


def _refuse_sequence(path: Path, sequence: int, length: int, pointer: int, start: int, end: int) -> NoReturn:
    if length < 0:
        problem = f"has length {length}"
    elif pointer != start:
        problem = f"points at byte {pointer}, the sequences before it end at byte {start}"
    else:
        problem = f"has length {length} and ends at byte {end}, behind the end of the .bin"
    raise InputError(f"{path}: sequence {sequence} {problem}; {WRITE_AGAIN}")
