"""Log-likelihoods of continuations, batched."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.foundation.errors import InputError

# Requests packed into rows: a prefix that requests share is in the row once.
#
# A row is a flattened tree of tokens: a question once, then each answer, whose parent is the question's last token. A
# token attends to its ancestors and itself only, and its position is its depth, so each path through the tree gives
# the logits of the request alone. It serves the choices of a question, single-token choices (one node, several
# targets), the shared examples of few-shot prompts, and minimal pairs of sentences, without special cases.

MIN_SHARED_FRACTION = 0.25  # with fewer tokens in common a request gets its own row: a mask costs more than it saves
MIN_BATCH_TOKENS = 256  # from here on, a layer's matrices are read from memory less often than they are computed with
MIN_FILL = 0.8


@dataclass(frozen=True)
class Request:
    """Score `continuation` after `context`. Both are token ids, neither is empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class ScoringRow:
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


def pack(inputs: Sequence[Inputs], row_tokens: int, share: bool = True) -> list[ScoringRow]:
    """Rows of at most row_tokens nodes (one long request may have more), largest first. Each input is in one row.

    Sorted, each request stands beside the one it shares most with. share=False gives each a row of its own."""
    order = sorted(range(len(inputs)), key=lambda index: inputs[index].tokens)
    rows: list[ScoringRow] = []
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


