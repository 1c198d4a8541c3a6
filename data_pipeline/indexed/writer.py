"""Writes PREFIX.bin and PREFIX.idx, document by document; both appear whole or not at all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gristmill.data_pipeline.indexed.format import LONGEST_SEQUENCE, Header, bin_path, idx_path
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path


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
