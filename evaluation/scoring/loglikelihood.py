"""Log-likelihoods of continuations, batched."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gristmill.evaluation.models.backbone import Backbone
from gristmill.evaluation.scoring.packing import Request, Row, batches, model_inputs, pack
from gristmill.foundation.errors import InputError

# B rows, T tokens, D width, V vocabulary, N scored positions

NOT_NUMBERS = "the model's logits are not numbers (NaN or infinity): the checkpoint is broken, or training diverged"
ROW_TOKENS = 1024  # attention within a row is quadratic; at width 256 it costs what the matrices cost at T = 6 x width
LOGIT_FLOATS = 1 << 20  # cells (position, vocabulary) that are made at a time: 4 MiB, which a CPU's cache holds
LOGIT_FLOATS_GPU = 1 << 26


class Score:
    """logprob: natural logarithm of the continuation's probability. greedy: is each of its tokens the likeliest?"""

    __slots__ = ("greedy", "logprob")

    def __init__(self, logprob: float, greedy: bool):
        self.logprob, self.greedy = logprob, greedy


class Scores(list[Score]):
    """One score a request. read_tokens: tokens the model read; asked_tokens: what one row a request would have read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_tokens = self.asked_tokens = 0


def score(
    backbone: Backbone,
    requests: Sequence[Request],
    batch_tokens: int,
    share: bool = True,
    advance: Callable[[int], None] = lambda done: None,
) -> Scores:
    """Scores in the order of the requests. `advance` is told how many requests each batch settled.

    Raises InputError if the model's output is not a number."""
    found = Scores()
    if not requests:
        return found
    inputs = [model_inputs(request, backbone.sequence_length) for request in requests]
    found.asked_tokens = sum(len(item.tokens) for item in inputs)
    found.extend([Score(0.0, False)] * len(requests))
    for lot in batches(pack(inputs, ROW_TOKENS, share), batch_tokens):
        found.read_tokens += sum(len(row.tokens) for row in lot)
        for request_id, result in _score_lot(backbone, lot, requests):
            found[request_id] = result
        advance(sum(len(row.request_ids) for row in lot))
    return found


@torch.inference_mode()
def _score_lot(backbone: Backbone, lot: Sequence[Row], requests: Sequence[Request]) -> list[tuple[int, Score]]:
    hidden_BTD = _hidden(backbone, lot)
    asked = [
        (request_id, row_index, row.nodes[place])
        for row_index, row in enumerate(lot)
        for place, request_id in enumerate(row.request_ids)
    ]
    width = max(len(row.tokens) for row in lot)
    flat_N = np.concatenate([row_index * width + nodes for _, row_index, nodes in asked])
    targets_N = np.concatenate([np.array(requests[request_id].continuation) for request_id, _, _ in asked])
    logprobs_N, greedy_N = _token_scores(backbone, hidden_BTD.flatten(0, 1), flat_N, targets_N)
    results, first = [], 0
    for request_id, _, nodes in asked:
        own = slice(first, first + len(nodes))
        results.append((request_id, Score(float(logprobs_N[own].sum()), bool(greedy_N[own].all()))))
        first += len(nodes)
    return results


def _hidden(backbone: Backbone, lot: Sequence[Row]) -> torch.Tensor:
    """h_BTD of the rows, padded on the right; what padding gives is never read."""
    width = max(len(row.tokens) for row in lot)
    tokens_BT = np.zeros((len(lot), width), dtype=np.int64)
    for index, row in enumerate(lot):
        tokens_BT[index, : len(row.tokens)] = row.tokens
    tokens = torch.from_numpy(tokens_BT).to(backbone.device)
    if all(row.is_chain for row in lot):
        return backbone.hidden(tokens, None, None)
    positions_BT = np.zeros((len(lot), width), dtype=np.int64)
    visible_BTT = np.zeros((len(lot), width, width), dtype=bool)
    visible_BTT[:, np.arange(width), np.arange(width)] = True  # a row of the softmax may not be empty
    for index, row in enumerate(lot):
        size = len(row.tokens)
        positions_BT[index, :size] = row.positions
        visible_BTT[index, :size, :size] = row.visible()
    positions = torch.from_numpy(positions_BT).to(backbone.device)
    return backbone.hidden(tokens, positions, torch.from_numpy(visible_BTT).to(backbone.device))


def _token_scores(
    backbone: Backbone, hidden_MD: torch.Tensor, flat_N: np.ndarray, targets_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability float64[N], likeliest? bool[N]). A position asked for several targets is computed once."""
    positions_U, inverse_N = np.unique(flat_N, return_inverse=True)
    logprobs_N = np.empty(len(flat_N), dtype=np.float64)
    greedy_N = np.empty(len(flat_N), dtype=bool)
    by_position = np.argsort(inverse_N, kind="stable")
    cells = LOGIT_FLOATS if backbone.device.type == "cpu" else LOGIT_FLOATS_GPU
    step = max(1, cells // backbone.vocab_size)
    for first in range(0, len(positions_U), step):
        chosen = torch.from_numpy(positions_U[first : first + step]).to(backbone.device)
        logprobs_UV = torch.log_softmax(at_least_float32(backbone.head(hidden_MD[chosen])), dim=-1)
        low, high = np.searchsorted(inverse_N[by_position], [first, first + len(chosen)])
        asked_N = by_position[low:high]
        rows = torch.from_numpy(inverse_N[asked_N] - first).to(backbone.device)
        targets = torch.from_numpy(targets_N[asked_N]).to(backbone.device)
        wanted_N = logprobs_UV[rows, targets]
        if torch.isnan(wanted_N).any():
            raise InputError(NOT_NUMBERS)
        logprobs_N[asked_N] = wanted_N.double().cpu().numpy()
        greedy_N[asked_N] = _likeliest(logprobs_UV, rows, targets, wanted_N).cpu().numpy()
    return logprobs_N, greedy_N


def _likeliest(
    logprobs_UV: torch.Tensor, rows_N: torch.Tensor, targets_N: torch.Tensor, wanted_N: torch.Tensor
) -> torch.Tensor:
    """bool[N]: is the target the first of the likeliest tokens? Finding its place in a row takes ten times as long
    as finding the highest value, so only rows whose target has that value are searched."""
    greedy_N = wanted_N == logprobs_UV.amax(dim=-1)[rows_N]
    maybe = greedy_N.nonzero()[:, 0]
    greedy_N[maybe] = logprobs_UV[rows_N[maybe]].argmax(dim=-1) == targets_N[maybe]
    return greedy_N


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """A sum over a vocabulary needs float32; float64 stays, for proofs."""
    return logits if logits.dtype == torch.float64 else logits.float()
