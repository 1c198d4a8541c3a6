"""Merges indexed datasets into one, appends one to another, or cuts a range of documents out of one.

The bytes depend on the documents and their order alone, not on how many files they came in."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.indexed.format import IndexedWriter, bin_path, indexed_writer
from gristmill.data_pipeline.indexed.permutation import Permutation
from gristmill.data_pipeline.indexed.reader import IndexedReader
from gristmill.foundation.errors import InputError

# Documents gathered before they are written: a few MB at a time.
BATCH_DOCUMENTS = 4096


def merge(prefixes: Sequence[Path], prefix: Path, key: int | None = None, chosen: np.ndarray | None = None) -> None:
    """Writes the documents of all datasets to PREFIX, one dataset after another, or with a key in the keyed permutation
    of that order. chosen: int64, the numbers in that order of the documents to write, each as often as it is named;
    None: all.

    Memory: 4 bytes a document. Raises InputError if no dataset is given, or datasets of two dtypes."""
    readers = [IndexedReader(source_prefix) for source_prefix in prefixes]
    if not readers:
        raise InputError(f"{bin_path(prefix)}: nothing to merge; name at least one dataset by its prefix")
    for reader in readers[1:]:
        if reader.dtype != readers[0].dtype:
            raise InputError(
                f"{bin_path(reader.prefix)} holds {reader.dtype}, {bin_path(readers[0].prefix)} {readers[0].dtype}; "
                "they were made with different vocabularies: index both again with one tokenizer"
            )
    first = np.concatenate([[0], np.cumsum([len(reader) for reader in readers])])
    tokens = [reader.tokens for reader in readers]
    has_sentences = any(reader.num_sequences > reader.num_documents for reader in readers)
    with indexed_writer(prefix, readers[0].dtype) as writer:
        for numbers in _batches(int(first[-1]) if chosen is None else len(chosen), key):
            numbers = numbers if chosen is None else chosen[numbers]
            owners = np.searchsorted(first, numbers, side="right") - 1
            if has_sentences:
                pairs = zip(owners.tolist(), (numbers - first[owners]).tolist(), strict=True)
                _copy([(readers[owner], number) for owner, number in pairs], writer)
                continue
            starts, ends = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
            for owner in np.unique(owners).tolist():
                owned = owners == owner
                starts[owned], ends[owned] = readers[owner].token_ranges(numbers[owned] - first[owner])
            ranges = zip(owners.tolist(), starts.tolist(), ends.tolist(), strict=True)
            writer.add_many(np.concatenate([tokens[owner][start:end] for owner, start, end in ranges]), ends - starts)


def append(prefix: Path, addition: Path) -> None:
    """The documents of `addition` follow those of `prefix`, under the name of `prefix`; each file is replaced whole."""
    merge([prefix, addition], prefix)


def cut_out(source: Path, prefix: Path, first: int, last: int) -> None:
    """PREFIX holds the documents `first` to `last` - 1 of `source`. Raises InputError if it has not so many."""
    reader = IndexedReader(source)
    if not 0 <= first < last <= len(reader):
        raise InputError(f"{bin_path(source)}: documents {first} to {last} asked for, it has {len(reader)}")
    with indexed_writer(prefix, reader.dtype) as writer:
        for number in range(first, last):
            _copy([(reader, number)], writer)


def _copy(documents: Sequence[tuple[IndexedReader, int]], writer: IndexedWriter) -> None:
    """Appends documents with their sentences. Raises InputError if one is empty."""
    lengths = [reader.sentence_lengths(number) for reader, number in documents]
    lengths = [
        sentences if len(sentences) else np.zeros(1, np.int32) for sentences in lengths
    ]  # which the writer refuses by name
    writer.add_many(
        np.concatenate([reader.document(number) for reader, number in documents]),
        np.concatenate(lengths),
        np.array([len(sentences) for sentences in lengths]),
    )


def _batches(size: int, key: int | None) -> Iterator[np.ndarray]:
    """The document numbers in their new order, a batch at a time."""
    order = Permutation(size, key) if key is not None and size else None
    for start in range(0, size, BATCH_DOCUMENTS):
        numbers = np.arange(start, min(start + BATCH_DOCUMENTS, size))
        yield numbers if order is None else order.many(numbers)
