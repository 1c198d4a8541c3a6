"""Log-likelihoods of continuations, batched."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gristmill.evaluation.models.causal_lm import CausalLM
from gristmill.evaluation.scoring.packing import Request, Row, batches, model_inputs, pack
from gristmill.foundation.errors import InputError

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
    found = Scores()
    if not requests:
        return found
    inputs = [model_inputs(request, causal_lm.sequence_length) for request in requests]
    found.unpacked_tokens = sum(len(item.tokens) for item in inputs)
    found.extend([Score(0.0, False)] * len(requests))
    for batch in batches(pack(inputs, ROW_TOKENS, share and causal_lm.reads_trees), batch_tokens):
        found.read_tokens += sum(len(row.tokens) for row in batch)
        for request_id, result in _score_batch(causal_lm, batch, requests):
            found[request_id] = result
        advance(sum(len(row.request_ids) for row in batch))
    return found


@torch.inference_mode()
def _score_batch(causal_lm: CausalLM, batch: Sequence[Row], requests: Sequence[Request]) -> list[tuple[int, Score]]:
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


def _hidden(causal_lm: CausalLM, batch: Sequence[Row], positions_U: np.ndarray) -> torch.Tensor:
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
