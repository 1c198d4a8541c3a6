"""Requests packed into rows: a prefix that requests share is in the row once.

A row is a flattened tree of tokens: a question once, then each answer, whose parent is the question's last
token. A token attends to its ancestors and itself only, and its position is its depth, so each path through the
tree gives the logits of the request alone. It serves the choices of a question, single-token choices (one node, several
targets), the shared examples of few-shot prompts, and minimal pairs of sentences, without special cases."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.foundation.errors import InputError

MIN_SHARED_FRACTION = 0.25  # with fewer tokens in common a request gets its own row: a mask costs more than it saves
MIN_BATCH_TOKENS = 256  # from here on, a layer's matrices are read from memory less often than they are computed with
MIN_FILL = 0.8


@dataclass(frozen=True)
class Request:
    """Score `continuation` after `context`. Both are token ids, neither is empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One tree. tokens, positions: int64[N]. segments: (first node, end node, parent node or -1), in order; within a
    segment each node's parent is the node before it. nodes[i]: the nodes whose logits score request_ids[i]."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: tuple[tuple[int, int, int], ...]
    request_ids: tuple[int, ...]
    nodes: tuple[np.ndarray, ...]

    @property
    def is_chain(self) -> bool:
        return len(self.segments) == 1

    def visible(self) -> np.ndarray:
        """bool[N, N]: does the node of the row attend to the node of the column?"""
        size = len(self.tokens)
        seen = np.zeros((size, size), dtype=bool)
        for first, end, parent in self.segments:
            if parent >= 0:
                seen[first:end] = seen[parent]
            seen[first:end, first:end] = np.tri(end - first, dtype=bool)
        return seen


@dataclass(frozen=True)
class Inputs:
    """tokens: the model's input, without the last token of the continuation. scored: the number of last positions
    that predict the continuation."""

    tokens: tuple[int, ...]
    scored: int


def model_inputs(request: Request, sequence_length: int) -> Inputs:
    """Model inputs of a request. Context (1, 2, 3), continuation (4, 5), at most 3 tokens -> (2, 3, 4), the last 2
    scored.

    Raises InputError if the continuation alone is longer than the model's context."""
    if len(request.continuation) > sequence_length:
        raise InputError(
            f"a continuation of {len(request.continuation)} tokens does not fit the model's context of "
            f"{sequence_length}: leave that task out, or evaluate a model with a longer context"
        )
    whole = request.context + request.continuation
    kept = whole[-(sequence_length + 1) :]
    return Inputs(tokens=kept[:-1], scored=len(request.continuation))


def pack(inputs: Sequence[Inputs], row_tokens: int, share: bool = True) -> list[Row]:
    """Rows of at most row_tokens nodes (one long request may have more), largest first. Each input is in one row.

    Sorted, each request stands beside the one it shares most with. share=False gives each a row of its own."""
    order = sorted(range(len(inputs)), key=lambda index: inputs[index].tokens)
    rows: list[Row] = []
    tree = _Tree()
    for index in order:
        tokens = inputs[index].tokens
        common = tree.common(tokens) if share else 0
        too_long = tree.size + len(tokens) - common > row_tokens
        if tree.size and (too_long or common < max(1, MIN_SHARED_FRACTION * len(tokens))):
            rows.append(tree.row())
            tree, common = _Tree(), 0
        tree.add(index, inputs[index], common)
    if tree.size:
        rows.append(tree.row())
    return sorted(rows, key=lambda row: (-len(row.tokens), row.request_ids[0]))


def batches(rows: Sequence[Row], batch_tokens: int) -> list[list[Row]]:
    """Batches whose row count times longest row is at most batch_tokens; a longer row is a batch of its own.

    Chains and trees are batched apart: chains need no mask. Longest first: the first batch needs most memory. A much
    shorter row starts a new batch if the current one is large enough: padding costs compute too."""
    all_batches: list[list[Row]] = []
    for is_chain in (True, False):
        batch: list[Row] = []
        for row in (row for row in rows if row.is_chain == is_chain):
            longest = len(batch[0].tokens) if batch else 0
            large_enough = len(batch) * longest >= MIN_BATCH_TOKENS and len(row.tokens) < MIN_FILL * longest
            if batch and ((len(batch) + 1) * longest > batch_tokens or large_enough):
                all_batches.append(batch)
                batch = []
            batch.append(row)
        if batch:
            all_batches.append(batch)
    return all_batches


class _Tree:
    """Builds one row. `path` holds the nodes of the request added last."""

    def __init__(self) -> None:
        self.size = 0
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[tuple[int, int, int]] = []
        self.request_ids: list[int] = []
        self.nodes: list[np.ndarray] = []
        self.path = np.zeros(0, dtype=np.int64)
        self.last: tuple[int, ...] = ()

    def common(self, tokens: tuple[int, ...]) -> int:
        """Length of the common prefix with the request added last."""
        length = min(len(tokens), len(self.last))
        if tokens[:length] == self.last[:length]:
            return length
        return next(i for i in range(length) if tokens[i] != self.last[i])

    def add(self, index: int, inputs: Inputs, common: int) -> None:
        new = inputs.tokens[common:]
        first, end = self.size, self.size + len(new)
        if new:
            self.segments.append((first, end, int(self.path[common - 1]) if common else -1))
            self.tokens += new
            self.positions += range(common, len(inputs.tokens))
        self.path = np.concatenate([self.path[:common], np.arange(first, end)])
        self.last, self.size = inputs.tokens, end
        self.request_ids.append(index)
        self.nodes.append(self.path[len(self.path) - inputs.scored :])

    def row(self) -> Row:
        return Row(
            tokens=np.array(self.tokens, dtype=np.int64),
            positions=np.array(self.positions, dtype=np.int64),
            segments=self._merged_segments(),
            request_ids=tuple(self.request_ids),
            nodes=tuple(self.nodes),
        )

    def _merged_segments(self) -> tuple[tuple[int, int, int], ...]:
        """Merges a segment that continues the previous one into the same chain."""
        merged: list[tuple[int, int, int]] = []
        for first, end, parent in self.segments:
            if merged and parent == first - 1 and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], end, merged[-1][2])
            else:
                merged.append((first, end, parent))
        return tuple(merged)
