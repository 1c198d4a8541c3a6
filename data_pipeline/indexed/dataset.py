"""Folder of indexed sources: dataset.json, which says what it holds and how a trainer must read it, the checks of its
files, and their merging."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from gristmill.data_pipeline.indexed.draws import Permutation
from gristmill.data_pipeline.indexed.format import (
    IndexedReader,
    IndexedWriter,
    bin_path,
    block_mark,
    idx_path,
    indexed_writer,
)
from gristmill.foundation.checksums import file_state, is_settled, one_at_a_time, read_cached, write_cached
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.manifest import CACHE_FOLDER, MANIFEST_NAME, read_manifest

DATASET_NAME = "dataset.json"


class SplitCounts(Config):
    """sha256 is that of the .bin; tokens count the end-of-document tokens, bytes the text before encoding."""

    documents: int
    tokens: int
    bytes: int
    sha256: str


class IndexedSource(Config):
    name: str
    weight: float
    tokenizer: str = Field(description="fingerprint of the tokenizer the ids belong to")
    splits: dict[str, SplitCounts]


class FimIds(Config):
    prefix: int
    middle: int
    suffix: int


class Dataset(Config):
    vocab_size: int
    end_of_document: int
    dtype: str
    fim: FimIds | None
    sources: tuple[IndexedSource, ...]


def write_dataset(folder: Path, dataset: Dataset) -> None:
    write_atomic(folder / DATASET_NAME, canonical_json(dataset.model_dump(mode="json")) + b"\n")


def read_dataset(folder: Path) -> Dataset:
    """Raises InputError if the folder has no dataset.json, or its sources do not belong together."""
    path = folder / DATASET_NAME
    if not path.is_file():
        raise InputError(f"{path}: no such file; this is no folder of indexed data: run `gristmill index` first")
    try:
        dataset = Dataset.model_validate(json.loads(path.read_bytes()))
    except ValueError as error:
        raise InputError(f"{path}: not a dataset description ({error}); run `gristmill index` again") from error
    by_tokenizer = {source.tokenizer: source.name for source in dataset.sources}
    if len(by_tokenizer) > 1:
        raise InputError(
            f"{path}: sources {sorted(by_tokenizer.values())} were made with different tokenizers; "
            "their ids mean different text: index them again with one tokenizer"
        )
    for source in dataset.sources:
        if not 0 <= source.weight < float("inf"):
            raise InputError(
                f"{path}: source {source.name!r} has weight {source.weight}; a weight is a finite number, 0 or more: "
                "set the source's weight and run `gristmill index` again"
            )
    return dataset


def source_prefix(folder: Path, split: str, name: str) -> Path:
    """Where a source's .bin and .idx stand: FOLDER/train/books."""
    return folder / split / name


# Opens a source of an index folder only after its files were checked, once for all restarts and ranks.
#
# Checked are the digests that the manifest of the folder gives (or, in a folder without a manifest, the token ids)
# and every entry of the .idx. What passed is remembered in cache/checked/SPLIT/SOURCE.json with size, times and inode
# of both files, and any change of these is checked again.

RULES = 1  # raised when the checks become stricter, so that files are checked again
SAID_FROM_BYTES = 1_000_000_000  # files of which the user hears that they are being read


@dataclass(frozen=True)
class CheckedSource:
    """identity: JSON value that is equal as long as the .idx holds the same bytes."""

    reader: IndexedReader
    identity: Any


def manifest_digests(folder: Path) -> dict[str, str] | None:
    """sha256 by path of the files of an index folder, None if it has no manifest (files of others, or by hand).

    Raises InputError if dataset.json is not the one of the manifest."""
    if not (folder / MANIFEST_NAME).is_file():
        return None
    digests = {output.path: output.sha256 for output in read_manifest(folder).outputs}
    path = folder / DATASET_NAME
    if digests.get(DATASET_NAME) != file_digest(path):
        raise InputError(f"{path}: {_altered(folder)}")
    return digests


def open_checked(
    folder: Path,
    split: str,
    source: IndexedSource,
    dataset: Dataset,
    digests: dict[str, str] | None,
    info: Callable[[str], None],
) -> CheckedSource:
    """Raises InputError, naming file and entry, if anything is wrong with the source's files."""
    prefix = source_prefix(folder, split, source.name)
    checked = checked_state(folder, split, source.name, dataset.vocab_size, digests)
    reader = IndexedReader(prefix, tables_checked=True)
    counts = source.splits[split]
    if (reader.num_tokens, reader.num_documents, str(reader.dtype)) != (counts.tokens, counts.documents, dataset.dtype):
        raise InputError(
            f"{prefix}: {reader.num_documents} documents, {reader.num_tokens} tokens of {reader.dtype}, dataset.json "
            f"says {counts.documents}, {counts.tokens} of {dataset.dtype}; run `gristmill index` again"
        )
    record = record_path(folder, split, source.name)
    if read_cached(record) != checked:
        with one_at_a_time(folder):
            if read_cached(record) != checked:  # another rank may have checked meanwhile
                _check(folder, prefix, source.name, dataset.vocab_size, digests, info)
                if all(is_settled(state) for state in checked["files"].values()):
                    write_cached(record, checked)
    if checked != checked_state(folder, split, source.name, dataset.vocab_size, digests):
        raise InputError(
            f"{prefix}: its files changed while they were opened; wait for what writes them, and try again"
        )
    return CheckedSource(reader, checked["files"][idx_path(prefix).name])


