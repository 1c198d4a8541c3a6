"""Packs one source's documents into windows of sequence_length + 1 tokens: inputs and, one to the right, targets."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from gristmill.data_pipeline.indexed.draws import Permutation, key_of, places_of_values
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.foundation.checksums import one_at_a_time, write_cached_bytes
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.manifest import CACHE_FOLDER
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Many windows at once: their tokens, and what a model needs to know of the documents in them.


@dataclass(frozen=True)
class WindowBatch:
    """N windows of T + 1 tokens, filled row by row by the packings. tokens, targets: int64[N, T], all but the last and
    all but the first. is_start: bool[N, T + 1], where a document (or a piece) begins, or [N, 0] where nobody asks.
    num_valid: int64[N], tokens before the padding."""

    tokens: np.ndarray
    targets: np.ndarray
    is_start: np.ndarray
    num_valid: np.ndarray

    @classmethod
    def empty(cls, windows: int, sequence_length: int, finds_starts: bool) -> "WindowBatch":
        tokens, targets = np.empty((2, windows, sequence_length), np.int64)
        is_start = np.zeros((windows, sequence_length + 1 if finds_starts else 0), np.bool_)
        return cls(tokens, targets, is_start, np.zeros(windows, np.int64))

    def weights(self, mask_documents: bool) -> np.ndarray:
        """float32[N, T]: 0 where nothing is learned: in the padding, and with mask_documents where the next token is
        the first of another document."""
        weights = np.ones(self.tokens.shape, np.float32)
        _mask_weights(self.is_start, self.num_valid, mask_documents, weights)
        return weights

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """(positions, documents), int64[N, T]: the place of each token in its document, and which document of the
        window that is."""
        positions, documents = np.empty_like(self.tokens), np.empty_like(self.tokens)
        _number_documents(self.is_start, positions, documents)
        return positions, documents


@cached_njit()
def copy_windows(stream, firsts, rows, end, tokens, targets, is_start, num_valid):
    """Row rows[i] becomes the window at stream[firsts[i]]. A document begins behind each token `end` but the last
    two."""
    length = tokens.shape[1]
    for i in range(len(rows)):
        row, first = rows[i], firsts[i]
        for place in range(length):
            tokens[row, place] = stream[first + place]
        for place in range(length):
            targets[row, place] = stream[first + place + 1]
        num_valid[row] = length + 1
        if is_start.shape[1]:
            is_start[row, 0] = True
            for place in range(length - 1):
                is_start[row, place + 1] = tokens[row, place] == end


@cached_njit()
def copy_pieces(stream, pieces, end, tokens, targets, is_start, num_valid):
    """pieces: int64[n, 3], columns (row, first token in the stream, length), those of a row one after another; `end`
    fills the rest of a row. num_valid of the rows is 0 before."""
    length = tokens.shape[1]
    for i in range(len(pieces)):
        row, first, size = pieces[i, 0], pieces[i, 1], pieces[i, 2]
        filled = num_valid[row]
        if is_start.shape[1]:
            is_start[row, filled] = True
        for place in range(filled, min(filled + size, length)):
            tokens[row, place] = stream[first + place - filled]
        for place in range(max(filled, 1), filled + size):
            targets[row, place - 1] = stream[first + place - filled]
        filled += size
        num_valid[row] = filled
        if i + 1 == len(pieces) or pieces[i + 1, 0] != row:
            tokens[row, filled:] = end
            targets[row, max(0, filled - 1) :] = end
            if is_start.shape[1] and filled < length:
                is_start[row, filled] = True


@cached_njit()
def _mask_weights(is_start, num_valid, mask_documents, weights):
    for row in range(len(weights)):
        weights[row, max(0, num_valid[row] - 1) :] = 0.0
        if mask_documents:
            for place in range(weights.shape[1]):
                if is_start[row, place + 1]:
                    weights[row, place] = 0.0


@cached_njit()
def _number_documents(is_start, positions, documents):
    for row in range(len(positions)):
        begin, number = 0, -1
        for place in range(positions.shape[1]):
            if is_start[row, place]:
                begin = place
                number += 1
            positions[row, place] = place - begin
            documents[row, place] = number


@dataclass(frozen=True)
class Window:
    """tokens: int64[sequence_length + 1]. starts: int64[n], where documents (or pieces) begin; 0 is always one.

    num_valid: tokens before the padding; those from there on are end-of-document tokens that nothing learns from."""

    tokens: np.ndarray
    starts: np.ndarray
    num_valid: int


class DocumentPiece(NamedTuple):
    """Tokens start to stop of a document, which is counted in the order of its file."""

    document: int
    start: int
    stop: int


class Order(Protocol):
    """The window at a place of an epoch, those at many places, and the place of a window."""

    def __call__(self, index: int) -> int: ...

    def inverse(self, value: int) -> int: ...

    def many(self, indices: np.ndarray) -> np.ndarray: ...


class Packing(Protocol):
    """num_windows: how many windows one epoch has. order: in which order an epoch of that key takes them. fill: writes
    windows into rows of a batch. pieces: of documents in a window, inputs and targets. windows_of: those with tokens of
    a document."""

    num_windows: int

    def window(self, index: int) -> Window: ...

    def pieces(self, index: int) -> list[DocumentPiece]: ...

    def windows_of(self, document: int) -> list[int]: ...

    def fill(self, batch: WindowBatch, rows: np.ndarray, indices: np.ndarray) -> None: ...

    def order(self, key: int) -> Order: ...


class Concat:
    """GPT's way: one stream of documents, cut every `sequence_length` tokens: window i begins at i * sequence_length.

    Neighbours share one token, which is the last target of one and the first input of the next: over an epoch every
    token but the stream's first and an incomplete last window is a target exactly once. Constant memory and time."""

    def __init__(self, reader: IndexedReader, sequence_length: int, end_of_document: int):
        self._reader = reader
        self._sequence_length, self._end = sequence_length, end_of_document
        self.num_windows = max(0, (reader.num_tokens - 1) // sequence_length)

    def window(self, index: int) -> Window:
        first = index * self._sequence_length
        tokens = self._reader.tokens[first : first + self._sequence_length + 1].astype(np.int64)
        ends = np.flatnonzero(tokens[:-2] == self._end)
        return Window(tokens, np.concatenate([_ZERO, ends + 1]), len(tokens))

    def pieces(self, index: int) -> list[DocumentPiece]:
        first = index * self._sequence_length
        last = first + self._sequence_length  # the target of the last input
        pieces, place = [], first
        while place <= last:
            document = self._reader.document_at(place)
            (start,), (end,) = self._reader.token_ranges(np.array([document]))
            pieces.append(DocumentPiece(document, place - int(start), min(last + 1, int(end)) - int(start)))
            place = int(end)
        return pieces

    def windows_of(self, document: int) -> list[int]:
        (start,), (end,) = self._reader.token_ranges(np.array([document]))
        # a window's last target is its neighbour's first input
        first = max(0, (int(start) - 1) // self._sequence_length)
        last = min(self.num_windows - 1, (int(end) - 1) // self._sequence_length)
        return list(range(first, last + 1)) if end > start else []

    def fill(self, batch: WindowBatch, rows: np.ndarray, indices: np.ndarray) -> None:
        firsts = indices * self._sequence_length
        stream = self._reader.with_ranges(firsts, np.full(len(firsts), self._sequence_length + 1))
        copy_windows(stream, firsts, rows, self._end, batch.tokens, batch.targets, batch.is_start, batch.num_valid)

    def order(self, key: int) -> Order:
        return Permutation(self.num_windows, key)


_ZERO = np.zeros(1, np.int64)

# Documents are packed in groups of so many neighbours: enough for best-fit to fill all windows but the last few (Ding
# et al. 2024 pack pools of this kind), few enough that a group is packed again in a millisecond.
GROUP_DOCUMENTS = 4096


class BestFit:
    """Documents stay whole where they fit (best-fit decreasing, Ding et al. 2024, arXiv:2404.10830), then padding.

    A document longer than a window is cut into full windows, which overlap by one token, and a remainder that is packed
    like a document. first_window: int64[groups + 1], where the windows of each group of 4096 documents begin
    (`first_windows`); a window packs its group again, so it is a pure function of the files too. An epoch goes from
    group to group, which the shuffle of the documents allows: it starts at a keyed place and takes the windows of a
    group in a keyed order."""

    def __init__(self, reader: IndexedReader, sequence_length: int, end_of_document: int, first_window: np.ndarray):
        self._reader, self._sequence_length, self._end = reader, sequence_length, end_of_document
        self._pack = lru_cache(maxsize=4)(self._pack_group)
        self._first_window = first_window
        self.num_windows = int(first_window[-1])

    def window(self, index: int) -> Window:
        group = int(group_of(self._first_window, index))
        edges, pieces = self._pack(group)
        place = index - int(self._first_window[group])
        tokens = np.full(self._sequence_length + 1, self._end, dtype=np.int64)
        starts, filled = [], 0
        for document_id, start, length in pieces[edges[place] : edges[place + 1]].tolist():
            tokens[filled : filled + length] = self._reader.document(document_id)[start : start + length]
            starts.append(filled)
            filled += length
        if filled < self._sequence_length:
            starts.append(filled)
        return Window(tokens, np.array(starts, dtype=np.int64), filled)

    def pieces(self, index: int) -> list[DocumentPiece]:
        group = int(group_of(self._first_window, index))
        edges, pieces = self._pack(group)
        place = index - int(self._first_window[group])
        chosen = pieces[edges[place] : edges[place + 1]].tolist()
        return [DocumentPiece(document, start, start + length) for document, start, length in chosen]

    def windows_of(self, document: int) -> list[int]:
        group = document // GROUP_DOCUMENTS
        edges, pieces = self._pack(group)
        places = np.searchsorted(edges, np.flatnonzero(pieces[:, 0] == document), side="right") - 1
        return (np.unique(places) + int(self._first_window[group])).tolist()

    def fill(self, batch: WindowBatch, rows: np.ndarray, indices: np.ndarray) -> None:
        groups = group_of(self._first_window, indices)
        for group, chosen in places_of_values(groups):
            edges, pieces = self._pack(group)
            places = indices[chosen] - self._first_window[group]
            counts = edges[places + 1] - edges[places]
            taken = pieces[np.repeat(edges[places] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())]
            starts, _ = self._reader.token_ranges(taken[:, 0])
            copied = np.stack([np.repeat(rows[chosen], counts), starts + taken[:, 1], taken[:, 2]], axis=1)
            stream = self._reader.with_ranges(copied[:, 1], copied[:, 2])
            copy_pieces(stream, copied, self._end, batch.tokens, batch.targets, batch.is_start, batch.num_valid)

    def order(self, key: int) -> Order:
        return GroupOrder(self._first_window, key)

    def _pack_group(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        return pack_group(self._reader, self._sequence_length, group)


class GroupOrder:
    """The order of one epoch of BestFit: from group to group, inside a group by a keyed permutation."""

    def __init__(self, first_window: np.ndarray, key: int):
        self._first_window, self._key = first_window, key
        self._inside = lru_cache(maxsize=4)(self._permutation)

    def __call__(self, index: int) -> int:
        return int(self.many(np.array([index]))[0])

    def inverse(self, value: int) -> int:
        num_windows = int(self._first_window[-1])
        group = int(group_of(self._first_window, value))
        first = int(self._first_window[group])
        return (first + self._inside(group).inverse(value - first) - self._key) % num_windows

    def many(self, indices: np.ndarray) -> np.ndarray:
        num_windows = int(self._first_window[-1])
        places = (indices + self._key % num_windows) % num_windows
        groups = group_of(self._first_window, places)
        for group, chosen in places_of_values(groups):
            first = self._first_window[group]
            places[chosen] = first + self._inside(group).many(places[chosen] - first)
        return places

    def _permutation(self, group: int) -> Permutation:
        windows = int(self._first_window[group + 1] - self._first_window[group])
        return Permutation(windows, key_of(self._key, group))


def group_of(first_window: np.ndarray, indices: Any) -> Any:
    """The group of documents that these windows are packed from."""
    return np.searchsorted(first_window, indices, side="right") - 1


def first_windows(reader: IndexedReader, sequence_length: int) -> np.ndarray:
    """int64[groups + 1]: the first window of each group of documents, and the number of windows. Reads all lengths."""
    counts = [
        len(pack_group(reader, sequence_length, group)[0]) - 1 for group in range(num_groups(reader.num_documents))
    ]
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def num_groups(num_documents: int) -> int:
    return -(-num_documents // GROUP_DOCUMENTS)


def pack_group(reader: IndexedReader, sequence_length: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """edges: int64[windows + 1]; pieces: int64[n, 3], columns (document, start in it, length), by window."""
    first = group * GROUP_DOCUMENTS
    last = min(first + GROUP_DOCUMENTS, reader.num_documents)
    pieces = cut(document_lengths(reader, first, last), sequence_length)
    windows = best_fit_decreasing(pieces[:, 2], sequence_length + 1)
    by_window = np.argsort(windows, kind="stable")
    counts = np.bincount(windows)
    pieces[:, 0] += first
    return np.concatenate([[0], np.cumsum(counts)]), pieces[by_window]


def document_lengths(reader: IndexedReader, first: int, last: int) -> np.ndarray:
    """int64[last - first]: tokens of each document, its sequences added up."""
    bounds = np.asarray(reader.bounds[first : last + 1])
    before = np.concatenate([[0], np.cumsum(reader.lengths[bounds[0] : bounds[-1]], dtype=np.int64)])
    return np.diff(before[bounds - bounds[0]])


def cut(lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    """Pieces of documents that fit a window, where consecutive pieces overlap by one token: int64[n, 3], columns
    (document, start, length).

    ([10, 3], sequence_length=4) -> [[0, 0, 5], [0, 4, 5], [0, 8, 2], [1, 0, 3]]: every token but the first is a target
    once."""
    counts = np.maximum(1, -(-(lengths - 1) // sequence_length))
    documents = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = number * sequence_length
    return np.stack([documents, starts, np.minimum(sequence_length + 1, lengths[documents] - starts)], axis=1).astype(
        np.int64
    )


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """int64[n]: the bin of each piece. The longest piece first, into the fullest bin that still takes it; of equally
    full bins into the one that has been so the longest.

    ([3, 5, 2, 4], capacity=6) -> [2, 0, 1, 1]: 5 opens bin 0, 4 bin 1, 3 bin 2; then 2 joins 4, which it fills."""
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), dtype=np.int64)
    bins[order] = _into_bins(np.ascontiguousarray(lengths[order]), capacity)
    return bins


@cached_njit()
def _into_bins(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Bins with equally much free space form a queue (first, last, following); every bin is in one queue."""
    bins = np.empty(len(lengths), dtype=np.int64)
    following = np.full(len(lengths) + 1, -1, dtype=np.int64)
    first = np.full(capacity + 1, -1, dtype=np.int64)
    last = np.full(capacity + 1, -1, dtype=np.int64)
    num_bins = 0
    for piece in range(len(lengths)):
        free = lengths[piece]
        while free <= capacity and first[free] < 0:
            free += 1
        if free > capacity:
            chosen, free = num_bins, capacity
            num_bins += 1
        else:
            chosen = first[free]
            first[free] = following[chosen]
        bins[piece] = chosen
        left = free - lengths[piece]
        following[chosen] = -1
        if first[left] < 0:
            first[left] = chosen
        else:
            following[last[left]] = chosen
        last[left] = chosen
    return bins


# The table that best-fit packing needs (`packing.first_windows`), kept beside the index: opening is one small read.
#
# cache/best_fit/KEY holds the SHA-256 of the rest, 32 bytes, then int64 little-endian, 8 bytes for 4096 documents.
# KEY names everything the table follows from, so a table of another file, sequence_length or version is never found.

VERSION = 1  # raised when packing changes
DIGEST_BYTES = 32
SAID_FROM_DOCUMENTS = 2_000_000  # about two seconds of packing


def kept_first_windows(
    folder: Path, reader: IndexedReader, identity: Any, sequence_length: int, info: Callable[[str], None]
) -> np.ndarray:
    """first_windows(reader, sequence_length), read if it was kept, else computed by one process and kept.

    identity: equal as long as the .idx holds the same bytes (verify.CheckedSource)."""
    path = table_path(folder, identity, sequence_length)
    groups = num_groups(reader.num_documents)
    if (table := read_table(path, groups)) is not None:
        return table
    with one_at_a_time(folder):
        if (table := read_table(path, groups)) is None:  # another rank may have packed meanwhile
            if reader.num_documents >= SAID_FROM_DOCUMENTS:
                info(f"{reader.prefix}: packing {reader.num_documents:,} documents, once; the table is kept")
            table = first_windows(reader, sequence_length)
            write_table(path, table)
    return table


def table_path(folder: Path, identity: Any, sequence_length: int) -> Path:
    key = fingerprint({"idx": identity, "context": sequence_length, "group": GROUP_DOCUMENTS, "version": VERSION})
    return folder / CACHE_FOLDER / "best_fit" / key


def write_table(path: Path, table: np.ndarray) -> None:
    """In a folder that cannot be written nothing happens."""
    body = table.astype("<i8").tobytes()
    write_cached_bytes(path, _digest(path.name, body) + body)


def read_table(path: Path, groups: int) -> np.ndarray | None:
    """None if there is no table, or it is damaged in any way."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body = content[DIGEST_BYTES:]
    if len(body) != 8 * (groups + 1) or content[:DIGEST_BYTES] != _digest(path.name, body):
        return None
    return np.frombuffer(body, "<i8")


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()
