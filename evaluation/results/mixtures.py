"""Losses of small runs over mixtures of sources: a law for each validation set, and the mixture that it recommends.

The law is that of Ye et al. 2024 ("Data Mixing Laws", arXiv 2403.16952, equation 1): the loss on one set is
c + exp(a + b . w) for the weights w of the sources. Each set has its own law, and predictions are averaged: a mean of
such laws is no such law. It is convex in the weights, so the best mixture under bounds is found by any descent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares, minimize

from gristmill.foundation.errors import InputError

PENALTY = 0.01  # on the slopes, in standard deviations of the loss: keeps laws of few runs from extremes
OFFSETS = (0.05, 0.5)  # starts of c, below the least loss, in ranges of the losses
MAX_EXPONENT = 30.0
RESAMPLES = 50
MIN_RUNS = 4


@dataclass(frozen=True)
class MixtureLaw:
    """offset + exp(intercept + slopes . weights)."""

    offset: float
    intercept: float
    slopes: tuple[float, ...]

    def predict(self, weights_MS: np.ndarray) -> np.ndarray:
        """float64[mixtures]."""
        exponents = np.clip(self.intercept + weights_MS @ np.array(self.slopes), -MAX_EXPONENT, MAX_EXPONENT)
        return self.offset + np.exp(exponents)


def fit_law(weights_RS: np.ndarray, losses_R: np.ndarray) -> MixtureLaw:
    """The law of one validation set by least squares. weights_RS: of the runs, each row with the sum 1.

    Raises InputError for fewer than MIN_RUNS runs, and where all losses are equal."""
    if len(losses_R) < MIN_RUNS:
        raise InputError(f"{len(losses_R)} runs; at least {MIN_RUNS} are needed to fit a law of mixtures")
    spread = float(np.std(losses_R))
    if spread == 0:
        raise InputError(
            f"all {len(losses_R)} runs have the loss {losses_R[0]:g}; the mixtures do not differ in effect"
        )
    columns = np.column_stack([np.ones(len(losses_R)), weights_RS])

    def residuals(parameters: np.ndarray) -> np.ndarray:
        exponents = np.clip(columns @ parameters[1:], -MAX_EXPONENT, MAX_EXPONENT)
        return np.concatenate([(parameters[0] + np.exp(exponents) - losses_R) / spread, PENALTY * parameters[2:]])

    solutions = []
    for share in OFFSETS:
        offset = losses_R.min() - share * np.ptp(losses_R)
        normal = columns.T @ columns + 1e-3 * np.eye(columns.shape[1])
        start = np.linalg.solve(normal, columns.T @ np.log(losses_R - offset))
        solutions.append(least_squares(residuals, np.concatenate([[offset], start]), max_nfev=200))
    offset, intercept, *slopes = min(solutions, key=lambda solution: solution.cost).x.tolist()
    return MixtureLaw(offset, intercept, tuple(slopes))


def mean_prediction(laws: Sequence[MixtureLaw], weights_MS: np.ndarray) -> np.ndarray:
    return np.mean([law.predict(weights_MS) for law in laws], axis=0)


@dataclass(frozen=True)
class Proposal:
    """weights: of the sources. low, high: their 90 % range over resampled runs. loss: predicted mean over the sets."""

    weights: np.ndarray
    low: np.ndarray
    high: np.ndarray
    loss: float


def propose(
    weights_RS: np.ndarray, losses_RV: np.ndarray, lowest_S: np.ndarray, highest_S: np.ndarray, seed: int = 0
) -> Proposal:
    """The mixture with the least mean loss over the validation sets between bounds of each source's weight.

    Raises InputError if no mixture is between the bounds."""
    if lowest_S.sum() > 1 + 1e-9 or highest_S.sum() < 1 - 1e-9 or (lowest_S > highest_S).any():
        raise InputError(
            f"no mixture is between these bounds: floors sum to {lowest_S.sum():.3g}, caps to {highest_S.sum():.3g}"
        )
    laws = [fit_law(weights_RS, losses) for losses in losses_RV.T]
    best = optimum(laws, lowest_S, highest_S)
    rng = np.random.default_rng(seed)
    resampled = []
    for _ in range(RESAMPLES):
        chosen = rng.integers(0, len(weights_RS), len(weights_RS))
        if min(np.ptp(losses_RV[chosen], axis=0)) > 0:
            laws_of_sample = [fit_law(weights_RS[chosen], losses[chosen]) for losses in losses_RV.T]
            resampled.append(optimum(laws_of_sample, lowest_S, highest_S))
    low, high = np.quantile(resampled or [best], (0.05, 0.95), axis=0)
    return Proposal(best, low, high, float(mean_prediction(laws, best[None])[0]))


def optimum(laws: Sequence[MixtureLaw], lowest_S: np.ndarray, highest_S: np.ndarray) -> np.ndarray:
    """The weights with the least mean prediction."""
    slopes_VS = np.array([law.slopes for law in laws])
    room = highest_S - lowest_S
    start = lowest_S + room * ((1 - lowest_S.sum()) / max(room.sum(), 1e-12))

    def gradient(weights: np.ndarray) -> np.ndarray:
        exponents = np.clip([law.intercept for law in laws] + slopes_VS @ weights, -MAX_EXPONENT, MAX_EXPONENT)
        return np.exp(exponents) @ slopes_VS / len(laws)

    solution = minimize(
        lambda weights: float(mean_prediction(laws, weights[None])[0]),
        start,
        jac=gradient,
        method="SLSQP",
        bounds=list(zip(lowest_S, highest_S, strict=True)),
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1, "jac": np.ones_like},
        options={"maxiter": 500, "ftol": 1e-12},
    )
    weights = np.clip(solution.x, lowest_S, highest_S)
    return weights / weights.sum()


def draw_mixtures(natural_S: np.ndarray, num_runs: int, seed: int) -> np.ndarray:
    """float64[runs, sources]: the natural mixture, the uniform one, then draws around both: a Dirichlet distribution
    whose mean is the natural mixture to a random power, with a random concentration (RegMix, arXiv 2407.01492, section
    3.1, draws so that sources alone and all together occur)."""
    rng = np.random.default_rng(seed)
    num_sources = len(natural_S)
    mixtures = [natural_S, np.full(num_sources, 1 / num_sources)][:num_runs]
    while len(mixtures) < num_runs:
        mean = natural_S ** rng.uniform(0, 1)
        concentration = np.exp(rng.uniform(np.log(0.5), np.log(5.0))) * num_sources
        mixtures.append(rng.dirichlet(np.maximum(mean / mean.sum() * concentration, 1e-3)))
    return np.array(mixtures)
