"""Choose the next token of every sequence of a batch: penalties, filters and draws on the model's device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gristmill.evaluation.inference.config import SamplingConfig

# B rows, V vocabulary, N sampled rows, K kept tokens

BROKEN = -1  # in place of a token: the row's logits are not numbers
SORTED_TOKENS = 8192  # up to so many tokens are sorted; of more a histogram of their weights finds the limit first
WEIGHT_BITS = 15  # of a float32 weight that the histogram leaves out: bins differ by a factor of 1.004


class TokenCounts:
    """Tokens of a sequence and how often each was generated. Grows by one token a step."""

    def __init__(self, prompt: Iterable[int]):
        ids = sorted(set(prompt))
        self._place = {token: place for place, token in enumerate(ids)}
        self._ids = np.zeros(2 * len(ids) + 64, dtype=np.int64)
        self._ids[: len(ids)] = ids
        self._generated = np.zeros(len(self._ids))

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids, self._generated = (np.concatenate([old, np.zeros_like(old)]) for old in self.arrays())
        self._ids[place] = token
        self._generated[place] += 1

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids of the prompt's and the generated tokens, how often each was generated)."""
        count = len(self._place)
        return self._ids[:count], self._generated[:count]


@dataclass(frozen=True)
class LogitRules:
    """Rules of one request beside its sampling, by the names of the OpenAI API. The penalties count generated tokens.
    min_tokens: no token ends the text before so many are generated."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    @property
    def counts_tokens(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty)


NO_RULES = LogitRules()


@dataclass(frozen=True)
class RowChoice:
    """How the next token of one row is chosen. uniform: the draw, in [0, 1). counts: where a penalty asks for them.
    banned: tokens that may not come now. allowed: bool[V] of a grammar; None: all."""

    sampling: SamplingConfig
    uniform: float = 0.0
    rules: LogitRules = NO_RULES
    counts: TokenCounts | None = None
    banned: tuple[int, ...] = ()
    allowed: np.ndarray | None = field(default=None, compare=False)

    @property
    def changes_logits(self) -> bool:
        return bool(self.counts is not None or self.rules.logit_bias or self.banned or self.allowed is not None)


def choose_tokens(logits_BV: Tensor, rows: Sequence[RowChoice]) -> list[int]:
    """A token for each row, BROKEN where its logits are not numbers. Equal logits: the lowest id.

    The order is that of transformers: penalties, bias, banned tokens, temperature, top-k, top-p, min-p."""
    finite_B = torch.isfinite(logits_BV).all(dim=1)
    if any(row.changes_logits for row in rows):
        logits_BV = changed_logits(logits_BV, rows)
    tokens_B = logits_BV.argmax(dim=1)
    sampled = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if sampled:
        logits_NV = logits_BV if len(sampled) == len(rows) else logits_BV[sampled]
        drawn_N = draw_tokens(logits_NV, [rows[index] for index in sampled])
        tokens_B[torch.tensor(sampled, device=tokens_B.device)] = drawn_N
    return torch.where(finite_B, tokens_B, BROKEN).tolist()


def changed_logits(logits_BV: Tensor, rows: Sequence[RowChoice]) -> Tensor:
    """Logits after penalties, biases and bans; a copy."""
    logits_BV = logits_BV.clone()
    device, dtype = logits_BV.device, logits_BV.dtype
    for logits_V, row in zip(logits_BV, rows, strict=True):
        if row.counts is not None:
            ids, generated = (torch.from_numpy(array).to(device) for array in row.counts.arrays())
            logits_V[ids] = _penalized(logits_V[ids], generated.to(dtype), row)
        if row.rules.logit_bias:
            biased, values = zip(*row.rules.logit_bias, strict=True)
            logits_V[torch.tensor(biased, device=device)] += torch.tensor(values, device=device, dtype=dtype)
        if row.banned:
            logits_V[torch.tensor(row.banned, device=device)] = -torch.inf
        if row.allowed is not None:
            logits_V.masked_fill_(~torch.from_numpy(row.allowed).to(device), -torch.inf)
    return logits_BV


def _penalized(logits_K: Tensor, generated_K: Tensor, row: RowChoice) -> Tensor:
    """Repetition (CTRL) over all tokens, then presence and frequency over generated ones."""
    repetition = row.sampling.repetition_penalty
    logits_K = torch.where(logits_K < 0, logits_K * repetition, logits_K / repetition)
    return logits_K - row.rules.frequency_penalty * generated_K - row.rules.presence_penalty * (generated_K > 0)


def draw_tokens(logits_NV: Tensor, rows: Sequence[RowChoice]) -> Tensor:
    """int64[N]: tokens drawn by each row's temperature, filters and uniform number."""
    temperature_N1 = torch.tensor([[row.sampling.temperature] for row in rows], device=logits_NV.device)
    scaled_NV = (logits_NV - logits_NV.amax(dim=1, keepdim=True)) / temperature_N1.to(logits_NV.dtype)
    weights_NV = scaled_NV.exp_()
    if logits_NV.device.type == "cpu":
        return torch.tensor([_draw(*row_of) for row_of in zip(weights_NV, rows, strict=True)])
    return draw_sorted(weights_NV, rows)


