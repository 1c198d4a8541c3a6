"""Upcycling: experts that begin as copies of a dense model's MLPs compute what it does at step 0."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint.checkpoint import step_folder
from gristmill.training.checkpoint.init_from import source_of
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.parallel.mesh import build_mesh
from tests.support.training_runs import MODEL, new_run, train_config

SETTINGS = {"precision": "fp64", "checkpoint": {"every": 0}, "validation": {"every": 0}}
TOKENS = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(0))


def mixture(**moe: Any) -> ModelConfig:
    return ModelConfig(**(MODEL.model_dump() | {"moe": {"experts": [0, 4], "top_k": 2} | moe}))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    new_run(folder, **SETTINGS).train()
    return step_folder(folder / "checkpoints", 12)


def initialized(folder: Path, dense: Path, model: ModelConfig, mesh: Any = None, layout: Any = None) -> dict[str, Any]:
    """The parameters of a run at step 0, whole."""
    settings = SETTINGS | {"init_from": str(dense), "upcycle": "copy", "layout": layout or {}}
    run = new_run(folder, mesh, model=model, **settings)
    run._resume()
    values = run.model.parameters.items()
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone() for name, v in values}


@pytest.mark.parametrize("moe", [{}, {"residual": True, "top_k": 1}, {"experts": 8, "top_k": 3}], ids=str)
def test_at_step_0_the_mixture_is_the_dense_model(moe: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    begun = SETTINGS | {"init_from": str(dense)}
    upcycled = new_run(tmp_path / "mixture", model=mixture(**moe), upcycle="copy", **begun)
    plain = new_run(tmp_path / "dense", **begun)
    upcycled._resume()
    plain._resume()
    with torch.no_grad():
        expected = plain.model.stages[0](TOKENS)
        torch.testing.assert_close(upcycled.model.stages[0](TOKENS), expected, rtol=0, atol=1e-12)


def on_mesh(folder: Path, dense: Path, model: ModelConfig, layout: dict[str, Any]) -> dict[str, Any]:
    mesh = build_mesh(LayoutConfig(**layout), model.num_kv_heads, torch.device("cpu"), model.has_experts)
    return {name: value.numpy() for name, value in initialized(folder, dense, model, mesh, layout).items()}


def test_experts_on_ranks_begin_alike(dense: Path, tmp_path: Path, pool: Any) -> None:
    alone = initialized(tmp_path / "alone", dense, mixture())
    layout = {"data": 4, "expert": 2, "micro_batch": 1}
    for found in pool.run(4, on_mesh, tmp_path / "mesh", dense, mixture(), layout):
        assert found.keys() == alone.keys()
        for name, value in found.items():
            assert (torch.from_numpy(value) == alone[name]).all(), name


@pytest.mark.parametrize(
    ("moe", "says"),
    [
        ({"normalize_gates": False}, "gates must sum to 1"),
        ({"shared_experts": 1}, "set moe.shared_experts: 0"),
        ({"ffn_hidden_size": 8}, r"experts \[8\] wide cannot hold the MLP"),
    ],
)
def test_what_would_not_begin_equal_is_refused(moe: dict[str, Any], says: str, dense: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        initialized(tmp_path, dense, mixture(**moe))


def test_another_dense_model_is_named(dense: Path, tmp_path: Path) -> None:
    other = ModelConfig(**(mixture().model_dump() | {"width": 16, "heads": 2, "kv_heads": 1}))
    with pytest.raises(InputError, match="width 32 instead of 16"):
        initialized(tmp_path, dense, other)


def test_upcycling_needs_a_checkpoint() -> None:
    with pytest.raises(ValidationError, match="upcycle needs a dense checkpoint"):
        train_config(upcycle="copy")


def test_sources_by_hand() -> None:
    assert source_of("layers.3.mlp.experts.up.weight") == "layers.3.mlp.up.weight"
    assert source_of("layers.3.mlp.residual.down.bias") == "layers.3.mlp.down.bias"
    assert source_of("layers.3.mlp.router.weight") is None
    assert source_of("layers.3.mixer.query.weight") == "layers.3.mixer.query.weight"
