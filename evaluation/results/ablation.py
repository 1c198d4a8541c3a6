"""Is one set of runs better than another, and how sure is that? Paired by document, over several seeds. At the end: a
law of losses over mixtures of sources.

Two arms (data sets) train one model each for every seed; all models score the same held-out documents in bits per byte.
Under one seed both arms begin with the same weights and read what they share in the same order, so their difference is
taken seed by seed. The effect is the mean of these differences. Its error has two sources that do not average out
together: other seeds would give other models, and other documents would give other scores. Both are estimated, as in a
two-way clustered variance (Cameron, Gelbach, Miller 2011, "Robust inference with multiway clustering", section 2.2):

    variance = of seeds + of documents - of their interaction, which both count

The degrees of freedom follow Satterthwaite (1946). Comparisons with one baseline are corrected by Holm's method
(1979)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import least_squares, minimize
from scipy.special import ndtri, stdtr, stdtrit

from gristmill.foundation.errors import InputError

LEVEL = 0.05  # of wrong decisions over all comparisons of an experiment
POWER = 0.8  # with which an effect of the minimum detectable size is detected
MIN_DOCUMENTS, MIN_SEEDS = 30, 3
MOST_SEEDS = 64  # that "what it would take" counts up to


@dataclass(frozen=True)
class ArmScores:
    """bits_SD: float64[seeds, documents], bits of each document under each seed's model. bytes_D: float64[documents],
    the same for all arms."""

    name: str
    bits_SD: np.ndarray
    bytes_D: np.ndarray


@dataclass(frozen=True)
class Effect:
    """An arm against the baseline, in bits per byte: below 0 is better. seed_variance: of one seed's difference;
    document_variance: of the effect, from the choice of documents. p: before correction."""

    arm: str
    effect: float
    error: float
    degrees: float
    seeds: int
    documents: int
    seed_variance: float
    document_variance: float

    @property
    def p(self) -> float:
        if self.error == 0:
            return 0.0 if self.effect else 1.0
        return float(2 * stdtr(self.degrees, -abs(self.effect) / self.error))

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        half = -float(stdtrit(self.degrees, level / 2)) * self.error
        return self.effect - half, self.effect + half

    def detectable(self, level: float = LEVEL) -> float:
        """The smallest effect that is detected at this level with POWER (normal approximation with t quantiles)."""
        return -float(stdtrit(self.degrees, level / 2) + stdtrit(self.degrees, 1 - POWER)) * self.error


def effects(baseline: ArmScores, others: Sequence[ArmScores]) -> list[Effect]:
    """Effects of each arm against the baseline.

    Raises InputError with fewer than 2 seeds or 30 documents, or where arms scored other documents."""
    arms = [baseline, *others]
    seeds, documents = baseline.bits_SD.shape
    for arm in arms:
        if arm.bits_SD.shape != (seeds, documents) or not np.array_equal(arm.bytes_D, baseline.bytes_D):
            raise InputError(f"arm {arm.name}: scored other documents or seeds than {baseline.name}; score it again")
    if seeds < MIN_SEEDS:
        raise InputError(f"{seeds} seeds of each arm; at least {MIN_SEEDS} are needed to know how much seeds matter")
    if documents < MIN_DOCUMENTS:
        raise InputError(
            f"{documents} held-out documents; at least {MIN_DOCUMENTS} are needed: hold out more (curate.splits) or "
            "name more target texts"
        )
    return [_effect(baseline, arm) for arm in others]


def _effect(baseline: ArmScores, arm: ArmScores) -> Effect:
    seeds, documents = arm.bits_SD.shape
    total = arm.bytes_D.sum()
    differences_SD = arm.bits_SD - baseline.bits_SD
    by_seed = differences_SD.sum(axis=1) / total
    effect = float(by_seed.mean())
    # Of a ratio: the residual of a document is what it has beyond the effect on its bytes (Cochran 1977, section 6.4).
    residuals_SD = (differences_SD - by_seed[:, None] * arm.bytes_D) / total
    scale = documents / (documents - 1)
    of_documents = scale * float((residuals_SD.mean(axis=0) ** 2).sum())
    interaction = float(((residuals_SD - residuals_SD.mean(axis=0)) ** 2).sum()) * scale / (seeds * (seeds - 1))
    seed_variance = float(by_seed.var(ddof=1))
    of_seeds = seed_variance / seeds
    variance = max(of_seeds + of_documents - interaction, of_documents)
    degrees = variance**2 / (of_seeds**2 / (seeds - 1) + of_documents**2 / (documents - 1)) if variance else 1.0
    return Effect(
        arm.name, effect, math.sqrt(variance), max(1.0, degrees), seeds, documents, seed_variance, of_documents
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values. [0.01, 0.04, 0.03] -> [0.03, 0.06, 0.06]."""
    order = np.argsort(p_values, kind="stable")
    corrected = np.empty(len(p_values))
    largest = 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected.tolist()