def checked_state(
    folder: Path, split: str, source: str, vocab_size: int, digests: dict[str, str] | None
) -> dict[str, Any]:
    """Record of a source's files once they were checked: it changes when they do."""
    files = _states(folder, source_prefix(folder, split, source), digests)
    return {"rules": RULES, "vocab_size": vocab_size, "files": files}


def record_path(folder: Path, split: str, source: str) -> Path:
    return folder / CACHE_FOLDER / "checked" / split / f"{source}.json"


def _states(folder: Path, prefix: Path, digests: dict[str, str] | None) -> dict[str, Any]:
    """State of both files, by name, and, where the manifest gives one, the digest it must have."""
    return {path.name: _state(folder, path, digests) for path in (bin_path(prefix), idx_path(prefix))}


def _state(folder: Path, path: Path, digests: dict[str, str] | None) -> dict[str, Any]:
    try:
        mark = block_mark(path)  # of a file that is downloaded as it is read, and so changes
        state = file_state(mark if mark.is_file() else path)
    except OSError as error:
        raise InputError(
            f"{path}: no such file, or it cannot be read ({error.strerror}); run `gristmill index` again"
        ) from error
    return {**state, "sha256": digests.get(_relative(folder, path)) if digests else None}


def _check(
    folder: Path,
    prefix: Path,
    source: str,
    vocab_size: int,
    digests: dict[str, str] | None,
    info: Callable[[str], None],
) -> None:
    """Tables first: a damage that can be named is named. Ids are within the vocabulary where digests are right, for the
    index stage refuses others."""
    num_bytes = bin_path(prefix).stat().st_size + idx_path(prefix).stat().st_size
    if num_bytes >= SAID_FROM_BYTES:
        info(f"{prefix}: checking {num_bytes / 1e9:.1f} GB, once; later starts remember it")
    reader = IndexedReader(prefix)
    if digests is None:
        reader.check_ids(vocab_size, source)
        return
    is_partial = block_mark(bin_path(prefix)).is_file()  # its digest would need all of it
    for path in (idx_path(prefix),) if is_partial else (idx_path(prefix), bin_path(prefix)):
        if digests.get(_relative(folder, path)) != file_digest(path):
            reader.check_ids(vocab_size, source)
            raise InputError(f"{path}: {_altered(folder)}")


def _relative(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _altered(folder: Path) -> str:
    return (
        f"its sha256 is not the one in {folder / MANIFEST_NAME}, so it was altered after `gristmill index` wrote it; "
        f"`gristmill verify {folder}` lists all such files: restore them, or remove the folder and index again"
    )


# Merges indexed files into one, appends one to another, or cuts a range of documents out of one. The bytes depend on
# the documents and their order alone, not on how many files they came in.

# Documents whose places are looked up at once, and tokens that are gathered before they are written, about.
BATCH_DOCUMENTS = 4096
GATHERED_TOKENS = 1 << 19


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
            _gather([tokens[owner][start:end] for owner, start, end in ranges], ends - starts, writer)


def _gather(documents: Sequence[np.ndarray], lengths: np.ndarray, writer: IndexedWriter) -> None:
    """Appends the documents, copied side by side into one small array that is used again: a new array of megabytes
    costs as much as the copy, because the system clears its pages first."""
    cuts = np.searchsorted(np.cumsum(lengths), np.arange(GATHERED_TOKENS, int(lengths.sum()), GATHERED_TOKENS))
    edges = np.unique([0, *(cuts + 1), len(lengths)]).tolist()
    sums = np.add.reduceat(lengths, edges[:-1])
    gathered = np.empty(int(sums.max(initial=0)), writer.dtype)
    for (first, last), tokens in zip(pairwise(edges), sums.tolist(), strict=True):
        np.concatenate(documents[first:last], out=gathered[:tokens])
        writer.add_many(gathered[:tokens], lengths[first:last])


def append(prefix: Path, addition: Path) -> None:
    """The documents of `addition` follow those of `prefix`, under the name of `prefix`; each file is replaced whole."""
    merge([prefix, addition], prefix)


def slice_documents(source: Path, prefix: Path, first: int, last: int) -> None:
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