def batches(rows: Sequence[ScoringRow], batch_tokens: int) -> list[list[ScoringRow]]:
    """Batches whose row count times longest row is at most batch_tokens; a longer row is a batch of its own.

    Chains and trees are batched apart: chains need no mask. Longest first: the first batch needs most memory. A much
    shorter row starts a new batch if the current one is large enough: padding costs compute too."""
    all_batches: list[list[ScoringRow]] = []
    for is_chain in (True, False):
        batch: list[ScoringRow] = []
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

    def row(self) -> ScoringRow:
        return ScoringRow(
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


# B rows, T tokens, D width, V vocabulary, N scored positions

NOT_FINITE = "the model's logits are not numbers (NaN or infinity): the checkpoint is broken, or training diverged"
ROW_TOKENS = 1024  # attention within a row is quadratic; at width 256 it costs what the matrices cost at T = 6 x width
LOGIT_FLOATS = 1 << 20  # logits (position x vocabulary) computed at a time: 4 MiB, which a CPU's cache holds
LOGIT_FLOATS_GPU = 1 << 26


class Score:
    """logprob: natural logarithm of the continuation's probability. greedy: is each token the argmax?"""

    __slots__ = ("greedy", "logprob")

    def __init__(self, logprob: float, greedy: bool):
        self.logprob, self.greedy = logprob, greedy


class Scores(list[Score]):
    """One score per request. read_tokens: input tokens; unpacked_tokens: those of one row per request."""

    def __init__(self) -> None:
        super().__init__()
        self.read_tokens = self.unpacked_tokens = 0


def score(
    causal_lm: CausalLM,
    requests: Sequence[Request],
    batch_tokens: int,
    share: bool = True,
    advance: Callable[[int], None] = lambda done: None,
) -> Scores:
    """Scores in the order of the requests. `advance` is called with the number of requests of each batch.

    Raises InputError if the model's output is not a number."""
    scores = Scores()
    if not requests:
        return scores
    inputs = [model_inputs(request, causal_lm.sequence_length) for request in requests]
    scores.unpacked_tokens = sum(len(item.tokens) for item in inputs)
    scores.extend([Score(0.0, False)] * len(requests))
    for batch in batches(pack(inputs, ROW_TOKENS, share and causal_lm.reads_trees), batch_tokens):
        scores.read_tokens += sum(len(row.tokens) for row in batch)
        for request_id, result in _score_batch(causal_lm, batch, requests):
            scores[request_id] = result
        advance(sum(len(row.request_ids) for row in batch))
    return scores


@torch.inference_mode()
def _score_batch(
    causal_lm: CausalLM, batch: Sequence[ScoringRow], requests: Sequence[Request]
) -> list[tuple[int, Score]]:
    scored = [
        (request_id, row_index, row.nodes[place])
        for row_index, row in enumerate(batch)
        for place, request_id in enumerate(row.request_ids)
    ]
    width = max(len(row.tokens) for row in batch)
    flat_N = np.concatenate([row_index * width + nodes for _, row_index, nodes in scored])
    targets_N = np.concatenate([np.array(requests[request_id].continuation) for request_id, _, _ in scored])
    positions_U, inverse_N = np.unique(flat_N, return_inverse=True)
    hidden_UD = _hidden(causal_lm, batch, positions_U)
    logprobs_N, greedy_N = _token_scores(causal_lm, hidden_UD, inverse_N, targets_N)
    results, first = [], 0
    for request_id, _, nodes in scored:
        own = slice(first, first + len(nodes))
        results.append((request_id, Score(float(logprobs_N[own].sum()), bool(greedy_N[own].all()))))
        first += len(nodes)
    return results


def _hidden(causal_lm: CausalLM, batch: Sequence[ScoringRow], positions_U: np.ndarray) -> torch.Tensor:
    """Hidden states [U, D] at these places of the rows, which are padded on the right and stand one after another."""
    width = max(len(row.tokens) for row in batch)
    tokens_BT = np.zeros((len(batch), width), dtype=np.int64)
    for index, row in enumerate(batch):
        tokens_BT[index, : len(row.tokens)] = row.tokens
    tokens = torch.from_numpy(tokens_BT).to(causal_lm.device)
    wanted = torch.from_numpy(positions_U).to(causal_lm.device)
    if all(row.is_chain for row in batch):
        return causal_lm.hidden(tokens, wanted_N=wanted)
    positions_BT = np.zeros((len(batch), width), dtype=np.int64)
    visible_BTT = np.zeros((len(batch), width, width), dtype=bool)
    visible_BTT[:, np.arange(width), np.arange(width)] = True  # a row of the softmax may not be empty
    for index, row in enumerate(batch):
        size = len(row.tokens)
        positions_BT[index, :size] = row.positions
        visible_BTT[index, :size, :size] = row.visible()
    positions = torch.from_numpy(positions_BT).to(causal_lm.device)
    return causal_lm.hidden(tokens, positions, torch.from_numpy(visible_BTT).to(causal_lm.device), wanted)


def _token_scores(
    causal_lm: CausalLM, hidden_UD: torch.Tensor, inverse_N: np.ndarray, targets_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability float64[N], is it the argmax? bool[N]). inverse_N: the row of hidden_UD of each target; one with
    several targets is computed once."""
    logprobs_N = np.empty(len(inverse_N), dtype=np.float64)
    greedy_N = np.empty(len(inverse_N), dtype=bool)
    by_position = np.argsort(inverse_N, kind="stable")
    cells = LOGIT_FLOATS if causal_lm.device.type == "cpu" else LOGIT_FLOATS_GPU
    step = max(1, cells // causal_lm.vocab_size)
    for first in range(0, len(hidden_UD), step):
        chosen = hidden_UD[first : first + step]
        logprobs_UV = torch.log_softmax(float32_or_wider(causal_lm.head(chosen)), dim=-1)
        low, high = np.searchsorted(inverse_N[by_position], [first, first + len(chosen)])
        own_N = by_position[low:high]
        rows = torch.from_numpy(inverse_N[own_N] - first).to(causal_lm.device)
        targets = torch.from_numpy(targets_N[own_N]).to(causal_lm.device)
        wanted_N = logprobs_UV[rows, targets]
        if torch.isnan(wanted_N).any():
            raise InputError(NOT_FINITE)
        logprobs_N[own_N] = wanted_N.double().cpu().numpy()
        greedy_N[own_N] = _is_argmax(logprobs_UV, rows, targets, wanted_N).cpu().numpy()
    return logprobs_N, greedy_N


def _is_argmax(
    logprobs_UV: torch.Tensor, rows_N: torch.Tensor, targets_N: torch.Tensor, wanted_N: torch.Tensor
) -> torch.Tensor:
    """bool[N]: is the target the argmax (lowest id among equals)? argmax takes ten times as long as amax, so it is
    computed only for rows whose target has the maximum."""
    greedy_N = wanted_N == logprobs_UV.amax(dim=-1)[rows_N]
    maybe = greedy_N.nonzero()[:, 0]
    greedy_N[maybe] = logprobs_UV[rows_N[maybe]].argmax(dim=-1) == targets_N[maybe]
    return greedy_N


def float32_or_wider(logits: torch.Tensor) -> torch.Tensor:
    """Upcasts to float32, which sums over a vocabulary need; float64 is kept for tests."""
    return logits if logits.dtype == torch.float64 else logits.float()
