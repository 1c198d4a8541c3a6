"""Megatron's indexed dataset, on the level of bytes: PREFIX.bin holds the tokens, PREFIX.idx says where they are.

Source: Megatron-LM, core/datasets/indexed_dataset.py (class _IndexWriter and _IndexReader). All numbers little-endian:

    offset  bytes    what
    0       9        magic, b"MMIDIDX\\0\\0"
    9       8        version, uint64, 1
    17      1        dtype code, uint8 (CODES)
    18      8        S, uint64: number of sequences
    26      8        D, uint64: number of document bounds, one more than there are documents
    34      4 S      sequence lengths in tokens, int32
    ..      8 S      sequence pointers, int64: offsets into PREFIX.bin in bytes
    ..      8 D      document bounds, int64: document d is the sequences from bound d to bound d + 1
    ..      S        sequence modes, int8: only in multimodal datasets

gristmill writes one sequence a document, unless a document is longer than a sequence can be."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.foundation.manifest import CACHE_FOLDER

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
LONGEST_SEQUENCE = 2**31 - 1  # lengths are int32

CODES: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}

# Megatron's DType.optimal_dtype takes 2 bytes below this vocabulary size, 4 bytes from it on.
SMALL_VOCABULARY = 65500


@dataclass(frozen=True)
class Header:
    dtype: np.dtype
    num_sequences: int
    num_bounds: int

    def pack(self) -> bytes:
        counts = np.array([self.num_sequences, self.num_bounds], dtype="<u8").tobytes()
        return MAGIC + np.array([VERSION], dtype="<u8").tobytes() + bytes([code_of(self.dtype)]) + counts


def code_of(dtype: np.dtype) -> int:
    """The format's number of a dtype: code_of(np.dtype("uint16")) == 8. Raises ValueError if it has none."""
    for code, known in CODES.items():
        if known == dtype:
            return code
    raise ValueError(f"the format has no code for {dtype}; it holds {sorted(str(known) for known in CODES.values())}")


def dtype_for(vocab_size: int) -> np.dtype:
    """uint16 where the vocabulary allows, else int32, as Megatron chooses."""
    return np.dtype(np.uint16) if vocab_size < SMALL_VOCABULARY else np.dtype(np.int32)


def bin_path(prefix: Path) -> Path:
    """ "data/books" -> data/books.bin. A prefix may hold dots; it is no file name with a suffix to replace."""
    return prefix.with_name(prefix.name + ".bin")


def block_mark(path: Path) -> Path:
    """The mark of a .bin of an index folder that is a BlockFile: index/train/books.bin ->
    index/cache/blocks/train/books.bin.json."""
    return path.parents[1] / CACHE_FOLDER / "blocks" / path.parent.name / f"{path.name}.json"


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")
