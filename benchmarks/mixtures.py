"""Choice of a mixture by small runs, on RegMix's public tables: laws, linear fits and boosting.

64 of the 512 runs at 1M parameters choose one of the 64 mixtures at 1B: how often that is the best for Pile-CC, and one
of the best three for the mean of the 13 validation sets, each of which is fitted by itself. --first and --subsets say
which random subsets; the ratio is that of choices that are right."""

import csv
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
from measure import Figure, arguments, print_figures

from gristmill.evaluation.results.ablation import best_penalty, fit_law, resampled_laws

PILE_CC, RUNS, RESAMPLES = 8, 64, 20
Fit = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]


def table(path: Path) -> np.ndarray:
    with path.open() as file:
        return np.array([[float(value) for value in row[1:]] for row in list(csv.reader(file))[1:]])


def linear(weights: np.ndarray, losses: np.ndarray, other: np.ndarray, seed: int) -> np.ndarray:
    columns, others = (np.column_stack([np.ones(len(table)), table]) for table in (weights, other))
    return others @ np.linalg.lstsq(columns, losses, rcond=None)[0]


def boosted(weights: np.ndarray, losses: np.ndarray, other: np.ndarray, seed: int) -> np.ndarray:
    settings: dict[str, Any] = {
        "n_estimators": 300,
        "learning_rate": 0.05,
        "num_leaves": 7,
        "min_child_samples": 5,
        "verbosity": -1,
    }
    model = lightgbm.LGBMRegressor(**settings, n_jobs=1, random_state=seed).fit(weights, losses)
    return np.asarray(model.predict(other))


def law(weights: np.ndarray, losses: np.ndarray, other: np.ndarray, seed: int) -> np.ndarray:
    return fit_law(weights, losses).predict(other)


def law_by_cross_validation(weights: np.ndarray, losses: np.ndarray, other: np.ndarray, seed: int) -> np.ndarray:
    return fit_law(weights, losses, best_penalty(weights, losses)).predict(other)


def resampled(weights: np.ndarray, losses: np.ndarray, other: np.ndarray, seed: int) -> np.ndarray:
    laws = chain.from_iterable(resampled_laws(weights, losses[:, None], seed, RESAMPLES))
    return np.mean([law.predict(other) for law in laws], axis=0)


FITS: dict[str, Fit] = {
    "linear": linear,
    "lightgbm": boosted,
    "law": law,
    "law_by_cross_validation": law_by_cross_validation,
    "law_resampled": resampled,
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--subsets", type=int, default=20)
    options = parser.parse_args()
    data = Path(options.data or os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parent / "../../shared/data")
    weights, losses, large_weights, large_losses = (
        table(data / "ablation/regmix" / f"{name}.csv")
        for name in ("train_mixture_1m", "train_pile_loss_1m", "test_mixture_1B", "test_pile_loss_1B")
    )
    subsets = range(options.first, options.first + (2 if options.quick else options.subsets))
    figures, mean = [], large_losses.mean(axis=1)
    for name, fit in FITS.items():
        of_pile_cc = of_mean = 0
        for subset in subsets:
            chosen = np.random.default_rng(subset).choice(len(weights), RUNS, replace=False)
            predicted = np.column_stack(
                [fit(weights[chosen], column, large_weights, subset) for column in losses[chosen].T]
            )
            target = large_losses[:, PILE_CC]
            of_pile_cc += int(target[predicted[:, PILE_CC].argmin()] == target.min())
            of_mean += int((mean < mean[predicted.mean(axis=1).argmin()]).sum() < 3)
        figures += [
            Figure(f"mixture_{name}_pile_cc", of_pile_cc, f"of {len(subsets)} subsets"),
            Figure(f"mixture_{name}_mean", of_mean, f"of {len(subsets)} subsets"),
        ]
    print_figures(figures)


if __name__ == "__main__":
    main()
