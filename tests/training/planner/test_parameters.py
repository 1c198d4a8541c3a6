"""Parameter counts per rank equal the engine's."""

from math import prod

import pytest
from model_counts import count_parameters, rank_weights

from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import gpt, shape_of
from gristmill.training.planner.costs.parameters import (
    Weight,
    active_parameters,
    chunk_length,
    parameter_count,
    sharded_count,
)
from gristmill.training.planner.engine_profile import GRISTMILL
from gristmill.training.planner.hardware import FITTED, Rates
from gristmill.training.planner.layout import from_config
from gristmill.training.planner.memory import MemoryModel
from gristmill.training.planner.plan_request import named_shape
from gristmill.training.planner.step_time import StepModel

LLAMA = {"layers": 6, "width": 64, "heads": 8, "kv_heads": 2, "sequence_length": 32}
GPT2 = {
    "layers": 6,
    "width": 64,
    "heads": 8,
    "sequence_length": 32,
    "mlp": "gelu",
    "norm": "layernorm",
    "positions": "learned",
    "biases": True,
    "tied_embeddings": True,
}
LATENT = {
    "head_width": 12,
    "rope_width": 4,
    "mixers": {"latent_attention": {"key_value_rank": 16, "query_rank": 24, "value_width": 8}},
}
MODELS = {
    "llama": ModelConfig(**LLAMA),
    "gpt2": ModelConfig(**GPT2),
    "mamba2": ModelConfig(**LLAMA, mixer="mamba2", mlp="none", mixers={"mamba2": {"head_width": 8, "groups": 8}}),
    "hybrid": ModelConfig(
        **LLAMA, pattern="M-M*-E", moe={"experts": 4, "top_k": 2}, mixers={"mamba2": {"head_width": 8, "groups": 8}}
    ),
    "tcnca": ModelConfig(**LLAMA, pattern="TTT-*T", mixers={"tcnca": {"chunk": 8}}),
    "latent": ModelConfig(**LLAMA, mixer="latent_attention", **LATENT),
    "opt": ModelConfig(**(GPT2 | {"mlp": "relu", "position_offset": 2})),
    "gptj": ModelConfig(**(GPT2 | {"positions": "rope", "biases": "mlp", "parallel_residual": "one_norm"})),
    "olmo": ModelConfig(**LLAMA, norm="plain_layernorm"),
    "nanochat": ModelConfig(**LLAMA, norm="plain_rmsnorm", mlp="relu2", qk_norm=True, embedding_norm=True),
    "gemma3": ModelConfig(**LLAMA, mlp="geglu", norm_order="sandwich", norm_plus_one=True, qk_norm=True),
    "olmo2": ModelConfig(**LLAMA, norm_order="output", qk_norm="width"),
    "qk_norm": ModelConfig(**LLAMA, qk_norm=True, tied_embeddings=True),
    "qk_layernorm": ModelConfig(**LLAMA, qk_norm=True, norm="layernorm", ffn_hidden_size=192),
}


def test_chunks_are_those_of_torch_chunk():
    assert [chunk_length(250, 4, i) for i in range(4)] == [63, 63, 63, 61]
    assert [chunk_length(3, 4, i) for i in range(4)] == [1, 1, 1, 0]


def test_a_weight_on_its_tensor_ranks():
    table = Weight("embedding.weight", (250, 8), "output")
    assert [table.local_shape(4, rank)[0] for rank in range(4)] == [63, 63, 63, 61]
    keys = Weight("mixer.key.weight", (32, 8), "key_value")  # 2 heads of 16 over 4 ranks: each twice
    assert [keys.local_shape(4, rank, kv_heads=2)[0] for rank in range(4)] == [16, 16, 16, 16]


def test_a_norm_of_64_over_5_ranks():
    assert [sharded_count([Weight("n", (64,))], 1, 0, 1, 5, index) for index in range(5)] == [13, 13, 13, 13, 12]


def paper_parameters(layers: int, width: int, vocab: int, sequence_length: int) -> float:
    """P = 12 l h^2 (1 + 13/12h + (V + s)/12lh), arXiv 2104.04473, section 5.1: the GPT with all its biases and norms.

    (105, 20480, 51200, 2048) -> 529.6e9. Leaves out the last norm's 2 h."""
    return 12 * layers * width**2 * (1 + 13 / (12 * width) + (vocab + sequence_length) / (12 * layers * width))


@pytest.mark.parametrize(
    ("layers", "width", "heads", "billions"),
    [(24, 2304, 24, 1.7), (36, 4096, 32, 7.5), (48, 8192, 64, 39.1), (80, 12288, 96, 145.6), (105, 20480, 128, 529.6)],
)
def test_counts_of_the_papers_models(layers, width, heads, billions):
    count = parameter_count(gpt(layers, width, heads))
    assert round(count / 1e9, 1) == billions
    # The paper's formula leaves out the last norm: 2 numbers a channel.
    assert count == round(paper_parameters(layers, width, 51200, 2048)) + 2 * width


