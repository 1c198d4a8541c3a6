"""Patterns and options of mixers: what they mean, and errors with the nearest legal value."""

import re
from typing import Any

import pytest

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.recipes.config import identity
from gristmill.training.checkpoint.checkpoint import SavedModelConfig
from gristmill.training.checkpoint.init_from import architecture
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.costs.stage_splitting import split_model
from gristmill.training.planner.layout_checks import check_layout

SIZE: dict[str, Any] = {"layers": 4, "width": 64, "heads": 4, "sequence_length": 32}
MAMBA2 = {"head_width": 16, "groups": 4}


def model(**changes: Any) -> ModelConfig:
    return ModelConfig(**SIZE | changes)


def test_a_pattern_is_a_list_of_layers() -> None:
    moe = {"experts": 4, "top_k": 1, "ffn_hidden_size": 8}
    config = model(pattern="M-|*E", mlp="gelu", moe=moe)
    assert [(layer.mixer, layer.mlp, layer.experts) for layer in config.layer_list] == [
        ("mamba2", "none", 0),
        ("none", "gelu", 0),
        ("attention", "none", 0),
        ("none", "gelu", 4),
    ]
    assert config.pattern_splits == (2,) and config.residual_additions == 4
    assert config.layer_list[1] == model(mixer=("mamba2", "none"), mlp=("none", "gelu")).layer_list[1]


def test_the_stages_of_a_pattern_are_those_of_the_pipeline() -> None:
    config = model(pattern="M|-M*")
    assert [stage.first for stage in split_model(config, 99, LayoutConfig(pipeline=2))] == [0, 1]
    assert [stage.first for stage in split_model(config, 99, LayoutConfig(pipeline=2, split_points=(2,)))] == [0, 2]
    assert len(split_model(config, 99, LayoutConfig())) == 1


def test_models_without_other_mixers_are_what_they_were() -> None:
    """Neither the fingerprint of a run nor model.json has the new fields."""
    new = {"pattern", "mixers"}
    assert not new & identity(model()).keys() and not new & SavedModelConfig.of(model(), 9, 0)["model"].keys()
    hybrid = model(pattern="M-M*", mixers={"mamba2": MAMBA2})
    assert identity(hybrid)["mixers"] == {"mamba2": MAMBA2} and identity(hybrid)["pattern"] == "M-M*"
    assert SavedModelConfig.of(hybrid, 9, 0)["model"]["pattern"] == "M-M*"


def test_weights_fit_where_only_chunk_and_spelling_differ() -> None:
    one = model(pattern="MMMM", mixers={"mamba2": MAMBA2})
    other = model(mixer="mamba2", mlp="none", mixers={"mamba2": MAMBA2 | {"chunk": 8, "expand": 2}})
    assert architecture(one.model_dump()) == architecture(other.model_dump())
    assert architecture(one.model_dump()) != architecture(model(pattern="MMM*", mixers={"mamba2": MAMBA2}).model_dump())


LATENT = {"mixer": "latent_attention", "head_width": 16, "rope_width": 8}
WRONG = [
    ({"mixer": "mamba"}, "there is no mixer 'mamba'; did you mean 'mamba2'?"),
    ({"pattern": "M-M"}, "pattern has 3 layers and layers=4; set layers: 3"),
    (
        {"pattern": "M-MX"},
        "pattern has the letter 'X'; letters are * (attention), L (latent_attention), M (mamba2), T (tcnca), - (MLP)",
    ),
    ({"pattern": "M-||M*"}, "put letters on both sides of each |"),
    ({"pattern": "M-ME"}, "pattern has layers of experts (E); set moe"),
    ({"pattern": "M-M*", "mixer": "mamba2"}, "leave mixer out"),
    ({"mixer": "none", "mlp": "none"}, "neither mixer nor mlp"),
    ({"mixer": "mamba2", "mixers": {"mamba2": {"head_width": 24}}}, "does not divide the inner width 128; try 16"),
    ({"mixer": "mamba2", "mixers": {"mamba2": {"head_width": 16, "groups": 3}}}, "does not divide the 8 heads; try 2"),
    ({"mixer": "mamba2", "mixers": {"mamba2": {"chunk": 12}}}, "does not divide sequence_length=32; try 8"),
    ({"mixer": "mamba2", "mixers": {"mamba2": {"chunks": 8}}}, "mamba2.chunks: unknown field; did you mean 'chunk'?"),
    ({"mixer": "mamba2", "mixers": {"mamba2": {"state": 0}}}, "mamba2.state: Input should be greater than"),
    ({"mixer": "tcnca", "mixers": {"tcnca": {"chunk": 24}}}, "chunk=24 does not divide sequence_length=32; try 16"),
    ({"mixer": "tcnca", "mixers": {"tcnca": {"chunk": 64}}}, "chunk=64 does not divide sequence_length=32; try 32"),
    ({"mixer": "tcnca", "mixers": {"tcnca": {"chunk": 8, "blocks": 9}}}, "the convolutions see 2796193 tokens"),
    ({"window": 48}, "window 48 is longer than sequence_length=32; set it to 32 or less, or to null for no limit"),
    ({"window": (None, 48)}, "window 48 is longer than sequence_length=32"),
    ({"mixers": {"mamba2": {"state": 8}}}, "mixers.mamba2 is set, but no layer has that mixer"),
    ({"mixers": {"attention": {}}}, "mixer attention has no options"),
    (LATENT | {"rope_width": 0}, "a part of each head turns: set model.rope_width"),
    (LATENT | {"window": 8}, "model.window=8 is not built for it; leave it out"),
    (LATENT | {"qk_norm": True}, "model.qk_norm=True is not built for it"),
    (LATENT | {"mixers": {"latent_attention": {"heads": 2}}}, "latent_attention.heads follows from the model"),
    ({"mixer": "mamba2", "attention": "bidirectional"}, "mixer mamba2 sees only the tokens before"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(changes) for changes, _ in WRONG])
def test_what_is_wrong_is_said_with_a_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        model(**changes)


TRAIN = {"tokens": 1024, "batch_tokens": 256, "precision": "fp32"}
LAYOUTS = [
    ({"layout": {"tensor": 8}}, {}, "4 groups of mamba2 do not split evenly; set model.mixers.mamba2.groups: 8"),
    ({"layout": {"tensor": 3}}, {}, "8 heads of mamba2 do not split evenly"),
    ({"layout": {"pipeline": 2}}, {"pattern": "M|M|M*"}, "model.pattern has 3 stages and the layout 2"),
    ({"layout": {"tensor": 3}}, {"mixer": "tcnca", "pattern": None, "mixers": {"tcnca": {"chunk": 8}}}, "64 channels"),
    ({"precision": "bf16", "float8": True}, {}, "float8 is not built for the mixer mamba2 yet"),
]


@pytest.mark.parametrize(("train", "changes", "message"), LAYOUTS, ids=[message for *_, message in LAYOUTS])
def test_an_illegal_layout_is_said_with_a_fix(train: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    config = model(**{"mixers": {"mamba2": MAMBA2}, "pattern": "M-M*"} | changes)
    settings = TrainConfig(**TRAIN | train)
    with pytest.raises(RecipeError, match=re.escape(message)):
        check_layout(config, settings, 99, settings.layout.world_size)
