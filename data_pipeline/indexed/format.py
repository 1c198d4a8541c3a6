"""Megatron's indexed dataset, on the level of bytes: PREFIX.bin holds the tokens, PREFIX.idx says where they are; a
writer and a reader.

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
from typing import Any, BinaryIO, NoReturn

import numpy as np

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import atomic_path, refuse_stub
from gristmill.foundation.manifest import CACHE_FOLDER
from gristmill.foundation.runtime.store.store import BlockArray, BlockFile
from gristmill.foundation.runtime.tasks.task_files import fetch

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
    """ "data/books" -> data/books.bin. A prefix may hold dots; it is no file name with a suffix to replace. Raises
    RecipeError for a folder such as "." that has no name."""
    return _with_suffix(prefix, ".bin")


def idx_path(prefix: Path) -> Path:
    return _with_suffix(prefix, ".idx")


def _with_suffix(prefix: Path, suffix: str) -> Path:
    if not prefix.name:
        raise RecipeError(f"{prefix}: not the prefix of a dataset, which is its path without .bin, such as data/books")
    return prefix.with_name(prefix.name + suffix)


def block_mark(path: Path) -> Path:
    """The mark of a .bin of an index folder that is a BlockFile: index/train/books.bin ->
    index/cache/blocks/train/books.bin.json."""
    path = path.absolute()  # a bare name in its own folder has one parent only
    return path.parents[1] / CACHE_FOLDER / "blocks" / path.parent.name / f"{path.name}.json"


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


# Reads PREFIX.bin and PREFIX.idx without copying: both are memory-mapped, and every array is a view of the files.


class IndexedReader:
    """tokens: dtype[num_tokens], the whole .bin, of which slices may be downloaded (`store/store.py`). lengths:
    int32[S]. pointers: int64[S], in bytes. bounds: int64[D + 1].

    The .idx is read whole and checked, entry by entry, unless `tables_checked` says that it was before (verify.py):
    then only the header and the sizes are looked at, and opening costs the same for any size.
    Raises InputError if a file is missing, cut short, too long, damaged, or not of this format."""

    def __init__(self, prefix: Path, tables_checked: bool = False):
        self.prefix = prefix
        self._index = _map_file(idx_path(prefix))
        header = _read_header(idx_path(prefix), self._index)
        self.dtype, self.num_sequences = header.dtype, header.num_sequences
        self.num_documents = header.num_bounds - 1
        lengths_end = HEADER_BYTES + 4 * header.num_sequences
        pointers_end = lengths_end + 8 * header.num_sequences
        bounds_end = pointers_end + 8 * header.num_bounds
        if len(self._index) not in (bounds_end, bounds_end + header.num_sequences):
            raise InputError(
                f"{idx_path(prefix)}: {len(self._index)} bytes, its header promises {bounds_end} "
                f"({header.num_sequences} sequences); it was cut short or overwritten: write the index again"
            )
        self.lengths = self._index[HEADER_BYTES:lengths_end].view("<i4")
        self.pointers = self._index[lengths_end:pointers_end].view("<i8")
        self.bounds = self._index[pointers_end:bounds_end].view("<i8")
        modes = self._index[bounds_end:].view(np.int8)
        self.modes = modes if len(modes) else None
        self.tokens, num_bytes = self._open_tokens()
        self.num_tokens = len(self.tokens)
        if not tables_checked:
            check_sequences(idx_path(prefix), self.lengths, self.pointers, self.dtype.itemsize, num_bytes)
            check_bounds(idx_path(prefix), self.bounds, self.num_sequences)

    def _open_tokens(self) -> tuple[Any, int]:
        """(tokens, bytes of the .bin). Raises InputError if the .bin does not fit the .idx."""
        path, dtype = bin_path(self.prefix), self.dtype.newbyteorder("<")
        if (mark := block_mark(path)).is_file():
            file = BlockFile(path, mark)
            self._check_bin_size(file.num_bytes)
            return BlockArray(file, dtype), file.num_bytes
        raw = _map_file(path)
        self._check_bin_size(len(raw))
        return raw.view(dtype), len(raw)

    def __len__(self) -> int:
        return self.num_documents

    def document(self, document_id: int) -> np.ndarray:
        """The tokens of one document, a view: its sequences lie side by side."""
        first, last = int(self.bounds[document_id]), int(self.bounds[document_id + 1])
        if first == last:
            return self.tokens[:0]
        start = int(self.pointers[first]) // self.dtype.itemsize
        end = int(self.pointers[last - 1]) // self.dtype.itemsize + int(self.lengths[last - 1])
        return self.tokens[start:end]

    def with_ranges(self, firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """dtype[num_tokens]: the whole .bin; these ranges of it have been downloaded, if need be."""
        return self.tokens.with_ranges(firsts, lengths) if isinstance(self.tokens, BlockArray) else self.tokens

    def token_ranges(self, document_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first token, last + 1) of these documents in `tokens`, int64 each."""
        first, last = self.bounds[document_ids], self.bounds[document_ids + 1]
        filled = last > first
        starts, ends = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
        starts[filled] = self.pointers[first[filled]] // self.dtype.itemsize
        ends[filled] = self.pointers[last[filled] - 1] // self.dtype.itemsize + self.lengths[last[filled] - 1]
        return starts, ends

    def document_at(self, token: int) -> int:
        """The document that holds this token of the .bin, whose documents stand one after another."""
        sequence = int(np.searchsorted(self.pointers, token * self.dtype.itemsize, side="right")) - 1
        return int(np.searchsorted(self.bounds, sequence, side="right")) - 1

    def sentence_lengths(self, document_id: int) -> np.ndarray:
        """int32: tokens of each sequence of a document; one number where it is not split into sentences."""
        return self.lengths[int(self.bounds[document_id]) : int(self.bounds[document_id + 1])]

    def documents(self) -> Iterator[np.ndarray]:
        return (self.document(document_id) for document_id in range(self.num_documents))

    def check_ids(self, vocab_size: int, source: str | None = None) -> None:
        """Reads the whole .bin; raises InputError naming the source, the document and the id of the first token that
        is not in the vocabulary."""
        name = f"{bin_path(self.prefix)}" + (f" (source {source!r})" if source else "")
        if self.dtype.kind not in "iu":
            raise InputError(f"{name}: holds {self.dtype}, which are no token ids; write the index again")
        place = first_id_outside(np.asarray(self.tokens), vocab_size)
        if place is None:
            return
        sequence = int(np.searchsorted(self.pointers, place * self.dtype.itemsize, side="right")) - 1
        document = int(np.searchsorted(self.bounds, sequence, side="right")) - 1
        inside = place - int(self.pointers[int(self.bounds[document])]) // self.dtype.itemsize
        raise InputError(
            f"{name}: document {document}, token {inside} has id {int(self.tokens[place])}; the vocabulary has ids 0 "
            f"to {vocab_size - 1}: the dataset was made with another tokenizer, or the file is damaged; run "
            "`gristmill index` again"
        )

    def _check_bin_size(self, num_bytes: int) -> None:
        name = bin_path(self.prefix)
        if num_bytes % self.dtype.itemsize:
            raise InputError(
                f"{name}: {num_bytes} bytes are no whole number of {self.dtype}; it was cut short: write it again"
            )
        ends = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if self.num_sequences else 0
        if ends != num_bytes:
            raise InputError(
                f"{name}: {num_bytes} bytes, the index needs {ends}; the .bin was cut short, written on, or belongs to "
                "another .idx: write both again"
            )


