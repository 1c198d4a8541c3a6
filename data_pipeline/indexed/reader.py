"""Reads PREFIX.bin and PREFIX.idx without copying: both are memory-mapped, and every array is a view of the files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.errors import InputError
from gristmill.data_pipeline.indexed.format import CODES, HEADER_BYTES, MAGIC, VERSION, Header, bin_path, idx_path


class IndexedReader:
    """tokens: dtype[num_tokens], the whole .bin. lengths: int32[S]. pointers: int64[S], in bytes. bounds: int64[D].

    Opening costs the same for any size: the header and the last entries are checked, `check` reads all of the .idx.
    Raises InputError if a file is missing, cut short, too long, or not of this format."""

    def __init__(self, prefix: Path):
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
        raw = _map_file(bin_path(prefix))
        self._check_ends(raw)
        self.tokens = raw.view(self.dtype.newbyteorder("<"))
        self.num_tokens = len(self.tokens)

    def __len__(self) -> int:
        return self.num_documents

    def document(self, document_id: int) -> np.ndarray:
        """The tokens of one document: a view when its sequences lie side by side, as gristmill writes them."""
        first, last = int(self.bounds[document_id]), int(self.bounds[document_id + 1])
        if last == first + 1:
            return self.sequence(first)
        pieces = [self.sequence(sequence_id) for sequence_id in range(first, last)]
        return np.concatenate(pieces) if pieces else self.tokens[:0]

    def sequence(self, sequence_id: int) -> np.ndarray:
        start = int(self.pointers[sequence_id]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[sequence_id])]

    def documents(self) -> Iterator[np.ndarray]:
        return (self.document(document_id) for document_id in range(self.num_documents))

    def check(self, vocab_size: int | None = None) -> None:
        """Reads the whole .idx, and with a vocab_size the whole .bin; raises InputError naming the first fault."""
        name = idx_path(self.prefix)
        ends = self.pointers + self.lengths.astype(np.int64) * self.dtype.itemsize
        bin_bytes = self.num_tokens * self.dtype.itemsize
        wrong = (
            (self.lengths < 0) | (self.pointers < 0) | (ends > bin_bytes) | (self.pointers % self.dtype.itemsize != 0)
        )
        if wrong.any():
            first = int(np.argmax(wrong))
            raise InputError(
                f"{name}: sequence {first} points at bytes {int(self.pointers[first])} to {int(ends[first])} of "
                f"{bin_bytes} in {bin_path(self.prefix).name}; the two files do not belong together: write both again"
            )
        if len(self.bounds) and (int(self.bounds[0]) < 0 or (np.diff(self.bounds) < 0).any()):
            raise InputError(f"{name}: document bounds do not rise; write the index again")
        if vocab_size is not None and self.num_tokens:
            largest = max(int(part.max()) for part in np.array_split(self.tokens, 1 + self.num_tokens // (1 << 24)))
            if largest >= vocab_size:
                raise InputError(
                    f"{bin_path(self.prefix)}: token id {largest}, the vocabulary ends at {vocab_size - 1}; "
                    "this dataset was made with another tokenizer"
                )

    def is_one_stream(self) -> bool:
        """True if the documents lie in order and without gaps, so that the .bin itself is the stream of tokens."""
        if self.num_sequences == 0:
            return True
        last_end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        return int(self.pointers[0]) == 0 and last_end == self.num_tokens * self.dtype.itemsize

    def _check_ends(self, raw: np.ndarray) -> None:
        name = bin_path(self.prefix)
        if len(raw) % self.dtype.itemsize:
            raise InputError(f"{name}: {len(raw)} bytes are no whole number of {self.dtype}; it was cut short")
        if len(self.bounds) and int(self.bounds[-1]) > self.num_sequences:
            raise InputError(
                f"{idx_path(self.prefix)}: a document ends at sequence {int(self.bounds[-1])} of {self.num_sequences}; "
                "the file is damaged: write the index again"
            )
        if not self.num_sequences:
            return
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if end != len(raw) or int(self.pointers[-1]) < 0:
            raise InputError(
                f"{name}: {len(raw)} bytes, the index needs {end}; the .bin was cut short, written on, or belongs to "
                "another .idx: write both again"
            )


def _read_header(path: Path, index: np.ndarray) -> Header:
    if bytes(index[:9]) != MAGIC:
        raise InputError(f"{path}: starts with {bytes(index[:9])!r}, not with {MAGIC!r}; it is no Megatron .idx file")
    if len(index) < HEADER_BYTES:
        raise InputError(f"{path}: {len(index)} bytes, the header alone has {HEADER_BYTES}; it was cut short")
    version = int(index[9:17].view("<u8")[0])
    if version != VERSION:
        raise InputError(f"{path}: version {version}; this reader knows version {VERSION}: convert the file first")
    code = int(index[17])
    if code not in CODES:
        raise InputError(f"{path}: dtype code {code}; the format knows {sorted(CODES)}")
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
    if not path.is_file():
        raise InputError(f"{path}: no such file; a dataset is PREFIX.bin with PREFIX.idx, named by PREFIX")
    if path.stat().st_size == 0:
        return np.zeros(0, np.uint8)
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
