"""Whole runs of BERT: a checkpoint of any layout goes on on any other, and a classification begins with its weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.foundation.progress import Reporter
from gristmill.training.checkpoint.checkpoint import load_model, step_folder
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.metrics import METRICS_NAME, read_metrics
from gristmill.training.objectives.objective import TrainingData
from gristmill.training.parallel.mesh import build_mesh, single_process
from gristmill.training.run import Run, RunConfig
from tests.support.parity import BERT
from tests.support.recording_reporter import RecordingReporter
from tests.support.synthetic_pairs import PIECES, SyntheticPairs
from tests.support.training_runs import train_config

LENGTH = 16
MODEL = BERT | {"heads": 4, "sequence_length": LENGTH, "init_std": 0.1}


def encode(text: str) -> list[int]:
    return [4 + ord(letter) % 40 for letter in text]


def bert_run(
    folder: Path,
    mesh: Any = None,
    reporter: Reporter | None = None,
    model: Any = MODEL,
    end_of_document: int = 0,
    **changes: Any,
) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    pairs = SyntheticPairs(LENGTH - 3)
    data = TrainingData(
        pairs, pairs, end_of_document, mask_documents=False, bytes_per_token={}, pieces=PIECES, encode=encode
    )
    settings = {
        "objective": "masked",
        "precision": "fp64",
        "tokens": 6 * 8 * LENGTH,
        "batch_tokens": 8 * LENGTH,
        # Where a gradient is zero but for rounding (a key's bias), Adam would follow the rounding.
        "optimizer": {"learning_rate": 1e-2, "epsilon": 1e-4},
    }
    config = RunConfig(ModelConfig(**model), train_config(**(settings | changes)), seed=7)
    return Run(config, data, mesh or single_process(), folder, reporter or Reporter.silent())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    bert_run(folder).train()
    return folder


def test_metrics_have_both_losses(unbroken: Path) -> None:
    last = read_metrics(unbroken / METRICS_NAME)[-1]
    assert last["terms"].keys() == {"masked_tokens", "sentence_order"} == last["validation"]["terms"].keys()
    assert last["loss"] == last["terms"]["masked_tokens"]
    assert last["objective"] == pytest.approx(sum(last["terms"].values()))
    assert "bits_per_byte" not in last


def train_until(folder: Path, step: int, layout: dict[str, Any]) -> None:
    mesh = build_mesh(LayoutConfig(**layout), MODEL["kv_heads"], torch.device("cpu"))
    run = bert_run(folder, mesh, layout=layout | {"micro_batch": 2})
    run._resume()
    while run.trainer.progress.step < step:
        run.trainer.step()
    run._save_if_due(now=True)


def test_a_checkpoint_of_any_layout_goes_on_on_any_other(unbroken: Path, tmp_path: Path, pool: Any) -> None:
    pool.run(4, train_until, tmp_path, 2, {"tensor": 2, "pipeline": 2})
    pool.run(2, train_until, tmp_path, 4, {"data": 2})
    bert_run(tmp_path).train()
    ours, theirs = (read_metrics(folder / METRICS_NAME)[-2:] for folder in (tmp_path, unbroken))
    for one, other in zip(ours, theirs, strict=True):
        assert one["step"] == other["step"] in (5, 6)
        assert one["objective"] == pytest.approx(other["objective"], rel=1e-12)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-11)


def test_a_classification_begins_with_the_weights_of_a_masked_model(unbroken: Path, tmp_path: Path) -> None:
    lines = [{"first": "aaaa" if k % 2 else "bbbb", "second": "cc", "label": "ab"[k % 2 == 0]} for k in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint = step_folder(unbroken / "checkpoints", 6)
    outputs = [{"name": "sentence_order", "size": 2}, {"name": "classes", "size": 2}]
    reporter = RecordingReporter()
    run = bert_run(
        tmp_path / "run",
        reporter=reporter,
        model=MODEL | {"outputs": outputs},
        objective="classification",
        objective_options={"train": str(tmp_path / "train.jsonl"), "labels": ["a", "b"]},
        init_from=str(checkpoint),
        tokens=20 * 8 * LENGTH,
    )
    run._resume()
    pretrained, _ = load_model(checkpoint)
    for name, value in pretrained.named_parameters():
        assert torch.equal(run.model.parameters[name].float(), value), name
    assert "train: outputs that begin anew: classes" in reporter.lines
    run.train()
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / METRICS_NAME)]
    assert losses[-1] < 0.1 < losses[0]
