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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path
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
    path = path.absolute()  # a bare name in its own folder has one parent only
    return path.parents[1] / CACHE_FOLDER / "blocks" / path.parent.name / f"{path.name}.json"


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


# Writes PREFIX.bin and PREFIX.idx, document by document; both appear whole or not at all.


class IndexedWriter:
    """Takes documents as arrays of token ids; made by `indexed_writer`, which also puts the files in place.

    Lengths are kept in memory (4 bytes a sequence), tokens are not. Several documents may be added in one call; a
    document is one sequence, or several where it is split into sentences."""

    def __init__(self, file: BinaryIO, prefix: Path, dtype: np.dtype, vocab_size: int | None):
        self.prefix, self.dtype, self.vocab_size = prefix, dtype, vocab_size
        self._file = file
        self._lengths: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self.num_documents = 0
        self.num_tokens = 0

    def add(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Adds one document. Raises InputError if it is empty, too long, or holds an id outside the vocabulary."""
        array = np.asarray(tokens)
        self.add_many(array, np.array([len(array)], dtype=np.int64))

    def add_many(self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray | None = None) -> None:
        """Adds sequences of these lengths, which lie one after another in `tokens`. sequences: how many each document
        has; None: one each."""
        self._check(tokens, lengths)
        sequences = np.ones(len(lengths), dtype=np.int64) if sequences is None else sequences
        if int(sequences.sum()) != len(lengths) or (len(sequences) and int(sequences.min()) < 1):
            raise ValueError(f"{bin_path(self.prefix)}: {len(lengths)} sequences for documents of {sequences.tolist()}")
        self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype.newbyteorder("<")).data)
        self._lengths.append(lengths.astype(np.int32))
        self._counts.append(sequences.astype(np.int32))
        self.num_documents += len(sequences)
        self.num_tokens += len(tokens)

    def _check(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        where = f"{bin_path(self.prefix)}: document {self.num_documents}"
        if int(lengths.sum()) != len(tokens):
            raise ValueError(f"{where}: lengths sum to {int(lengths.sum())}, there are {len(tokens)} tokens")
        if len(lengths) and int(lengths.min()) < 1:
            empty = self.num_documents + int(np.argmin(lengths))
            raise InputError(
                f"{bin_path(self.prefix)}: document {empty} is empty; drop empty documents before indexing"
            )
        if len(lengths) and int(lengths.max()) > LONGEST_SEQUENCE:
            raise InputError(
                f"{where} or later: {int(lengths.max())} tokens, the format holds {LONGEST_SEQUENCE} at most; "
                "cut the document into several before indexing"
            )
        if not len(tokens) or self.dtype.kind not in "iu":
            return
        smallest, largest = int(tokens.min()), int(tokens.max())
        limit = self.vocab_size if self.vocab_size is not None else np.iinfo(self.dtype).max + 1
        if smallest < min(0, np.iinfo(self.dtype).min) or (self.vocab_size and smallest < 0) or largest >= limit:
            wrong = smallest if smallest < 0 else largest
            raise InputError(
                f"{where} or later holds token id {wrong}; ids run from 0 to {limit - 1}: "
                "encode with the tokenizer this dataset is declared with"
            )

    def header_and_tables(self) -> Iterator[bytes]:
        """The bytes of PREFIX.idx."""
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int32)
        counts = np.concatenate(self._counts) if self._counts else np.zeros(0, np.int32)
        yield Header(self.dtype, len(lengths), len(counts) + 1).pack()
        yield lengths.astype("<i4").tobytes()
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        yield (ends - lengths.astype(np.int64) * self.dtype.itemsize).astype("<i8").tobytes()
        yield np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype("<i8").tobytes()


@contextmanager
def indexed_writer(prefix: Path, dtype: np.dtype, vocab_size: int | None = None) -> Iterator[IndexedWriter]:
    """A writer; when the block ends well the .bin and then the .idx stand under their names, so an .idx means whole."""
    with atomic_path(bin_path(prefix)) as temporary, temporary.open("wb", buffering=1 << 20) as file:
        writer = IndexedWriter(file, prefix, np.dtype(dtype), vocab_size)
        yield writer
        file.flush()
    with atomic_path(idx_path(prefix)) as temporary, temporary.open("wb") as file:
        file.writelines(writer.header_and_tables())
