"""AdamW against torch's own, Muon's matrices, the fp16 scale and the guard."""

import pytest
import torch
from torch import nn

from gristmill.foundation.errors import InputError
from gristmill.training.config import GuardConfig, ModelConfig, OptimizerConfig
from gristmill.training.guard import Guard
from gristmill.training.optim.adamw import AdamW
from gristmill.training.optim.loss_scale import INITIAL_SCALE, STEPS_BEFORE_DOUBLING, LossScale
from gristmill.training.optim.muon import orthogonal
from gristmill.training.optim.norm import clip, global_norm
from gristmill.training.parallel.mesh import single_process

MODEL = ModelConfig(layers=2, width=8, heads=2)


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding.weight": (5, 8), "layers.0.mixer.query.weight": (8, 8), "layers.0.mixer_norm.weight": (8,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def test_adamw_is_torchs_with_decay_on_matrices_only() -> None:
    ours, theirs = parameters(), parameters()
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.5)
    optimizer = AdamW(ours, config, MODEL)
    matrices, vectors = list(theirs.values())[:2], list(theirs.values())[2:]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    other = torch.optim.AdamW(groups, lr=0.01, betas=config.betas, eps=config.epsilon)
    for step in range(4):
        for mine, its in zip(ours.values(), theirs.values(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step))
            its.grad = mine.grad.clone()
        for group in other.param_groups:
            group["lr"] = 0.01 * (step + 1) / 4
        optimizer.step((step + 1) / 4)
        other.step()
    for mine, its in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, its)


def test_mup_slows_the_matrices_of_layers() -> None:
    wide = ModelConfig(layers=2, width=512, heads=2, initialisation="mup", mup_base_width=128)
    values = parameters()
    before = {name: value.detach().clone() for name, value in values.items()}
    for value in values.values():
        value.grad = torch.ones_like(value)
    AdamW(values, OptimizerConfig(learning_rate=0.01, weight_decay=0.0), wide).step(1.0)
    moved = {name: (before[name] - value).abs().mean().item() for name, value in values.items()}
    assert moved["embedding.weight"] == pytest.approx(0.01, rel=1e-3)
    assert moved["layers.0.mixer.query.weight"] == pytest.approx(0.01 / 4, rel=1e-3)


@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 24)])
def test_muon_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert values.min() > 0.3 and values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    rotated = left.T @ orthogonal(matrix) @ right.T  # the same singular vectors: diagonal
    torch.testing.assert_close(rotated, torch.diag(rotated.diagonal()), atol=1e-10, rtol=0)


def test_clipping_is_torchs() -> None:
    ours, theirs = parameters(), parameters()
    for mine, its in zip(ours.values(), theirs.values(), strict=True):
        mine.grad, its.grad = torch.full_like(mine, 0.7), torch.full_like(its, 0.7)
    norm = global_norm(ours.values(), single_process()).item()
    clip(ours.values(), norm, 1.0)
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(theirs.values(), 1.0).item(), rel=1e-6)
    for mine, its in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-5, atol=0)


def test_the_fp16_scale_halves_and_doubles() -> None:
    scale = LossScale(dynamic=True)
    assert "falls to 32768" in scale.skip_reason(float("inf"))
    assert [scale.skip_reason(1.0) for _ in range(STEPS_BEFORE_DOUBLING)] == [None] * STEPS_BEFORE_DOUBLING
    assert scale.value == INITIAL_SCALE
    scale.value = 1.0
    assert scale.skip_reason(float("nan")) is None  # not the scale's fault: the guard decides
    assert LossScale(dynamic=False).skip_reason(float("nan")) is None


def test_the_guard_skips_what_is_not_finite_and_what_stands_out() -> None:
    guard = Guard(GuardConfig(sigmas=6))
    assert all(
        guard.skip_reason(step, 2.0 + 0.01 * (step % 2), 1.0 + 0.01 * (step % 2)) is None for step in range(1, 21)
    )
    assert "not finite" in guard.skip_reason(21, float("nan"), 1.0)
    assert "gradient norm 9 is 6.0 standard deviations above the mean" in guard.skip_reason(22, 2.0, 9.0)
    assert guard.skip_reason(23, 2.0, 1.0) is None
    assert guard.skipped == [21, 22]
    again = Guard(GuardConfig(sigmas=6))
    again.restore(guard.state())
    assert again.skip_reason(24, 5.0, 1.0) is not None


def test_too_many_skips_in_a_row_stop_the_run() -> None:
    guard = Guard(GuardConfig(max_consecutive_skips=2))
    guard.skip_reason(1, float("inf"), 1.0)
    guard.skip_reason(2, float("inf"), 1.0)
    with pytest.raises(InputError, match=r"step 3: loss inf.*3 steps in a row were skipped.*lower train.optimizer"):
        guard.skip_reason(3, float("inf"), 1.0)
