"""Distillation: the divergence against torch's own, sharded and not, and whole runs with a teacher on layouts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint.checkpoint import step_folder
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.train import TeacherConfig
from gristmill.training.metrics import METRICS_NAME, read_metrics
from gristmill.training.model.heads import DistillationTeacher, distillation_losses
from gristmill.training.model.loss import Scoring
from gristmill.training.objectives.objective import DistillationOptions
from gristmill.training.parallel.mesh import build_mesh, single_process
from gristmill.training.parallel.tensor import TensorAxis
from tests.support.training_runs import MODEL, new_run

VOCAB, SAMPLES, TOKENS = 7, 2, 3
TEACHER = MODEL.model_copy(update={"layers": 6, "width": 24, "heads": 2, "kv_heads": 2})


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (SAMPLES, TOKENS, 4), "head": (VOCAB, 4), "teacher": (SAMPLES, TOKENS, 5), "table": (VOCAB, 5)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def distilled(tensor: TensorAxis, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """(losses [B], gradients of the hidden states and of the own rows of the head)."""
    values = tensors()
    hidden, head = values["hidden"].requires_grad_(), values["head"][rows].clone().requires_grad_()
    scoring = Scoring(tensor, VOCAB, scale=0.5, softcap=2.0)
    distillation = DistillationTeacher(Scoring(tensor, VOCAB), values["table"][rows], temperature=2.0)
    weights = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    losses = distillation_losses(scoring, hidden, head, values["teacher"], weights, distillation)
    (losses.sum() * 0.25).backward()
    return losses.detach(), hidden.grad, head.grad


def test_the_divergence_is_torchs_kl() -> None:
    values = tensors()
    losses, hidden_gradient, head_gradient = distilled(TensorAxis(single_process(), False), slice(None))
    hidden, head = values["hidden"].requires_grad_(), values["head"].requires_grad_()
    ours = 2.0 * torch.tanh(hidden @ head.T * 0.5 / 2.0) / 2.0
    theirs = values["teacher"] @ values["table"].T / 2.0
    each = F.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    expected = 4 * (each * torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])).sum(1)
    (expected.sum() * 0.25).backward()
    torch.testing.assert_close(losses, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(hidden_gradient, hidden.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(head_gradient, head.grad, rtol=0, atol=1e-12)


def on_this_tensor_rank() -> tuple[np.ndarray, ...]:
    mesh = build_mesh(LayoutConfig(tensor=2), 2, torch.device("cpu"))
    rows = slice(4 * mesh.tensor.rank, 4 * (mesh.tensor.rank + 1))  # 7 rows: 4 and 3
    return tuple(part.numpy() for part in distilled(TensorAxis(mesh, False), rows))


def test_a_sharded_vocabulary_gives_the_same(pool: Any) -> None:
    losses, hidden_gradient, head_gradient = distilled(TensorAxis(single_process(), False), slice(None))
    first, second = pool.run(2, on_this_tensor_rank)
    np.testing.assert_allclose(first[0], losses, rtol=0, atol=1e-12)
    np.testing.assert_allclose(second[0], losses, rtol=0, atol=1e-12)
    np.testing.assert_allclose(first[1] + second[1], hidden_gradient, rtol=0, atol=1e-12)  # summed on entering
    np.testing.assert_allclose(np.concatenate([first[2], second[2]]), head_gradient, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    new_run(folder, model=TEACHER, precision="fp64", checkpoint={"every": 0}).train()
    return step_folder(folder / "checkpoints", 12)


def teaching(teacher: Path, until: float = 1.0, **options: Any) -> dict[str, Any]:
    return {
        "precision": "fp64",
        "checkpoint": {"every": 0},
        "objective": "distillation",
        "objective_options": options,
        "teacher": {"checkpoint": str(teacher), "stop_at_fraction": until},
    }


def lines(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / METRICS_NAME)


def test_a_teacher_is_heard_until_its_share_of_the_run(teacher: Path, tmp_path: Path) -> None:
    new_run(tmp_path / "all", **teaching(teacher, weight=0.5)).train()
    new_run(tmp_path / "half", **teaching(teacher, weight=0.5, until=0.5)).train()
    whole, half = lines(tmp_path / "all"), lines(tmp_path / "half")
    assert whole[:6] == half[:6]
    assert all(line["objective"] > line["loss"] for line in (*whole, *half[:6]))
    assert all(line["objective"] == pytest.approx(line["loss"], abs=1e-12) for line in half[6:])


def train_on_mesh(folder: Path, settings: dict[str, Any], layout: dict[str, Any]) -> None:
    mesh = build_mesh(LayoutConfig(**layout), MODEL.num_kv_heads, torch.device("cpu"))
    new_run(folder, mesh, layout=layout, **settings).train()


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline": 2, "pipeline_schedule": "zbv"},
        pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "tensor": 2, "pipeline_schedule": "zbv"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_taught_run_on_a_layout_is_one_process(
    layout: dict[str, Any], teacher: Path, tmp_path: Path, pool: Any
) -> None:
    settings = teaching(teacher, temperature=2.0, until=0.5) | {"tokens": 4 * 4 * 16}
    new_run(tmp_path / "alone", **settings).train()
    world_size = LayoutConfig(**layout).world_size
    pool.run(world_size, train_on_mesh, tmp_path / "mesh", settings, layout | {"micro_batch": 1})
    for one, other in zip(lines(tmp_path / "alone"), lines(tmp_path / "mesh"), strict=True):
        assert other["objective"] == pytest.approx(one["objective"], rel=1e-11)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-10)


def test_a_teacher_of_another_vocabulary_is_refused(teacher: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tests.support.training_runs.Counting.vocab_size", 49)
    with pytest.raises(InputError, match=r"train\.teacher: .* its vocab_size is 50, the data has 49"):
        new_run(tmp_path / "run", **teaching(teacher))


def test_a_teacher_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-such-folder"):
        new_run(tmp_path / "run", **teaching(tmp_path / "no-such-folder"))


def test_shares_and_weights_must_be_positive() -> None:
    for until in (0.0, 1.5):
        with pytest.raises(ValueError, match="stop_at_fraction"):
            TeacherConfig(checkpoint="x", stop_at_fraction=until)
    for wrong in ({"weight": 0.0}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DistillationOptions(**wrong)