@pytest.mark.parametrize("name", MODELS)
def test_count_equals_the_real_model(name):
    assert parameter_count(shape_of(MODELS[name], 101)) == count_parameters(MODELS[name], 101)


MIXTURES = {
    "mixtral": ModelConfig(**LLAMA, ffn_hidden_size=192, moe={"experts": (0, 8), "top_k": 2, "ffn_hidden_size": 48}),
    "pr_moe": ModelConfig(**GPT2, moe={"experts": (4, 8), "top_k": 1, "residual": True}),
    "shared": ModelConfig(**LLAMA, moe={"experts": 4, "top_k": 2, "ffn_hidden_size": 64, "shared_experts": 1}),
}
EXPERT_LAYOUTS = [
    {"data": 4},
    {"data": 4, "expert": 4},
    {"data": 8, "expert": 2},  # more ranks with the same experts than experts on each
    {"data": 4, "tensor": 2, "expert": 2, "expert_tensor": 2},
    {"data": 4, "replicate": 2, "tensor": 2, "expert": 4, "pipeline": 2},
    {"data": 4, "replicate": 4, "expert": 2},
]


@pytest.mark.parametrize("axes", EXPERT_LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_a_rank_equal_the_engines(name, axes, hardware, engine_shapes):
    model, layout = MIXTURES[name], LayoutConfig(**axes)
    shape, planned = shape_of(model, 101), from_config(layout, 1)
    assert parameter_count(shape) == count_parameters(model, 101)
    held = StepModel(shape, Rates(hardware, FITTED), GRISTMILL).rank_layers(planned)
    memory = MemoryModel(shape, GRISTMILL)
    for place in range(layout.pipeline):
        shapes = engine_shapes(model, 101, layout, place * layout.stage_ranks)
        copied = prod(shapes.pop("", (0,)))
        real = sum(prod(s) for s in shapes.values())
        assert memory.count(planned, held[place], sharded=True) == real
        forecast = memory.rank(planned, held[place], place, 1)
        assert forecast.parameters == forecast.gradients == 4 * (real + copied)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("mixtral-8x7b", 46.7, 12.9), ("qwen3-30b-a3b", 30.5, 3.4), ("qwen3-235b-a22b", 235.1, 22.2)],
)
def test_counts_of_published_mixtures(name, billions, active):
    """The model cards say 46.7 and 12.9 of Mixtral, 30.5 and 3.3, 235 and 22 of Qwen3."""
    shape = named_shape(name)
    assert round(parameter_count(shape) / 1e9, 1) == billions
    assert round(active_parameters(shape) / 1e9, 1) == active


def test_active_parameters_of_a_mixture_by_hand():
    """Mixtral's shape in small: of 8 experts of 3 x 48 x 64 numbers a token meets 2."""
    shape = shape_of(ModelConfig(**(LLAMA | {"layers": 1}), moe={"experts": 8, "top_k": 2, "ffn_hidden_size": 48}), 101)
    assert parameter_count(shape) - active_parameters(shape) == 6 * 3 * 48 * 64


LAYOUTS = [
    {"data": 3},
    {"tensor": 4},
    {"tensor": 8, "data": 2},
    {"pipeline": 2, "tensor": 2, "data": 3},
    {"pipeline": 3, "pipeline_schedule": "interleaved", "virtual_stages": 2},
    {"pipeline": 2, "pipeline_schedule": "zbv", "data": 2},
    {"data": 4, "replicate": 2, "tensor": 2},
]


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba2", "olmo", "olmo2", "gemma3"])
def test_parameters_gradients_and_moments_of_every_rank_equal_the_engines(name, axes, hardware, engine_shapes):
    """fp32 weights, gradients and two moments each: 4, 4 and 8 bytes of what the engine keeps, to the byte."""
    model, layout = MODELS[name], LayoutConfig(**axes)
    shape = shape_of(model, 101)
    planned = from_config(layout, 1)
    held = StepModel(shape, Rates(hardware, FITTED), GRISTMILL).rank_layers(planned)
    memory = MemoryModel(shape, GRISTMILL)
    inner = layout.tensor * layout.data
    for rank in range(0, layout.world_size, layout.world_size // layout.pipeline if layout.world_size > 8 else 1):
        place, tensor = rank // inner, rank % layout.tensor
        index = rank // layout.tensor % layout.shard
        counted = sharded_count(
            rank_weights(shape, held[place]), layout.tensor, tensor, model.num_kv_heads, layout.shard, index
        )
        shapes = engine_shapes(model, 101, layout, rank)
        copied = prod(shapes.pop("", (0,)))
        real = sum(prod(s) for s in shapes.values())
        assert counted == real
        if tensor == index == 0:
            forecast = memory.rank(planned, held[place], place, 1)
            assert forecast.parameters == forecast.gradients == 4 * (real + copied)
            assert forecast.optimizer == 8 * real
