"""Evaluation during training equals that of the saved checkpoint and does not change the training."""

import json

import pytest
import torch

from gristmill.evaluation.commands import evaluate_checkpoint
from gristmill.evaluation.in_training import InTrainingSources, ModelInTraining, check_in_training, evaluate_in_training
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.evaluation.run import EvaluationPaths
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.checkpoint.checkpoint import (
    CheckpointContent,
    SavedModelConfig,
    load_model,
    save,
    saved_tensors,
    step_folder,
)
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.parallel.mesh import build_mesh
from gristmill.training.run import RunConfig, build_forward_backward
from tests.support.recording_reporter import RecordingReporter

HANS = EvaluateConfig(tasks=("gristmill_hans",))
HANS_5 = EvaluateConfig(tasks=("gristmill_hans",), limit=5)
SHAPE = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "sequence_length": 128}


def test_a_live_model_scores_as_its_checkpoint_and_does_not_change(tmp_path, hans, random_checkpoint, tokenizer_folder):
    checkpoint = random_checkpoint()
    model, _ = load_model(checkpoint)
    model.train().requires_grad_(True)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    scores = evaluate_in_training(ModelInTraining({0: model}), InTrainingSources(tokenizer_folder, hans), HANS_5)
    config = EvaluateConfig(tasks=("gristmill_hans",), data=str(hans), limit=5)
    rows = evaluate_checkpoint(
        CheckpointPaths(checkpoint), EvaluationPaths(tmp_path / "out", hans), config, Reporter.silent()
    )
    assert scores == {"gristmill_hans": {key: value for row in rows for key, value in (
        (row.metric, row.score), (f"{row.metric}_stderr", row.error))}}  # fmt: skip
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad and torch.equal(parameter, before[name])


LAYOUTS = [
    {"tensor": 2, "pipeline": 2},
    pytest.param({"data": 2, "replicate": 2, "tensor": 2}, marks=pytest.mark.slow),
    {"pipeline": 2, "pipeline_schedule": "interleaved", "data": 2},
    {"pipeline": 2, "pipeline_schedule": "zbv"},
    {"data": 2, "expert": 2},
    pytest.param({"data": 2, "tensor": 2, "expert": 2}, marks=pytest.mark.slow),
    {"data": 2, "context": 2},
]


@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_every_layout_scores_as_one_process(fields, tmp_path, hans, tokenizer_folder, pool):
    layout = LayoutConfig(**fields)
    scores = pool.run(layout.world_size, scored_on_mesh, layout, tokenizer_folder, hans, tmp_path)
    assert all(each == scores[0] for each in scores)
    alone, _ = load_model(step_folder(tmp_path / "run", 1))
    expected = evaluate_in_training(ModelInTraining({0: alone}), InTrainingSources(tokenizer_folder, hans), HANS)
    assert scores[0]["gristmill_hans"] == pytest.approx(expected["gristmill_hans"], abs=1e-6)


def scored_on_mesh(layout, tokenizer_folder, hans, folder):
    """Draws a model on the layout, asks it between two equal passes, and saves it."""
    moe = {"experts": (0, 4), "top_k": 2, "ffn_hidden_size": 16, "bias_update_rate": 0.1} if layout.expert > 1 else None
    config = ModelConfig(**SHAPE, moe=moe)
    mesh = build_mesh(layout, config.num_kv_heads, torch.device("cpu"), config.has_experts)
    train = TrainConfig(tokens=512, batch_tokens=512, precision="fp32", layout=layout)
    parts = build_local_model(config, 257, train, mesh, seed=7)
    passes = build_forward_backward(parts, RunConfig(config, train, 7), mesh, causal_loss())
    x = torch.arange(8 * 64).remainder(257).view(8, 64)[mesh.data.rank :: mesh.data.size]
    batch = {"tokens": x, "targets": x, "weights": torch.ones(x.shape)}
    before = passes.train(batch, [1.0])
    parts.clear_gradients()
    scores = evaluate_in_training(
        ModelInTraining(parts.stages, layout, mesh), InTrainingSources(tokenizer_folder, hans), HANS
    )
    after = passes.train(batch, [1.0])
    assert before is None or torch.equal(before, after)
    tensors = saved_tensors(parts.parameters, parts.buffers)
    save(folder / "run", 1, CheckpointContent(tensors, SavedModelConfig.of(config, 257, 256)), mesh)
    return scores


def test_a_spent_budget_skips_tasks_with_a_message(tmp_path, hans, random_checkpoint, tokenizer_folder):
    (hans / "benchmarks" / "anli_r1_test.jsonl").write_text(
        json.dumps({"context": "It rains.", "hypothesis": "It is wet.", "label": "e"}) + "\n"
    )
    model, _ = load_model(random_checkpoint())
    reporter = RecordingReporter()
    config = EvaluateConfig(tasks=("gristmill_hans", "anli_r1"))
    live, sources = ModelInTraining({0: model}), InTrainingSources(tokenizer_folder, hans)
    scores = evaluate_in_training(live, sources, config, budget_seconds=0.0, reporter=reporter)
    assert list(scores) == ["gristmill_hans"]
    assert reporter.lines == ["evaluation: its budget of 0 s is spent; skipped: anli_r1"]
    assert list(evaluate_in_training(live, sources, config)) == ["gristmill_hans", "anli_r1"]


def test_errors_are_found_before_a_run_begins(hans, tokenizer_folder):
    check_in_training(tokenizer_folder, 257, 256, ["gristmill_hans", "bits_per_byte"], hans)
    with pytest.raises(RecipeError, match="no task 'gristmill_hams'; the nearest is 'gristmill_hans'"):
        check_in_training(tokenizer_folder, 257, 256, ["gristmill_hams"], hans)
    with pytest.raises(InputError, match=r"anli_r2_test\.jsonl: absent"):
        check_in_training(tokenizer_folder, 257, 256, ["anli_r2"], hans)
    with pytest.raises(InputError, match="the tokenizer has 257 tokens and the checkpoint was trained on 300"):
        check_in_training(tokenizer_folder, 300, 256, ["gristmill_hans"], hans)
