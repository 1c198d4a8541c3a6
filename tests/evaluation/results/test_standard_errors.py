"""Standard errors of scores by hand, and in lm-eval's result dictionary."""

import math

import pytest

from gristmill.evaluation.results.standard_errors import LN2, add_standard_errors, standard_error, subtasks_of


def test_an_accuracy_has_the_standard_error_of_the_mean():
    """[0, 1, 1]: deviations -2/3, 1/3, 1/3; variance 1/3; error sqrt(1/3 / 3) = 1/3."""
    assert standard_error("acc", [0, 1, 1], 2 / 3) == pytest.approx(1 / 3)
    assert math.isnan(standard_error("acc", [1], 1.0))


def test_bits_per_byte_have_the_error_of_a_ratio():
    """Documents of one byte with 1, 2 and 3 bits: the mean is 2, its error 1 / sqrt(3)."""
    pairs = [(-bits * LN2, 1) for bits in (1, 2, 3)]
    assert standard_error("bits_per_byte", pairs, 2.0) == pytest.approx(1 / math.sqrt(3))
    assert standard_error("bits_per_byte", [(-2 * LN2, 1), (-6 * LN2, 3)], 2.0) == pytest.approx(0.0)


def test_the_error_of_a_perplexity_is_relative():
    """exp(mean): the derivative is the perplexity itself, so its error is the perplexity times that of the mean."""
    assert standard_error("perplexity", [-1.0, -2.0, -3.0], math.exp(2)) == pytest.approx(math.exp(2) / math.sqrt(3))
    pairs = [(-nats, 1) for nats in (1.0, 2.0, 3.0)]
    for metric in ("byte_perplexity", "word_perplexity"):
        assert standard_error(metric, pairs, math.exp(2)) == pytest.approx(math.exp(2) / math.sqrt(3))


def test_other_values_have_no_error():
    assert standard_error("f1", ["a", "b"], 0.5) is None


def test_tasks_of_nested_groups():
    children = {"all": ["easy", "quiz"], "easy": ["first", "second"]}
    assert subtasks_of("all", children) == ["first", "second", "quiz"]
    assert subtasks_of("absent", children) == []


def test_errors_of_tasks_and_groups_in_the_summary():
    """The group's error is that of the samples of all its tasks: [0, 1] and [1] -> 1/3. Filters are kept apart."""

    def sample(value: int, chosen_filter: str = "none") -> dict:
        return {"acc": value, "filter": chosen_filter}

    samples = {"first": [sample(0), sample(1), sample(0, "strict"), sample(0, "strict")], "second": [sample(1)]}
    summary = {
        "results": {
            "first": {"acc,none": 0.5, "acc,strict": 0.0, "alias": "first"},
            "second": {"acc,none": 1.0},
            "both": {"acc,none": 2 / 3, "acc_stderr,none": "N/A"},
        },
        "group_subtasks": {"both": ["first", "second"]},
    }
    add_standard_errors(summary, samples)
    first, second, both = (summary["results"][name] for name in ("first", "second", "both"))
    assert (first["acc_stderr,none"], first["acc_stderr,strict"]) == (pytest.approx(0.5), 0.0)
    assert "acc_stderr,none" not in second  # one sample has no error
    assert both["acc_stderr,none"] == pytest.approx(1 / 3)
