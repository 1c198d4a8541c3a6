"""Is one set of runs better than another, and how sure is that? Paired by document, over several seeds.

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
from scipy import stats

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
        return float(2 * stats.t.sf(abs(self.effect) / self.error, self.degrees))

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        half = float(stats.t.isf(level / 2, self.degrees)) * self.error
        return self.effect - half, self.effect + half

    def detectable(self, level: float = LEVEL) -> float:
        """The smallest effect that is detected at this level with POWER (normal approximation with t quantiles)."""
        return float(stats.t.isf(level / 2, self.degrees) + stats.t.isf(1 - POWER, self.degrees)) * self.error


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
        if (stats.t.isf(level / 2, degrees) + stats.t.isf(1 - POWER, degrees)) * error <= abs(effect.effect):
            return f"{seeds} seeds"
    quantiles = float(stats.norm.isf(level / 2) + stats.norm.isf(1 - POWER))
    left = (effect.effect / quantiles) ** 2 - effect.seed_variance / MOST_SEEDS
    if left <= 0:
        return f"more than {MOST_SEEDS} seeds: an effect of {abs(effect.effect):.4f} is within the noise of training"
    documents = math.ceil(effect.documents * effect.document_variance / left)
    return f"{MOST_SEEDS} seeds and {documents:,} held-out documents"
