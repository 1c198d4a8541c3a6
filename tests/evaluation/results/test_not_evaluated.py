"""Skipped questions: removed from the scores of tasks and groups, counted and noted."""

from types import SimpleNamespace

import pytest
from lm_eval.api.group import AggMetricConfig, Group
from lm_eval.tasks import TaskManager

from gristmill.evaluation.results.not_evaluated import (
    MARK,
    evaluated,
    exclude_skipped,
    gather_skip_reasons,
    scores,
    skipped_notes,
)
from gristmill.evaluation.tasks.corpus_task_configs import bits_per_byte_task
from gristmill.evaluation.tasks.corpus_tasks import HeldOutDocument

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
