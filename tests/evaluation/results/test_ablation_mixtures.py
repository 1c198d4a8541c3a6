"""Laws of mixtures: planted optima, RegMix's public runs, and what cannot be fitted."""

import csv
from itertools import chain

import numpy as np
import pytest

from gristmill.evaluation.results.ablation import (
    PENALTIES,
    MixtureLaw,
    best_penalty,
    draw_mixtures,
    fit_law,
    mean_prediction,
    optimum,
    propose,
    resampled_laws,
)
from gristmill.foundation.errors import InputError

FREE = np.zeros(3), np.ones(3)


def planted(seed: int = 0, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mixtures of 3 sources, losses on 3 sets by known laws with noise, the best mixture by a grid)."""
    laws = [
        MixtureLaw(1.0, 0.5, (-2.0, -0.3, 0.0)), MixtureLaw(0.8, 0.2, (0.1, -2.5, 0.0)),
        MixtureLaw(1.2, 0.4, (0.0, -0.2, -1.5)),
    ]  # fmt: skip
    weights = draw_mixtures(np.array([0.6, 0.3, 0.1]), 24, seed)
    losses = np.column_stack([law.predict(weights) for law in laws])
    losses += np.random.default_rng(seed).normal(0, noise, losses.shape)
    first, second = np.divmod(np.arange(501 * 501), 501)
    grid = np.column_stack([first, second, 500 - first - second])[first + second <= 500] / 500
    return weights, losses, grid[mean_prediction(laws, grid).argmin()]


def test_a_law_is_recovered_from_its_losses():
    law = MixtureLaw(1.0, 0.5, (-2.0, -0.3, 0.0))
    weights = draw_mixtures(np.array([0.6, 0.3, 0.1]), 30, 1)
    fitted = fit_law(weights, law.predict(weights))
    other = draw_mixtures(np.array([0.2, 0.4, 0.4]), 50, 2)
    assert fitted.predict(other) == pytest.approx(law.predict(other), abs=2e-3)


def test_the_planted_optimum_is_found_within_a_twentieth():
    weights, losses, best = planted()
    assert propose(weights, losses, *FREE).weights == pytest.approx(best, abs=0.05)


@pytest.mark.slow
def test_the_ranges_contain_the_planted_optimum():
    """90 % ranges of each weight, over 80 swarms of 24 runs at each of three levels of noise."""
    for noise in (0.003, 0.01, 0.03):
        inside = []
        for seed in range(80):
            weights, losses, best = planted(seed, noise)
            proposal = propose(weights, losses, *FREE, seed)
            inside += ((proposal.low <= best) & (best <= proposal.high)).tolist()
        print(noise, np.mean(inside))
        assert 0.85 <= np.mean(inside) <= 0.95


def test_bounds_hold():
    weights, losses, _ = planted()
    proposal = propose(weights, losses, np.array([0.0, 0.0, 0.3]), np.array([0.2, 1.0, 1.0]))
    assert proposal.weights[0] <= 0.2 + 1e-9 and proposal.weights[2] >= 0.3 - 1e-9
    assert proposal.weights.sum() == pytest.approx(1)
    with pytest.raises(InputError, match=r"no mixture is between these bounds: floors sum to 0, caps to 0\.6"):
        propose(weights, losses, np.zeros(3), np.full(3, 0.2))


def test_what_cannot_be_fitted_is_said():
    with pytest.raises(InputError, match="3 runs; at least 4"):
        fit_law(np.eye(3), np.ones(3))
    with pytest.raises(InputError, match="all 4 runs have the loss 1"):
        fit_law(np.full((4, 3), 1 / 3), np.ones(4))


def test_the_swarm_begins_with_the_natural_and_the_uniform_mixture():
    natural = np.array([0.7, 0.2, 0.1])
    mixtures = draw_mixtures(natural, 40, 3)
    assert mixtures[0] == pytest.approx(natural) and mixtures[1] == pytest.approx(np.full(3, 1 / 3))
    assert mixtures.sum(axis=1) == pytest.approx(np.ones(40)) and mixtures.min() >= 0
    assert np.array_equal(mixtures, draw_mixtures(natural, 40, 3))


def table(path) -> np.ndarray:
    with path.open() as file:
        return np.array([[float(value) for value in row[1:]] for row in list(csv.reader(file))[1:]])


PILE_CC, ALL_SETS = [8], list(range(13))


def choices(shared_data, sets: list[int], subsets: range) -> list[int]:
    """Ranks at 1B, from 1, of the mixture that laws of 64 of RegMix's 512 runs at 1M choose among the 64 at 1B, for the
    mean of these validation sets."""
    weights, losses, large_weights, large_losses = (
        table(shared_data(f"ablation/regmix/{name}.csv"))
        for name in ("train_mixture_1m", "train_pile_loss_1m", "test_mixture_1B", "test_pile_loss_1B")
    )
    target = large_losses[:, sets].mean(axis=1)
    ranks = []
    for subset in subsets:
        chosen = np.random.default_rng(subset).choice(len(weights), 64, replace=False)
        laws = resampled_laws(weights[chosen], losses[chosen][:, sets], subset, resamples=20)
        best = mean_prediction(list(chain.from_iterable(laws)), large_weights).argmin()
        ranks.append(1 + int((target < target[best]).sum()))
    return ranks


def test_small_runs_of_regmix_choose_the_best_mixture_for_pile_cc(shared_data):
    assert choices(shared_data, PILE_CC, range(3)) == [1, 1, 1]


@pytest.mark.slow
def test_regmix_at_length(shared_data):
    """Of 20 subsets: the best mixture for Pile-CC in at least 18, one of the best 3 for the mean of 13 sets in 15."""
    of_pile_cc, of_mean = (choices(shared_data, sets, range(20)) for sets in (PILE_CC, ALL_SETS))
    print(of_pile_cc, of_mean)
    assert sum(rank == 1 for rank in of_pile_cc) >= 18
    assert sum(rank <= 3 for rank in of_mean) >= 15


def test_the_penalty_is_chosen_by_runs_that_were_left_out():
    """Losses that are noise are best predicted by flat laws, those without noise by free ones."""
    weights, losses, _ = planted()
    assert best_penalty(weights, losses[:, 0]) == min(PENALTIES)
    noise = np.random.default_rng(5).normal(1, 0.01, len(weights))
    assert best_penalty(weights, noise) == max(PENALTIES)


def test_the_optimum_of_one_law_is_its_steepest_source():
    assert optimum([MixtureLaw(0.0, 0.0, (-1.0, -3.0, 0.0))], *FREE) == pytest.approx([0, 1, 0], abs=1e-6)
