"""Choose the next token: greedy, or sampled with temperature, top-k, top-p, min-p and a repetition penalty."""

from collections.abc import Sequence

import numpy as np

from gristmill.evaluation.config import SamplingConfig
from gristmill.foundation.errors import InputError

# V vocabulary

NOT_FINITE = "the model's logits are not numbers (NaN or infinity): the checkpoint is broken or diverged"


def sample_token(logits_V: np.ndarray, sampling: SamplingConfig, seen: set[int], rng: np.random.Generator) -> int:
    """The next token. Penalty, temperature, top-k, top-p and min-p in the order of transformers; equal logits: lowest
    id. Raises InputError for logits that are not numbers.

    logits [2, 1, -1], penalty 2 on tokens 0 and 2 -> [1, 1, -2]: token 0 of the two equals."""
    logits = np.array(logits_V, dtype=np.float64)
    if not np.isfinite(logits).all():
        raise InputError(NOT_FINITE)
    if sampling.repetition_penalty != 1.0 and seen:
        ids = np.fromiter(seen, dtype=np.int64)
        logits[ids] = np.where(
            logits[ids] < 0, logits[ids] * sampling.repetition_penalty, logits[ids] / sampling.repetition_penalty
        )
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    kept, weights = candidates(logits / sampling.temperature, sampling)
    return int(kept[min(np.searchsorted(np.cumsum(weights), rng.random(), side="right"), len(kept) - 1)])


def candidates(logits_V: np.ndarray, sampling: SamplingConfig) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, their probabilities) after top-k, top-p and min-p, most likely first; at least one.

    top-p takes the likeliest tokens until their probabilities reach it: 0.5, 0.3, 0.2 and top_p 0.6 -> 0.625, 0.375.
    min-p keeps tokens with at least so large a share of the likeliest one's probability: min_p 0.5 -> the same two."""
    kept = likeliest(logits_V, sampling.top_k or len(logits_V))
    weights = np.exp(logits_V[kept] - logits_V[kept[0]])
    weights /= weights.sum()
    if sampling.top_p is not None:
        inside = np.cumsum(weights) - weights < sampling.top_p
        kept, weights = kept[inside], weights[inside]
    if sampling.min_p is not None:
        inside = weights >= sampling.min_p * weights[0]
        kept, weights = kept[inside], weights[inside]
    return kept, weights / weights.sum()


def likeliest(logits_V: np.ndarray, count: int) -> np.ndarray:
    """Ids of the largest logits, largest first; of equal ones the lowest id first. Sorts no more than it returns."""
    if count >= len(logits_V):
        return np.argsort(-logits_V, kind="stable")
    limit = np.partition(logits_V, len(logits_V) - count)[len(logits_V) - count]
    above = np.flatnonzero(logits_V > limit)
    equal = np.flatnonzero(logits_V == limit)[: count - len(above)]
    kept = np.concatenate([above, equal])
    return kept[np.lexsort((kept, -logits_V[kept]))]


def log_softmax(logits_V: np.ndarray) -> np.ndarray:
    """Natural log-probabilities, float64."""
    shifted = logits_V.astype(np.float64) - float(logits_V.max())
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return found


def top_logprobs(logprobs_V: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest (token, log-probability), best first."""
    ids: Sequence[int] = likeliest(logprobs_V, count).tolist() if count else []
    return tuple((token, float(logprobs_V[token])) for token in ids)
