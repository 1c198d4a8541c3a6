"""Standard errors and unigram bits per byte, by hand."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from lm_eval.api.group import AggMetricConfig, Group
from lm_eval.tasks import TaskManager
from scipy.stats import binomtest

from gristmill.evaluation.results.statistics import (
    LN2,
    MARK,
    accuracy_chance_test,
    add_standard_errors,
    evaluated,
    exclude_skipped,
    gather_skip_reasons,
    mean_error,
    p_text,
    ratio_error,
    scores,
    sign_chance_test,
    skipped_notes,
    standard_error,
    subtasks_of,
    tails,
    unigram_bits_per_byte,
)
from gristmill.evaluation.tasks.corpus_tasks import HeldOutDocument, bits_per_byte_task


def test_mean_error_of_three_answers():
    assert mean_error([0, 1, 1]) == pytest.approx(1 / 3)
    assert math.isnan(mean_error([1]))


def test_ratio_error_with_equal_sizes_is_the_error_of_a_mean():
    assert ratio_error([1, 2, 3], [1, 1, 1]) == pytest.approx(1 / math.sqrt(3))
    assert ratio_error([1, 2, 3], [1, 1, 1]) == pytest.approx(mean_error([1, 2, 3]))


def test_one_pair_has_no_ratio_error():
    assert math.isnan(ratio_error([1], [2]))


def test_ratio_error_agrees_with_the_bootstrap():
    rng = np.random.default_rng(0)
    sizes = rng.integers(100, 5000, 300).astype(float)
    tops = sizes * rng.normal(1.3, 0.2, 300)
    draws = rng.integers(0, 300, (2000, 300))
    bootstrap = (tops[draws].sum(1) / sizes[draws].sum(1)).std(ddof=1)
    assert ratio_error(tops, sizes) == pytest.approx(bootstrap, rel=0.1)


def test_unigram_by_hand():
    """Three and one of four tokens, each counted once more: probabilities 4/6 and 2/6."""
    bits = unigram_bits_per_byte(np.array([3, 1]), [0, 1], num_bytes=2)
    assert bits == pytest.approx((math.log2(6 / 4) + math.log2(6 / 2)) / 2)


# Skipped questions: removed from the scores of tasks and groups, counted and noted.

TEXT = HeldOutDocument("0", "notes", "Grain.")


def sample(doc_id: int, value: float, chosen_filter: str = "none") -> dict:
    return {"doc_id": doc_id, "filter": chosen_filter, "metrics": ["acc"], "acc": value}


def task(**aggregations) -> SimpleNamespace:
    return SimpleNamespace(aggregation=lambda: aggregations)


def test_scores_are_aggregated_by_the_task_for_each_filter():
    found = [sample(0, 1.0), sample(1, 0.0), sample(0, 1.0, "strict"), sample(1, 1.0, "strict")]
    assert scores(task(), found) == {"acc,none": 0.5, "acc,strict": 1.0}
    assert scores(task(acc=max), found) == {"acc,none": 1.0, "acc,strict": 1.0}


def test_skipped_questions_are_removed_from_the_score_and_counted():
    """Answers 1, 0, 1, 0; question 3 is skipped: 2/3 instead of 1/2. Each filter's sample of it is marked."""
    samples = {"quiz": [sample(k, float(k % 2 == 0), name) for name in ("none", "strict") for k in range(4)]}
    raw = {
        "results": {
            "quiz": {"acc,none": 0.5, "acc_stderr,none": "N/A", "acc,strict": 0.5, "alias": "quiz", "sample_len": 4}
        },
        "n-samples": {"quiz": {"original": 4, "effective": 4}},
    }
    exclude_skipped(raw, samples, {"quiz": task()}, {}, {("quiz", 3): "too long"})
    assert raw["results"]["quiz"] == {
        "acc,none": pytest.approx(2 / 3), "acc,strict": pytest.approx(2 / 3), "alias": "quiz", "sample_len": 3,
    }  # fmt: skip
    assert raw["n-samples"]["quiz"] == {"original": 4, "effective": 4, MARK: 1}
    skipped = [one for one in samples["quiz"] if one["doc_id"] == 3]
    assert skipped == [{"doc_id": 3, "filter": name, "metrics": [], MARK: "too long"} for name in ("none", "strict")]
    assert len(evaluated(samples["quiz"])) == 6
    assert skipped_notes(samples) == [
        "quiz: 1 of 4 questions were not evaluated and are in no score; question 3: too long"
    ]


def test_a_task_without_any_evaluated_question_has_no_score():
    samples = {"quiz": [sample(0, 1.0)]}
    raw = {"results": {"quiz": {"acc,none": 1.0}}, "n-samples": {"quiz": {}}}
    exclude_skipped(raw, samples, {"quiz": task()}, {}, {("quiz", 0): "too long"})
    assert raw["results"]["quiz"] == {"sample_len": 0} and raw["n-samples"]["quiz"] == {MARK: 1}


def test_the_score_of_a_group_is_computed_again():
    """One of two equal tasks of two questions loses its wrong answer: sizes 1 and 2, so (1 x 1 + 2 x 0.5) / 3 = 2/3."""
    config = bits_per_byte_task("notes", [TEXT])
    tasks = {
        name: TaskManager(include_defaults=False).load([{**config, "task": name}])["tasks"][name] for name in ("a", "b")
    }
    group = Group("both", aggregate_metric_list=[AggMetricConfig(metric="acc", weight_by_size=True)])
    for one in tasks.values():
        group.add(one)
    samples = {name: [sample(0, 1.0), sample(1, 0.0)] for name in ("a", "b")}
    raw = {
        "results": {name: {"acc,none": 0.5, "sample_len": 2} for name in ("a", "b")} | {"both": {"acc,none": 0.5}},
        "groups": {"both": {"acc,none": 0.5}},
        "n-samples": {"a": {}, "b": {}},
    }
    exclude_skipped(raw, samples, tasks, {"both": group}, {("a", 1): "too long"})
    assert raw["results"]["a"]["acc,none"] == 1.0 and raw["results"]["b"]["acc,none"] == 0.5
    assert raw["results"]["both"]["acc,none"] == raw["groups"]["both"]["acc,none"] == pytest.approx(2 / 3)


def test_models_of_lm_eval_skip_nothing():
    assert gather_skip_reasons(SimpleNamespace(world_size=1)) == {}


# Standard errors of scores by hand, and in lm-eval's result dictionary.


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


# Exact tests against chance, compared with scipy and with enumeration of all outcomes.


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
        if accuracy_chance_test(right, [chance] * count).p < 0.01:
            wrong += tails(right, [chance] * count)[0] - (tails(right - 1, [chance] * count)[0] if right else 0.0)
    assert 0.001 < wrong <= 0.01


def test_as_many_right_as_chance_expects_is_like_chance():
    assert str(accuracy_chance_test(2, [0.5] * 4)).startswith("like chance")
    assert accuracy_chance_test(2, [0.5] * 4).p == 1.0  # both tails are 11/16


def test_a_sign_test_is_the_binomial_test_of_one_half():
    assert sign_chance_test([-1.0] * 8 + [2.0, 0.0]).p == pytest.approx(binomtest(8, 9, 0.5).pvalue)
    assert sign_chance_test([0.0]) is None


def test_p_values_read_well():
    assert [p_text(p) for p in (0.25, 0.001372, 3e-9, 0.0)] == ["p = 0.25", "p = 0.0014", "p = 3e-09", "p < 1e-12"]
