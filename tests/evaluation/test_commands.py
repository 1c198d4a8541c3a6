import json

import pytest

from gristmill.data_pipeline.engine.progress import Reporter
from gristmill.data_pipeline.errors import InputError, RecipeError
from gristmill.evaluation.commands import evaluate_checkpoint, evaluate_series
from gristmill.evaluation.config import EvaluateConfig
from gristmill.training.processes import Place


@pytest.fixture
def config(tmp_path) -> EvaluateConfig:
    records = [
        {"sentence1": f"The miller {number} ran.", "sentence2": "He ran.", "gold_label": "entailment"}
        for number in range(6)
    ]
    (tmp_path / "data" / "benchmarks").mkdir(parents=True)
    path = tmp_path / "data" / "benchmarks" / "hans_evaluation.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return EvaluateConfig(tasks=("gristmill_hans",), data=str(tmp_path / "data"))


def test_a_checkpoint_alone(tmp_path, config, random_checkpoint, tokenizer_folder):
    rows = evaluate_checkpoint(
        random_checkpoint(), tmp_path / "out", config, Reporter.silent(), cache=tmp_path / "cache"
    )
    assert {row.metric for row in rows} == {"acc", "acc_norm"} and rows[0].count == 6
    again = evaluate_checkpoint(tmp_path, tmp_path / "again", config, Reporter.silent(), cache=tmp_path / "cache")
    assert again == rows
    assert (tmp_path / "out" / "results.json").read_bytes() == (tmp_path / "again" / "results.json").read_bytes()


def test_the_cost_of_eight_bits_is_shown(tmp_path, config, random_checkpoint, tokenizer_folder):
    eight = EvaluateConfig(**{**config.model_dump(), "weights": "int8"})
    evaluate_checkpoint(random_checkpoint(), tmp_path / "out", eight, Reporter.silent())
    assert "quantised to int8" in (tmp_path / "out" / "table.md").read_text()
    assert "| gristmill_hans | 6 | acc |" in (tmp_path / "out" / "cost_of_int8.md").read_text()


def test_a_series_is_a_curve_by_tokens(tmp_path, config, random_checkpoint, tokenizer_folder):
    for step in (10, 15, 20):
        random_checkpoint(step=step)
    points = evaluate_series(tmp_path, tmp_path / "out", config, Reporter.silent(), every=10)
    assert [(point["step"], point["metric"]) for point in points] == [
        (10, "acc"), (10, "acc_norm"), (20, "acc"), (20, "acc_norm"),
    ]  # fmt: skip
    assert json.loads((tmp_path / "out" / "curve.json").read_text()) == points
    with pytest.raises(InputError, match="no checkpoints"):
        evaluate_series(tmp_path / "data", tmp_path / "out", config, Reporter.silent())


def test_processes_must_make_whole_copies(tmp_path, config, random_checkpoint, tokenizer_folder):
    checkpoint = random_checkpoint()
    with pytest.raises(RecipeError, match="3 processes do not make whole copies of tensor=2 x pipeline=1"):
        evaluate_checkpoint(checkpoint, tmp_path / "out", config, Reporter.silent(), place=Place(0, 0, 3), tensor=2)
