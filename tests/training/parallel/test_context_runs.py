"""Whole runs on context ranks: checkpoints move to other context sizes and back."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.training.checkpoint.checkpoint import step_folder
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.metrics import METRICS_NAME, read_metrics
from gristmill.training.parallel.mesh import build_mesh
from tests.support.training_runs import MODEL, new_run

SETTINGS = {"precision": "fp64", "checkpoint": {"every": 3, "keep_last": 9}, "validation": {"every": 3, "samples": 5}}


def train_on_mesh(folder: Path, layout: dict[str, Any]) -> None:
    mesh = build_mesh(LayoutConfig(**layout), MODEL.num_kv_heads, torch.device("cpu"))
    new_run(folder, mesh, layout=layout, **SETTINGS).train()


def with_checkpoint(folder: Path, other: Path, step: int) -> Path:
    """A folder to resume in, with one checkpoint of another run."""
    shutil.copytree(step_folder(other / "checkpoints", step), step_folder(folder / "checkpoints", step))
    return folder


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_moves_to_context_ranks_and_back(num_ranks: int, tmp_path: Path, pool: Any) -> None:
    """With four ranks through two of them."""
    new_run(tmp_path / "alone", **SETTINGS).train()
    moved = with_checkpoint(tmp_path / "two", tmp_path / "alone", 3)
    pool.run(2, train_on_mesh, moved, {"context": 2})
    if num_ranks == 4:
        moved = with_checkpoint(tmp_path / "four", moved, 6)
        pool.run(4, train_on_mesh, moved, {"context": 2, "tensor": 2, "context_method": "all_to_all"})
    back = with_checkpoint(tmp_path / "back", moved, 9)
    new_run(back, **SETTINGS).train()
    expected, found = (read_metrics(tmp_path / name / METRICS_NAME) for name in ("alone", "back"))
    assert [line["step"] for line in found] == [line["step"] for line in expected] == list(range(1, 13))
    for one, other in zip(expected, found, strict=True):
        for name in ("loss", "grad_norm", "valid_tokens"):
            assert other.get(name) == pytest.approx(one.get(name), rel=1e-10)
        if "validation" in one:
            assert other["validation"]["loss"] == pytest.approx(one["validation"]["loss"], rel=1e-10)
