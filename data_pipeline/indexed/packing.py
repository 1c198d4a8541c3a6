"""How the documents of one source become windows of context + 1 tokens: inputs and, one to the right, targets."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from gristmill.data_pipeline.indexed.reader import IndexedReader


@dataclass(frozen=True)
class Window:
    """tokens: int64[context + 1]. starts: int64[n], where documents (or pieces) begin; 0 is always one.

    num_valid: tokens before the padding; those from there on are end-of-document tokens that nothing learns from."""

    tokens: np.ndarray
    starts: np.ndarray
    num_valid: int


class Packing(Protocol):
    """num_windows: how many windows one epoch has."""

    num_windows: int

    def window(self, index: int) -> Window: ...


class Concat:
    """GPT's way: one stream of documents, cut every `context` tokens; window i is tokens i * context and on.

    Neighbours share one token, which is the last target of one and the first input of the next: over an epoch every
    token but the stream's first and an incomplete last window is a target exactly once. Constant memory and time."""

    def __init__(self, reader: IndexedReader, context: int, end_of_document: int):
        self._tokens = reader.tokens
        self._context, self._end = context, end_of_document
        self.num_windows = max(0, (reader.num_tokens - 1) // context)

    def window(self, index: int) -> Window:
        first = index * self._context
        tokens = self._tokens[first : first + self._context + 1].astype(np.int64)
        ends = np.flatnonzero(tokens[:-2] == self._end)
        return Window(tokens, np.concatenate([_ZERO, ends + 1]), len(tokens))


_ZERO = np.zeros(1, np.int64)

# Bins are packed within groups of so many documents: large enough to fill bins well (Ding et al. 2024, "Fewer
# Truncations Improve Language Modeling", find best-fit-decreasing on large pools all but lossless), small enough that
# the group of one sample is packed again in milliseconds.
GROUP_DOCUMENTS = 4096


class BestFit:
    """Documents stay whole where they fit (best-fit decreasing, Ding et al. 2024, arXiv:2404.10830), then padding.

    A document longer than a window is cut into full windows, which overlap by one token, and a remainder that is packed
    like a document. Opening reads all lengths once (a count of windows a group is kept, 8 bytes for 4096 documents);
    a window packs its group again, so it is a pure function of the files too."""

    def __init__(self, reader: IndexedReader, context: int, end_of_document: int):
        self._reader, self._context, self._end = reader, context, end_of_document
        num_groups = -(-reader.num_documents // GROUP_DOCUMENTS)
        # Sequential samples are permuted over all groups; a few packings of ~100 kB each are kept.
        self._pack = lru_cache(maxsize=64)(self._pack_group)
        counts = [len(self._pack_group(group)) for group in range(num_groups)]
        self._first_window = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_windows = int(self._first_window[-1])

    def window(self, index: int) -> Window:
        group = int(np.searchsorted(self._first_window, index, side="right")) - 1
        pieces = self._pack(group)[index - int(self._first_window[group])]
        tokens = np.full(self._context + 1, self._end, dtype=np.int64)
        starts, filled = [], 0
        for document_id, start, length in pieces:
            tokens[filled : filled + length] = self._reader.document(document_id)[start : start + length]
            starts.append(filled)
            filled += length
        if filled < self._context:
            starts.append(filled)
        return Window(tokens, np.array(starts, dtype=np.int64), filled)

    def _pack_group(self, group: int) -> list[list[tuple[int, int, int]]]:
        first = group * GROUP_DOCUMENTS
        last = min(first + GROUP_DOCUMENTS, self._reader.num_documents)
        lengths = document_lengths(self._reader, first, last)
        pieces = [
            (first + offset, start, length)
            for offset, total in enumerate(lengths.tolist())
            for start, length in cut(total, self._context)
        ]
        bins = best_fit_decreasing([length for _, _, length in pieces], self._context + 1)
        return [[pieces[piece] for piece in bin_] for bin_ in bins]


def document_lengths(reader: IndexedReader, first: int, last: int) -> np.ndarray:
    """int64[last - first]: tokens of each document, its sequences added up."""
    bounds = np.asarray(reader.bounds[first : last + 1])
    before = np.concatenate([[0], np.cumsum(reader.lengths[bounds[0] : bounds[-1]], dtype=np.int64)])
    return np.diff(before[bounds - bounds[0]])


def cut(length: int, context: int) -> list[tuple[int, int]]:
    """(start, length) of the pieces of a document; full ones overlap by one token, so that every token is a target.

    (10, context=4) -> [(0, 5), (4, 5), (8, 2)]: targets 1..4, 5..8 and 9."""
    pieces = []
    start = 0
    while length - start > context + 1:
        pieces.append((start, context + 1))
        start += context
    return [*pieces, (start, length - start)]


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Bins of piece numbers: the longest piece first, into the fullest bin that still takes it; ties to the older bin.

    ([3, 5, 2, 4], capacity=6) -> [[1], [3, 2], [0]]: 5; then 4; 3 opens a bin; 2 joins 4, the fullest that takes it."""
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # by room left: bins, the oldest last
    for piece in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[piece]
        room = next((room for room in range(length, capacity + 1) if with_room[room]), None)
        if room is None:
            bins.append([])
            chosen, room = len(bins) - 1, capacity
        else:
            chosen = with_room[room].pop(0)
        bins[chosen].append(piece)
        with_room[room - length].append(chosen)
    return bins