# In how many of 100 pairs of data sets models of 150M parameters decide as models of 1B do (allenai/signal-and-noise
# 48fbb34, README). A task below VOTING, or without a figure, is shown and takes no part in decisions.
DECISION_ACCURACY = {
    "arc_easy": 93,
    "mmlu": 89,
    "arc_challenge": 83,
    "humaneval": 80,
    "mbpp": 75,
    "hellaswag": 74,
    "gristmill_hellaswag": 74,
    "piqa": 74,
    "commonsense_qa": 69,
    "openbookqa": 65,
    "social_iqa": 55,
    "winogrande": 50,
    "boolq": 48,
    "gsm8k": 46,
    "minerva_math": 48,
}
VOTING = 60


def votes(task: str) -> bool:
    """Whether a task takes part in decisions about data."""
    return DECISION_ACCURACY.get(task, 0) >= VOTING


Decision = Literal["better", "worse", "no decision"]


def decide(effects_of_rates: Sequence[Sequence[Effect]]) -> list[tuple[Decision, float]]:
    """(decision, corrected p) of each arm. effects_of_rates: the arms' effects at each learning rate.

    An arm is better or worse if its effect is significant after Holm's correction at every rate, with one sign: one
    fixed rate for all arms flips rankings (arXiv 2512.24503). The p is the largest of the rates."""
    corrected = [holm([effect.p for effect in of_rate]) for of_rate in effects_of_rates]
    verdicts: list[tuple[Decision, float]] = []
    for place in range(len(effects_of_rates[0])):
        p = max(of_rate[place] for of_rate in corrected)
        signs = {math.copysign(1, of_rate[place].effect) for of_rate in effects_of_rates}
        if p >= LEVEL or len(signs) > 1:
            verdicts.append(("no decision", p))
        else:
            verdicts.append(("better" if signs == {-1.0} else "worse", p))
    return verdicts


def what_it_takes(effect: Effect, num_comparisons: int) -> str:
    """The seeds, and where these are not enough the documents, with which an effect of this size is decided."""
    level = LEVEL / num_comparisons
    for seeds in range(effect.seeds, MOST_SEEDS + 1):
        degrees = seeds - 1
        error = math.sqrt(effect.seed_variance / seeds + effect.document_variance)
        if -(stdtrit(degrees, level / 2) + stdtrit(degrees, 1 - POWER)) * error <= abs(effect.effect):
            return f"{seeds} seeds"
    quantiles = -float(ndtri(level / 2) + ndtri(1 - POWER))
    left = (effect.effect / quantiles) ** 2 - effect.seed_variance / MOST_SEEDS
    if left <= 0:
        return f"more than {MOST_SEEDS} seeds: an effect of {abs(effect.effect):.4f} is within the noise of training"
    documents = math.ceil(effect.documents * effect.document_variance / left)
    return f"{MOST_SEEDS} seeds and {documents:,} held-out documents"


# Losses of small runs over mixtures of sources: a law for each validation set, and the mixture that it recommends.
#
# The law is that of Ye et al. 2024 ("Data Mixing Laws", arXiv 2403.16952, equation 1): the loss on one set is c + exp(a
# + b . w) for the weights w of the sources. Each set has its own law, and predictions are averaged: a mean of such laws
# is no such law. It is convex in the weights, so the best mixture under bounds is found by any descent.
#
# How far a set's slopes are kept small is chosen by cross-validation on its runs, and each law is the mean of those of
# resampled runs (bagging, Breiman 1996): with few runs both decide which of two good mixtures is taken for the better.

PENALTIES = (0.001, 0.01, 0.03, 0.1, 0.3)  # on the slopes, in standard deviations of the loss
FOLDS = 5
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


