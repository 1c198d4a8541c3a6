"""The paired bootstrap of two results folders, and its errors."""

import json

import numpy as np
import pytest
from scipy.stats import binomtest

from gristmill.evaluation.results.compare import (
    _compare_task,
    compare_folders,
    comparison_markdown,
    mcnemar,
    paired_interval,
)
from gristmill.foundation.errors import InputError


def results(folder, answers, asked="same"):
    (folder / "samples").mkdir(parents=True)
    summary = {"task_hashes": {"quiz": asked}, "higher_is_better": {"quiz": {"acc": True}}}
    (folder / "results.json").write_text(json.dumps(summary))
    lines = [json.dumps({"metrics": ["acc"], "acc": answer}) for answer in answers]
    (folder / "samples" / "quiz.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_significant_and_insignificant_differences(tmp_path):
    rng = np.random.default_rng(0)
    answers = (rng.random(400) < 0.5).astype(float)
    first = results(tmp_path / "first", answers)
    better = results(tmp_path / "better", np.where(rng.random(400) < 0.2, 1.0, answers))
    lucky = results(tmp_path / "lucky", np.where(np.arange(400) < 3, 1.0, answers))
    assert compare_folders(first, better)[0].verdict == "second is better"
    assert compare_folders(better, first)[0].verdict == "first is better"
    assert compare_folders(first, lucky)[0].verdict == "no difference shown"
    assert "second is better" in comparison_markdown(compare_folders(first, better))


def test_the_interval_is_that_of_the_normal_law_for_many_questions():
    differences = np.random.default_rng(1).normal(0.1, 1.0, 2000)
    low, high = paired_interval(differences, np.ones(2000), seed=0)
    error = differences.std(ddof=1) / np.sqrt(2000)
    assert (low, high) == pytest.approx(
        (differences.mean() - 1.96 * error, differences.mean() + 1.96 * error), abs=0.004
    )


def test_other_questions_are_refused(tmp_path):
    first, second = results(tmp_path / "a", [1.0, 0.0]), results(tmp_path / "b", [1.0, 0.0], asked="other")
    with pytest.raises(InputError, match="have different questions"):
        compare_folders(first, second)
    with pytest.raises(InputError, match=r"results\.json: absent"):
        compare_folders(first, tmp_path)


def test_damaged_results_are_named(tmp_path):
    first = results(tmp_path / "first", [1.0, 0.0])
    for number, (name, content, said) in enumerate(
        [
            ("results.json", "{", "damaged"),
            ("results.json", "[]", "damaged"),
            ("results.json", '{"task_hashes": 3, "higher_is_better": {}}', "are not objects"),
            ("samples/quiz.jsonl", "", "a sample lacks its metrics"),
            ("samples/quiz.jsonl", '{"metrics": ["acc"]}\n', "a sample lacks its metrics"),
            ("samples/quiz.jsonl", "{\n", "damaged"),
            ("samples/quiz.jsonl", '{"metrics": ["acc"], "acc": 1.0}\n', "has 2 samples and .* 1; evaluate both again"),
        ]
    ):
        second = results(tmp_path / str(number), [1.0, 0.0])
        (second / name).write_text(content)
        with pytest.raises(InputError, match=said):
            compare_folders(first, second)


def test_questions_that_one_model_skipped_are_excluded(tmp_path):
    first, second = results(tmp_path / "a", [1.0, 0.0, 1.0]), results(tmp_path / "b", [1.0, 1.0, 1.0])
    lines = (first / "samples" / "quiz.jsonl").read_text().splitlines()
    lines[0] = json.dumps({"metrics": [], "not_evaluated": "too long"})
    (first / "samples" / "quiz.jsonl").write_text("\n".join(lines))
    (found,) = compare_folders(first, second)
    assert (found.count, found.first, found.second) == (2, 0.5, 1.0)


@pytest.mark.parametrize("gained, lost", [(4, 0), (0, 4), (5, 0), (6, 0), (9, 1), (20, 8), (0, 0), (31, 29)])
def test_mcnemar_is_the_binomial_test_of_the_discordant_questions(gained, lost):
    first = np.array([0.0] * gained + [1.0] * lost + [1.0] * 50 + [0.0] * 46)
    second = np.array([1.0] * gained + [0.0] * lost + [1.0] * 50 + [0.0] * 46)
    expected = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(first, second) == pytest.approx(expected, rel=1e-12)


def test_four_of_a_hundred_discordant_questions_show_nothing(tmp_path):
    """The bootstrap's interval excludes zero: almost every draw has one of the four. The exact test gives .125."""
    right = [1.0] * 50 + [0.0] * 46
    pairs = [({"metrics": ["acc"], "acc": a}, {"metrics": ["acc"], "acc": b})
             for a, b in zip([0.0] * 4 + right, [1.0] * 4 + right, strict=True)]  # fmt: skip
    (comparison,) = _compare_task("quiz", pairs, {"acc": True}, seed=0)
    assert comparison.low > 0 and comparison.p == pytest.approx(0.125)
    assert comparison.verdict == "no difference shown"
