"""Activations in host memory: gradients are bitwise those of a layer that keeps all of them."""

from typing import Any

import numpy as np
import pytest
import torch

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.mixers.mamba2 import Mamba2
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.model import layer_hook
from gristmill.training.model.layer_hook import SwappedLayer, first_tokens
from gristmill.training.objectives.objective import Batches
from gristmill.training.parallel.mesh import single_process
from gristmill.training.parallel.offload.swap import InHostMemory
from gristmill.training.planner.activations import ElementSizes
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.engine_profile import GRISTMILL
from gristmill.training.planner.layout import RankLayers, from_config
from gristmill.training.planner.layout_checks import check_layout
from gristmill.training.planner.memory import MemoryModel
from gristmill.training.run import RunConfig, build_forward_backward
from tests.support.parity import Case, Outcome, alone, outcome


def swapped(share: float | None, model: str, precision: str) -> Outcome:
    """share None: recompute: swap."""
    policy = {"recompute": "swap"} if share is None else {"recompute": "tokens", "offloaded_token_fraction": share}
    return outcome(Case(policy | {"num_layers_on_device": 0}, model, precision), single_process())


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("llama", "fp32"),
        ("gpt2", "fp64"),
        ("gemma2", "fp32"),
        ("gptj", "bf16"),
        ("three_mixers", "fp32"),  # Mamba-2, TCNCA and attention
        ("pr_moe", "bf16"),
        pytest.param("latent", "fp32", marks=pytest.mark.slow),
        pytest.param("hybrid_experts", "bf16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("share", [0, 0.3, 1, None])
def test_gradients_are_bitwise_those_of_no_policy(share: float | None, model: str, precision: str) -> None:
    plain, found = alone(False, model, precision, 51, False, "adamw", False), swapped(share, model, precision)
    assert found.losses == plain.losses and found.norms == plain.norms
    for name, value in plain.gradients.items():
        assert np.array_equal(found.gradients[name], value), name


@pytest.mark.slow  # compiles
def test_compiled_layers_are_swapped() -> None:
    policy = {"recompute": "swap", "num_layers_on_device": 0}
    plain, found = (
        outcome(Case({"micro_batch": 4} | layout, precision="fp32", compiled=True), single_process())
        for layout in ({}, policy)
    )
    assert found.losses == plain.losses and found.norms == plain.norms
    assert all(np.array_equal(found.gradients[name], value) for name, value in plain.gradients.items())


def bytes_kept(share: float, monkeypatch: pytest.MonkeyPatch, name: str = "llama") -> tuple[dict[str, int], int]:
    """(bytes in host memory by kind, saved tensors that are recomputed in part) of all but the last layer in a pass."""
    host = {"whole": 0, "rows": 0}
    rows = 0
    pack, always = SwappedLayer._pack, InHostMemory.__init__

    def counted(self: Any, values: torch.Tensor, swap: Any) -> None:
        always(self, values, swap)
        host["rows" if values.dim() == 4 else "whole"] += values.nbytes

    def packed(self: Any, tensor: torch.Tensor) -> Any:
        nonlocal rows
        saved = pack(self, tensor)
        rows += isinstance(saved, layer_hook._SavedRows)
        return saved

    monkeypatch.setattr(InHostMemory, "__init__", counted)
    monkeypatch.setattr(SwappedLayer, "_pack", packed)
    layout = {"recompute": "tokens", "offloaded_token_fraction": share, "micro_batch": 16, "num_layers_on_device": 1}
    case, mesh = Case(layout, name, "fp32"), single_process()
    model, train = case.configs
    parts = build_local_model(model, 51, train, mesh, seed=7)
    passes = build_forward_backward(parts, RunConfig(model, train, 7), mesh, case.loss)
    passes.train(Batches(case.samples, mesh.data, mesh.device).take(0, 16), [1.0, 1.0])
    return host, rows


def test_what_goes_to_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 samples of 16 tokens, one of two layers. Always there: the input and the attention output, 256 x 32 numbers of
    4 bytes each, and what attention keeps besides queries, keys and values. Half of the tokens of the others."""
    with monkeypatch.context() as patch:
        none, recomputed = bytes_kept(0.0, patch)
    with monkeypatch.context() as patch:
        half, _ = bytes_kept(0.5, patch)
    assert none["rows"] == 0 and none["whole"] >= 2 * 256 * 32 * 4
    assert recomputed > 8 and half["whole"] == none["whole"]
    # the MLP keeps gate, its silu, up and their product, 48 wide: half of the tokens of each
    assert half["rows"] >= 4 * 128 * 48 * 4


@pytest.mark.parametrize("name", ["llama", "mamba2", "tcnca", "latent"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_planner_knows_the_bytes(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all layers in host memory but the last, within 5 %."""
    host, _ = bytes_kept(share, monkeypatch, name)
    layout = {"recompute": "tokens", "offloaded_token_fraction": share, "micro_batch": 16, "num_layers_on_device": 1}
    model, train = Case(layout, name, "fp32").configs
    memory = MemoryModel(shape_of(model, 51), GRISTMILL, ElementSizes(4, 4, cuda=False))
    forecast = memory.rank(from_config(train.layout, 16), RankLayers((model.layers,), True, True), 0, 1).host
    assert sum(host.values()) == pytest.approx(forecast, rel=0.05)


def test_first_tokens() -> None:
    assert [first_tokens(share, 100) for share in (0, 0.3, 0.5, 1)] == [0, 32, 48, 100]
    assert first_tokens(0.1, 16) == 0


@pytest.mark.parametrize(
    ("layout", "model", "train", "said"),
    [
        ({}, {}, {"compile": True}, "set recompute: swap, or compile: false"),
        ({}, {}, {"float8": True, "precision": "bf16"}, "set float8: false"),
    ],
)
def test_combinations_that_are_not_built_are_refused(
    layout: dict[str, Any], model: dict[str, Any], train: dict[str, Any], said: str
) -> None:
    config = ModelConfig(
        **({"layers": 2, "width": 32, "heads": 4, "sequence_length": 16, "ffn_hidden_size": 48} | model)
    )
    layout = {"recompute": "tokens", "offloaded_token_fraction": 0.5} | layout
    with pytest.raises(RecipeError, match=said):
        check_layout(config, TrainConfig(tokens=256, batch_tokens=256, layout=layout, **train), 51, 1)


def test_a_mixer_that_does_not_mark_its_mixing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mamba2, "marks_mixing", False)
    model, train = Case({"recompute": "tokens", "offloaded_token_fraction": 0.5}, "mamba2").configs
    with pytest.raises(RecipeError, match=r"the mixer mamba2 does not say .* set recompute: swap or full"):
        check_layout(model, train, 51, 1)


def test_routed_experts_are_in_host_memory_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 tokens of width 16 with 2 experts of 8 each: the rows that go in and come out, 512 x 16, and gate and up,
    512 x 8, besides what a layer without experts keeps whole; and the result, 256 x 16."""
    with monkeypatch.context() as patch:
        experts, _ = bytes_kept(0.0, patch, "experts")
    attention = 5 * 256 * 16 * 4 + 32 * 16 * 16 * 4 + 256 * 16 * 4
    routed = 4 * (2 * 512 * 16 + 2 * 512 * 8 + 256 * 16)
    assert experts["rows"] == 0
    assert 0 <= experts["whole"] - attention - routed < 0.2 * routed  # and what the router keeps


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"recompute": "tokens", "pipeline": 2, "pipeline_schedule": "zbv"}, "which zbv splits"),
        ({"recompute": "full", "offloaded_token_fraction": 0.5}, "offloaded_token_fraction is of recompute: tokens"),
    ],
)
def test_layouts_that_cannot_recompute_by_token_are_refused(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainConfig(tokens=256, batch_tokens=256, layout=layout)
