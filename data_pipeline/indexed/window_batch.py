"""Many windows at once: their tokens, and what a model needs to know of the documents in them."""

from dataclasses import dataclass

import numpy as np

from gristmill.foundation.runtime.kernels.cached_njit import cached_njit


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