def draw_sorted(weights_NV: Tensor, rows: Sequence[RowChoice]) -> Tensor:
    """Draws of all rows by one sort, for devices where a kernel costs more than its work."""
    weights_NV, ids_NV = weights_NV.double().sort(dim=1, descending=True, stable=True)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=weights_NV.device, dtype=torch.float64).unsqueeze(1)

    size = weights_NV.shape[1]
    top_k = column([float(row.sampling.top_k or size) for row in rows])
    weights_NV.masked_fill_(torch.arange(size, device=weights_NV.device) >= top_k, 0.0)
    sums_NV = weights_NV.cumsum(dim=1)
    limit = column([row.sampling.top_p if row.sampling.top_p is not None else 2.0 for row in rows])
    weights_NV.masked_fill_(sums_NV - weights_NV >= limit * sums_NV[:, -1:], 0.0)
    weights_NV.masked_fill_(weights_NV < column([row.sampling.min_p or 0.0 for row in rows]), 0.0)
    sums_NV = weights_NV.cumsum(dim=1)
    uniform = column([row.uniform for row in rows])
    places_N1 = torch.searchsorted(sums_NV, uniform * sums_NV[:, -1:], right=True)
    last_N1 = (weights_NV > 0).sum(dim=1, keepdim=True) - 1
    return ids_NV.gather(1, torch.minimum(places_N1, last_N1))[:, 0]


def _draw(weights_V: Tensor, row: RowChoice) -> int:
    """One row's draw. weights_V: probabilities as shares of the likeliest one's."""
    ids, weights = kept_tokens(weights_V, row.sampling)
    sums = np.cumsum(weights, dtype=np.float64)
    place = int(np.searchsorted(sums, row.uniform * sums[-1], side="right"))
    place = min(place, len(sums) - 1)
    while place and not weights[place]:  # rounding of the sum beyond the last kept token
        place -= 1
    return place if ids is None else int(ids[place])


def kept_tokens(weights_V: Tensor, sampling: SamplingConfig) -> tuple[np.ndarray | None, np.ndarray]:
    """(ids, weights) after top-k, top-p and min-p; or (None, weights of all tokens), with 0 for those not kept.

    top-p takes the likeliest tokens until their probabilities reach it: 0.5, 0.3, 0.2 and top_p 0.6 -> the first two.
    min-p keeps tokens with at least so large a share of the likeliest one's probability."""
    weights, floor = weights_V.numpy(), sampling.min_p or 0.0
    if sampling.top_k is not None and sampling.top_k < len(weights):
        return _within(*_largest(weights, sampling.top_k), sampling.top_p, floor)
    if sampling.top_p is None:
        return None, np.where(weights >= floor, weights, 0) if floor else weights
    total = float(weights_V.sum(dtype=torch.float64))
    # Tokens below this weight have together less than 1 - top_p of the mass, so none of them is kept.
    least = max((1.0 - sampling.top_p) * total / len(weights), floor)
    ids = np.flatnonzero(weights >= least)
    if len(ids) > SORTED_TOKENS:
        return _nucleus(ids, weights[ids], sampling.top_p * total)
    order = np.argsort(-weights[ids], kind="stable")
    ids = ids[order]
    return _within(ids, weights[ids], sampling.top_p, floor, total)


def _largest(weights: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights) of the largest, largest first; of equal ones the lowest ids."""
    ids = likeliest(weights, count)
    return ids, weights[ids]


def _within(
    ids: np.ndarray, weights: np.ndarray, top_p: float | None, floor: float, total: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The part of sorted tokens within top-p of the total (None: of these tokens') and not below the floor."""
    sums = np.cumsum(weights, dtype=np.float64)
    inside = weights >= floor
    if top_p is not None:
        inside &= sums - weights < top_p * (sums[-1] if total is None else total)
    count = max(1, int(inside.sum()))
    return ids[:count], weights[:count]


def _nucleus(ids: np.ndarray, weights: np.ndarray, mass: float) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest of many tokens until they have this mass. A histogram finds the bin in which it is reached; only
    that bin is sorted, so that a flat distribution costs one pass over its tokens."""
    bins = weights.astype(np.float32).view(np.int32) >> WEIGHT_BITS
    lowest = int(bins.min())
    masses = np.bincount(bins - lowest, weights=weights)[::-1].cumsum()
    reached = min(int(np.searchsorted(masses, mass, side="left")), len(masses) - 1)
    boundary = len(masses) - 1 - reached + lowest
    above, inside = np.flatnonzero(bins > boundary), np.flatnonzero(bins == boundary)
    inside = inside[np.argsort(-weights[inside], kind="stable")]
    before = weights[above].sum(dtype=np.float64) + np.cumsum(weights[inside], dtype=np.float64) - weights[inside]
    kept = np.concatenate([above, inside[before < mass]])
    return ids[kept], weights[kept]


def likeliest(values_V: np.ndarray, count: int) -> np.ndarray:
    """Ids of the largest values, largest first; of equal ones the lowest id first. Sorts no more than it returns."""
    if count >= len(values_V):
        return np.argsort(-values_V, kind="stable")
    limit = np.partition(values_V, len(values_V) - count)[len(values_V) - count]
    above = np.flatnonzero(values_V > limit)
    equal = np.flatnonzero(values_V == limit)[: count - len(above)]
    kept = np.concatenate([above, equal])
    return kept[np.lexsort((kept, -values_V[kept]))]
