"""AdamW equals torch's; Muon's updates; the fp16 loss scale and the guard."""

import pytest
import torch
from torch import nn

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import OptimizerConfig, TrainConfig
from gristmill.training.engine.gradients import clip, global_norm
from gristmill.training.optim.muon import Muon, orthogonal, rounds
from gristmill.training.optim.offload import build_optimizer
from gristmill.training.optim.optimizer import AdamW, Operands
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


@pytest.mark.parametrize(("name", "kind"), [("adamw", AdamW), ("muon", Muon)])
def test_the_recipe_names_the_optimizer(name: str, kind: type) -> None:
    train = TrainConfig(tokens=64, batch_tokens=16, optimizer=OptimizerConfig(name=name))
    assert type(build_optimizer(parameters(), train, MODEL, single_process())) is kind


def test_mup_slows_the_matrices_of_layers() -> None:
    wide = ModelConfig(layers=2, width=512, heads=2, init_method="mup", mup_base_width=128)
    values = parameters()
    before = {name: value.detach().clone() for name, value in values.items()}
    for value in values.values():
        value.grad = torch.ones_like(value)
    AdamW(values, OptimizerConfig(learning_rate=0.01, weight_decay=0.0), wide).step(1.0)
    moved = {name: (before[name] - value).abs().mean().item() for name, value in values.items()}
    assert moved["embedding.weight"] == pytest.approx(0.01, rel=1e-3)
    assert moved["layers.0.mixer.query.weight"] == pytest.approx(0.01 / 4, rel=1e-3)


def test_tables_have_rates_of_their_own_and_no_decay() -> None:
    values = parameters() | {"head.weight": nn.Parameter(torch.randn(5, 8))}
    before = {name: value.detach().clone() for name, value in values.items()}
    for value in values.values():
        value.grad = torch.ones_like(value)
    rates = {"learning_rate": 0.01, "embedding_learning_rate": 0.3, "head_learning_rate": 0.004}
    AdamW(values, OptimizerConfig(**rates, weight_decay=0.5, decay_tables=False), MODEL).step(1.0)
    moved = {name: before[name] - value.detach() for name, value in values.items()}
    # the first step of Adam is the rate itself
    torch.testing.assert_close(moved["embedding.weight"], torch.full((5, 8), 0.3))
    torch.testing.assert_close(moved["head.weight"], torch.full((5, 8), 0.004))
    query = "layers.0.mixer.query.weight"
    torch.testing.assert_close(moved[query], 0.01 + 0.01 * 0.5 * before[query])


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


def test_muon_takes_matrices_of_one_shape_together() -> None:
    shapes = {"a": (2, 3), "b": (4, 4), "c": (2, 3), "d": (2, 3)}
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    operands = [Operands(name, value, value, ()) for name, value in parameters.items()]
    names = [[each.name for each in together] for together in rounds(operands, parameters, 12)]
    assert names == [["a", "c"], ["d"], ["b"]]
    assert [len(together) for together in rounds(operands, parameters, 0)] == [1, 1, 1, 1]


def test_muon_in_a_batch_is_muon_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    for one, whole in zip(orthogonal(matrices), matrices, strict=True):
        torch.testing.assert_close(one, orthogonal(whole), rtol=0, atol=1e-13)