def _read_header(path: Path, index: np.ndarray) -> Header:
    if bytes(index[:9]) != MAGIC:
        raise InputError(
            f"{path}: starts with {bytes(index[:9])!r}, not with {MAGIC!r}; it is no Megatron .idx file: "
            "name a dataset by its prefix, or write the index again"
        )
    if len(index) < HEADER_BYTES:
        raise InputError(
            f"{path}: {len(index)} bytes, the header alone has {HEADER_BYTES}; it was cut short: write it again"
        )
    version = int(index[9:17].view("<u8")[0])
    if version != VERSION:
        raise InputError(f"{path}: version {version}; this reader knows version {VERSION}: convert the file first")
    code = int(index[17])
    if code not in CODES:
        raise InputError(f"{path}: dtype code {code}, the format knows {sorted(CODES)}; write the index again")
    counts = index[18:34].view("<u8")
    num_sequences, num_bounds = int(counts[0]), int(counts[1])
    if max(num_sequences, num_bounds) > len(index) or num_bounds < 1:
        raise InputError(
            f"{path}: {len(index)} bytes cannot hold {num_sequences} sequences and {num_bounds} document bounds; "
            "it was cut short or overwritten: write the index again"
        )
    return Header(CODES[code], num_sequences, num_bounds)


def _map_file(path: Path) -> np.ndarray:
    """uint8[bytes], read-only; an empty file gives an empty array, which a memory map refuses."""
    if not fetch(path).is_file():
        raise InputError(f"{path}: no such file; a dataset is PREFIX.bin with PREFIX.idx, named by PREFIX")
    if path.stat().st_size == 0:
        return np.zeros(0, np.uint8)
    refuse_stub(path)
    try:
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its rights and the disk") from error


# Checks of the tables of an .idx and of the token ids of a .bin, in chunks, so that any size takes the same memory.
#
# Megatron's builder writes sequences one after another (core/datasets/indexed_dataset.py, _IndexWriter), so pointers
# follow from lengths, and one that does not fit names the damage.

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
        chunk = pointers[first : first + CHUNK]
        wrong = (byte_lengths < 0) | (chunk != ends - byte_lengths) | (ends > bin_bytes)
        if wrong.any():
            place = int(np.argmax(wrong))
            start, end = int(ends[place] - byte_lengths[place]), int(ends[place])
            _refuse_sequence(path, first + place, int(byte_lengths[place]) // itemsize, int(chunk[place]), start, end)
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