def fit_law(weights_RS: np.ndarray, losses_R: np.ndarray, penalty: float = 0.01) -> MixtureLaw:
    """The law of one validation set by least squares. weights_RS: of the runs, each row with the sum 1. penalty: see
    PENALTIES; it keeps laws of few runs from extremes.

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
        return np.concatenate([(parameters[0] + np.exp(exponents) - losses_R) / spread, penalty * parameters[2:]])

    slope_rows = penalty * np.eye(columns.shape[1] + 1)[2:]

    def jacobian(parameters: np.ndarray) -> np.ndarray:
        exponents = columns @ parameters[1:]
        rises = np.where(np.abs(exponents) < MAX_EXPONENT, np.exp(np.clip(exponents, -MAX_EXPONENT, MAX_EXPONENT)), 0.0)
        data_rows = np.column_stack([np.ones(len(losses_R)), rises[:, None] * columns]) / spread
        return np.concatenate([data_rows, slope_rows])

    solutions = []
    for share in OFFSETS:
        offset = losses_R.min() - share * np.ptp(losses_R)
        normal = columns.T @ columns + 1e-3 * np.eye(columns.shape[1])
        start = np.linalg.solve(normal, columns.T @ np.log(losses_R - offset))
        solutions.append(least_squares(residuals, np.concatenate([[offset], start]), jac=jacobian, max_nfev=200))
    offset, intercept, *slopes = min(solutions, key=lambda solution: solution.cost).x.tolist()
    return MixtureLaw(offset, intercept, tuple(slopes))


def best_penalty(weights_RS: np.ndarray, losses_R: np.ndarray) -> float:
    """The one of PENALTIES whose laws predict left-out runs with the least squared error."""
    folds = np.arange(len(losses_R)) % min(FOLDS, len(losses_R))
    errors = dict.fromkeys(PENALTIES, 0.0)
    for fold in np.unique(folds):
        trained, held_out = folds != fold, folds == fold
        if trained.sum() < MIN_RUNS or np.ptp(losses_R[trained]) == 0:
            continue
        for penalty in PENALTIES:
            law = fit_law(weights_RS[trained], losses_R[trained], penalty)
            errors[penalty] += float(((law.predict(weights_RS[held_out]) - losses_R[held_out]) ** 2).sum())
    return min(errors, key=lambda penalty: errors[penalty]) if any(errors.values()) else 0.01


def resampled_laws(
    weights_RS: np.ndarray, losses_RV: np.ndarray, seed: int = 0, resamples: int = RESAMPLES
) -> list[list[MixtureLaw]]:
    """For each resample of the runs, a law for each validation set. Raises InputError as `fit_law` does."""
    for losses in losses_RV.T:
        fit_law(weights_RS, losses)  # says what cannot be fitted
    penalties = [best_penalty(weights_RS, losses) for losses in losses_RV.T]
    rng = np.random.default_rng(seed)
    laws = []
    for _ in range(resamples):
        chosen = rng.integers(0, len(weights_RS), len(weights_RS))
        if np.ptp(losses_RV[chosen], axis=0).min() > 0:
            pairs = zip(losses_RV[chosen].T, penalties, strict=True)
            laws.append([fit_law(weights_RS[chosen], losses, penalty) for losses, penalty in pairs])
    pairs = zip(losses_RV.T, penalties, strict=True)
    return laws or [[fit_law(weights_RS, losses, penalty) for losses, penalty in pairs]]


def mean_prediction(laws: Sequence[MixtureLaw], weights_MS: np.ndarray) -> np.ndarray:
    return np.mean([law.predict(weights_MS) for law in laws], axis=0)


@dataclass(frozen=True)
class Proposal:
    """weights: of the sources. low, high: their 90 % range, from resampled runs. loss: predicted mean over the sets."""

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
    laws = resampled_laws(weights_RS, losses_RV, seed)
    together = [law for of_sample in laws for law in of_sample]
    best = optimum(together, lowest_S, highest_S)
    ends = np.quantile([optimum(of_sample, lowest_S, highest_S) for of_sample in laws], (0.05, 0.95), axis=0)
    low, high = np.clip(best + (ends - best) * small_sample_factor(*weights_RS.shape), lowest_S, highest_S)
    return Proposal(best, low, high, float(mean_prediction(together, best[None])[0]))


def small_sample_factor(runs: int, sources: int) -> float:
    """Factor by which resampled runs differ too little, since a law of sources + 1 free numbers was fitted to them
    (MacKinnon and White 1985, HC1). 24 runs of 3 sources -> 1.095."""
    return float(np.sqrt(runs / max(1, runs - sources - 1)))


def optimum(laws: Sequence[MixtureLaw], lowest_S: np.ndarray, highest_S: np.ndarray) -> np.ndarray:
    """The weights with the least mean prediction."""
    slopes_VS = np.array([law.slopes for law in laws])
    interval_S = highest_S - lowest_S
    start = lowest_S + interval_S * ((1 - lowest_S.sum()) / max(interval_S.sum(), 1e-12))

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
