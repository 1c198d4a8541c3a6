"""Exact tests against chance, compared with scipy and with enumeration of all outcomes."""

import itertools

import pytest
from scipy.stats import binomtest

from gristmill.evaluation.results.verdicts import accuracy_verdict, p_text, sign_verdict, tails


@pytest.mark.parametrize(("right", "count", "chance"), [(128, 400, 0.25), (0, 30, 0.5), (30, 30, 0.25), (7, 40, 1 / 3)])
def test_tails_are_those_of_scipys_binomial_test(right, count, chance):
    at_most, at_least = tails(right, [chance] * count)
    assert at_most == pytest.approx(binomtest(right, count, chance, "less").pvalue)
    assert at_least == pytest.approx(binomtest(right, count, chance, "greater").pvalue)


def test_with_several_chances_every_outcome_is_counted():
    """All 2^9 outcomes of nine questions, each with its probability."""
    chances = [0.5, 0.25, 0.25, 0.2, 1 / 3, 1 / 3, 0.5, 0.9, 0.25]
    for right in range(10):
        at_most = at_least = 0.0
        for outcome in itertools.product((0, 1), repeat=9):
            probability = 1.0
            for hit, chance in zip(outcome, chances, strict=True):
                probability *= chance if hit else 1 - chance
            at_most += probability * (sum(outcome) <= right)
            at_least += probability * (sum(outcome) >= right)
        assert tails(right, chances) == pytest.approx((at_most, at_least))


def test_the_rate_of_false_verdicts_is_at_most_the_level():
    """Over all outcomes of guessing, so many as are called better or worse, weighed with their probability."""
    count, chance = 60, 0.25
    wrong = 0.0
    for right in range(count + 1):
        if accuracy_verdict(right, [chance] * count).p < 0.01:
            wrong += tails(right, [chance] * count)[0] - (tails(right - 1, [chance] * count)[0] if right else 0.0)
    assert 0.001 < wrong <= 0.01


def test_a_sign_test_is_the_binomial_test_of_one_half():
    assert sign_verdict([-1.0] * 8 + [2.0, 0.0]).p == pytest.approx(binomtest(8, 9, 0.5).pvalue)
    assert sign_verdict([0.0]) is None


def test_p_values_read_well():
    assert [p_text(p) for p in (0.25, 0.001372, 3e-9, 0.0)] == ["p = 0.25", "p = 0.0014", "p = 3e-09", "p < 1e-12"]
