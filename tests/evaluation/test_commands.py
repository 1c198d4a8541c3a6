"""Evaluating checkpoints and series of checkpoints without a recipe."""

import json

import pytest

from gristmill.evaluation.commands import ModelParallel, evaluate_checkpoint, evaluate_series
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.workdir import CheckpointPaths, HeldOutCorpus
from gristmill.evaluation.run import EvaluationPaths, evaluate_folder
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.training.launch.processes import RankInfo


@pytest.fixture
def config(tmp_path) -> EvaluateConfig:
    records = [
        {"sentence1": f"The miller {number} ran.", "sentence2": "He ran.", "gold_label": "entailment"}
        for number in range(6)
    ]
    (tmp_path / "data" / "benchmarks").mkdir(parents=True)
    path = tmp_path / "data" / "benchmarks" / "hans_evaluation.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return EvaluateConfig(tasks=("gristmill_hans",), data=str(tmp_path / "data"), num_continuations=0)


def test_a_checkpoint_alone(tmp_path, config, random_checkpoint, tokenizer_folder):
    data = tmp_path / "data"
    rows = evaluate_checkpoint(
        CheckpointPaths(random_checkpoint()),
        EvaluationPaths(tmp_path / "out", data, cache=tmp_path / "cache"),
        config,
        Reporter.silent(),
    )
    assert {row.metric for row in rows} == {"acc", "acc_norm", "answer_bits_per_byte"} and rows[0].count == 6
    again = evaluate_checkpoint(
        CheckpointPaths(tmp_path),
        EvaluationPaths(tmp_path / "again", data, cache=tmp_path / "cache"),
        config,
        Reporter.silent(),
    )
    assert again == rows
    assert (tmp_path / "out" / "results.json").read_bytes() == (tmp_path / "again" / "results.json").read_bytes()


def test_the_cost_of_eight_bits_is_shown(tmp_path, config, random_checkpoint, tokenizer_folder):
    eight = EvaluateConfig(**{**config.model_dump(), "quantization": "int8"})
    evaluate_checkpoint(
        CheckpointPaths(random_checkpoint()),
        EvaluationPaths(tmp_path / "out", tmp_path / "data"),
        eight,
        Reporter.silent(),
    )
    assert "quantized to int8" in (tmp_path / "out" / "table.md").read_text()
    assert "| gristmill_hans | 6 | acc |" in (tmp_path / "out" / "cost_of_int8.md").read_text()


def test_a_series_is_a_curve_by_tokens(tmp_path, config, random_checkpoint, tokenizer_folder):
    for step in (10, 15, 20):
        random_checkpoint(step=step)
    points = evaluate_series(
        CheckpointPaths(tmp_path),
        EvaluationPaths(tmp_path / "out", tmp_path / "data"),
        config,
        Reporter.silent(),
        every=10,
    )
    metrics = ("acc", "acc_norm", "answer_bits_per_byte")
    assert [(point["step"], point["metric"]) for point in points] == [
        (s, metric) for s in (10, 20) for metric in metrics
    ]
    assert json.loads((tmp_path / "out" / "curve.json").read_text()) == points
    assert "| acc_norm |" in (tmp_path / "out" / "noise.md").read_text()
    with pytest.raises(InputError, match="no checkpoints"):
        evaluate_series(
            CheckpointPaths(tmp_path / "data"), EvaluationPaths(tmp_path / "out"), config, Reporter.silent()
        )


def test_clean_and_contaminated_questions_stand_apart(tmp_path, config, random_checkpoint, tokenizer_folder):
    """Questions 1 and 4 of 6 were found in the corpus; a document that was only annotated still holds the first."""
    folder = tmp_path / "curate" / "decontamination"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text('{"hans": {}, "rivers": {}}')
    lines = [
        {"benchmark": "hans", "example": str(number), "documents": [{"outcome": outcome}]}
        for number, outcome in ((1, "annotated"), (4, "split"))
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = EvaluationPaths(
        tmp_path / "out", tmp_path / "data", HeldOutCorpus(tmp_path / "curate", tmp_path / "index", 0)
    )
    rows = evaluate_folder(CheckpointPaths(random_checkpoint()), paths, config, Reporter.silent())
    by_name = {(row.task, row.metric): row for row in rows}
    whole, clean, held = (by_name[f"gristmill_hans{part}", "acc"] for part in ("", ", clean", ", contaminated"))
    assert (whole.count, clean.count, held.count) == (6, 4, 2)
    assert whole.score * 6 == pytest.approx(clean.score * 4 + held.score * 2) and clean.chance == 0.5
    samples = [json.loads(line) for line in (tmp_path / "out/samples/gristmill_hans.jsonl").read_text().splitlines()]
    assert held.score == (samples[1]["acc"] + samples[4]["acc"]) / 2
    written = json.loads((tmp_path / "out" / "results.json").read_text())["contamination"]["gristmill_hans"]
    assert written["contaminated"]["acc,none"] == held.score and written["left_in_corpus"] == 1
    table = (tmp_path / "out" / "table.md").read_text()
    assert "2 of 6 questions were found in the corpus (contaminated): 1 were removed" in table
    (folder / "questions.jsonl").write_text("{")
    with pytest.raises(InputError, match=r"questions\.jsonl: damaged .*; run the stage `curate` again"):
        evaluate_folder(CheckpointPaths(random_checkpoint()), paths, config, Reporter.silent())


def test_world_size_must_be_a_multiple_of_model_parallel_size(tmp_path, config, random_checkpoint, tokenizer_folder):
    checkpoint, paths = CheckpointPaths(random_checkpoint()), EvaluationPaths(tmp_path / "out")
    with pytest.raises(RecipeError, match="3 processes are not a multiple of tensor=2 x pipeline=1"):
        evaluate_checkpoint(checkpoint, paths, config, Reporter.silent(), RankInfo(0, 0, 3), ModelParallel(tensor=2))
