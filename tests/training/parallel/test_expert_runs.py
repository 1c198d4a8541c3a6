"""Whole runs with experts: checkpoints move between sizes of the expert axis, and bad layouts are refused."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.training.checkpoint.checkpoint import step_folder
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.metrics import METRICS_NAME, read_metrics
from gristmill.training.parallel.mesh import build_mesh
from gristmill.training.planner.command import resolve_layout
from gristmill.training.planner.layout_checks import validation_errors
from tests.support.training_runs import MODEL, new_run

EXPERTS = ModelConfig(
    **(
        MODEL.model_dump()
        | {
            "layers": 2,
            "moe": {
                "experts": 8,
                "top_k": 2,
                "ffn_hidden_size": 16,
                "bias_update_rate": 0.05,
                "balance_loss": 0.1,
                "balance_over": "batch",
            },
        }
    )
)
SETTINGS = {"precision": "fp64", "checkpoint": {"every": 3, "keep_last": 9}}


def train_on_mesh(folder: Path, layout: dict[str, Any]) -> None:
    mesh = build_mesh(LayoutConfig(**layout), EXPERTS.num_kv_heads, torch.device("cpu"), experts=True)
    new_run(folder, mesh, model=EXPERTS, layout=layout, **SETTINGS).train()


def with_checkpoint(folder: Path, other: Path, step: int) -> Path:
    """A folder to resume in, with one checkpoint of another run."""
    shutil.copytree(step_folder(other / "checkpoints", step), step_folder(folder / "checkpoints", step))
    return folder


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_moves_from_one_process_to_expert_ranks_and_back(num_ranks: int, tmp_path: Path, pool: Any) -> None:
    """To four ranks through two of them."""
    new_run(tmp_path / "alone", model=EXPERTS, **SETTINGS).train()
    moved = with_checkpoint(tmp_path / "two", tmp_path / "alone", 3)
    pool.run(2, train_on_mesh, moved, {"data": 2, "expert": 2, "micro_batch": 1})
    if num_ranks == 4:
        moved = with_checkpoint(tmp_path / "four", moved, 6)
        pool.run(4, train_on_mesh, moved, {"data": 4, "expert": 4, "micro_batch": 1})
    back = with_checkpoint(tmp_path / "back", moved, 9)
    new_run(back, model=EXPERTS, **SETTINGS).train()
    expected = read_metrics(tmp_path / "alone" / METRICS_NAME)
    found = read_metrics(back / METRICS_NAME)
    assert [line["step"] for line in found] == [line["step"] for line in expected] == list(range(1, 13))
    for one, other in zip(expected, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-10)
        assert other["expert_load"] == one["expert_load"]


DENSE = {"layers": 2, "width": 32, "heads": 4, "sequence_length": 16}
BATCH = {"tokens": 10**6, "batch_tokens": 16 * 16}


@pytest.mark.parametrize(
    ("model", "train", "says"),
    [
        ({}, {"layout": {"data": 2, "expert": 2}}, "the model has no experts; set both to 1, or give the model some"),
        (
            {"moe": {"experts": (6, 9)}},
            {"layout": {"data": 2, "expert": 2}},
            r"expert 2: layers with \[6, 9\] experts do not split evenly; try one of \[1, 3\]",
        ),
        (
            {"moe": {"experts": 4, "ffn_hidden_size": 15}},
            {"layout": {"data": 2, "expert_tensor": 2}},
            r"expert_tensor 2: the experts' width does not split evenly; try \[1, 3, 5, 15\]",
        ),
        (
            {"moe": {"experts": 4, "ffn_hidden_size": 16}},
            {"float8": True, "precision": "bf16", "layout": {"expert_tensor": 2, "data": 2}},
            r"float8 wants experts' hidden width on a rank \(8\) to be a multiple of 16",
        ),
        (
            {"qk_norm": "width", "norm": "layernorm"},
            {"layout": {"tensor": 2}},
            "qk_norm: width with a LayerNorm is not built over ranks yet; use norm: rmsnorm",
        ),
    ],
)
def test_what_experts_cannot_be_laid_over_is_refused(model: dict, train: dict, says: str) -> None:
    config = TrainConfig(**(BATCH | train))
    found = list(validation_errors(ModelConfig(**(DENSE | model)), config, 50, config.layout.world_size))
    assert re.search(says, "\n".join(found)), found


@pytest.mark.parametrize("more", [{}, {"precision": "bf16", "float8": True}], ids=["plain", "float8"])
def test_the_planner_chooses_an_expert_axis(more: dict[str, Any]) -> None:
    model = ModelConfig(**(DENSE | {"heads": 2, "moe": {"experts": 8, "top_k": 2, "ffn_hidden_size": 64}}))
    train = TrainConfig(**(BATCH | more), layout="auto")
    chosen = resolve_layout(model, 50, train, 4).layout
    assert chosen.world_size == 4 and not list(
        validation_errors(model, TrainConfig(**(BATCH | more), layout=chosen), 50, 4)
    )


def test_an_expert_axis_that_divides_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expert=3 x expert_tensor=1 does not divide the 4 ranks .* \[1, 2, 4\]"):
        LayoutConfig(data=4, expert=3)
