"""The model of every large recipe on its full layout, on the meta device: one process stands for one of thousands of
ranks."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from model_counts import count_parameters
from torch.testing._internal.distributed.fake_pg import FakeStore

from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.training.engine.gradients import copies
from gristmill.training.engine.local_model import LocalModel, build_local_model
from gristmill.training.parallel.mesh import build_mesh, local
from gristmill.training.planner.layout_checks import check_layout

PARAMETERS = {  # as published, to three digits
    "gpt2_124m": 124e6,
    "llama_1b": 1.24e9,
    "megatron_8.3b": 8.32e9,
    "ptdp_1t": 1.01e12,
    "mt_nlg_530b": 5.30e11,
    "dsmoe_1.3b_128e": 52e9,
    "prmoe_31b": 31e9,
    "mos_27b": 27e9,
    "qwen3_30b_a3b": 30.5e9,
    "bert_345m": 336e6,
    "bert_1.3b": 1.3e9,
    "bert_3.9b": 3.9e9,
    "mgpt_1.3b": 1.4e9,
    "mgpt_13b": 13.1e9,
    "mamba2_hybrid_8b": 8.65e9,
}

# arXiv 2201.05596 gives its models to a billion: tables 1 and 4; arXiv 1909.08053 its BERTs to two digits: table 4.
# mGPT is named after 1.3 billion; its published config.json has 1.4, of which 0.2 are the table of 100,000 tokens.
PRECISION = {
    "mgpt_1.3b": 0.02,
    "bert_1.3b": 0.02,
    "bert_3.9b": 0.01,
    "dsmoe_1.3b_128e": 0.02,
    "prmoe_31b": 0.02,
    "mos_27b": 0.02,
}


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def parts_of(name: str, pipeline_rank: int) -> LocalModel:
    """What the first process of a pipeline rank holds."""
    recipe = load_recipe(name)
    layout, model = recipe.train.layout, recipe.model
    if dist.is_initialized():
        dist.destroy_process_group()
    rank = pipeline_rank * layout.world_size // layout.pipeline
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    mesh = build_mesh(layout, model.num_kv_heads, torch.device("cpu"), model.has_experts)
    return build_local_model(model, recipe.tokenizer.vocab_size, recipe.train, mesh, recipe.seed, weights="meta")


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_whole_model_is_as_large_as_published(name: str) -> None:
    recipe = load_recipe(name)
    assert count_parameters(recipe.model, recipe.tokenizer.vocab_size) == pytest.approx(
        PARAMETERS[name], rel=PRECISION.get(name, 5e-3)
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_layout_is_right_and_its_ranks_can_be_built(name: str, no_group: None) -> None:
    recipe = load_recipe(name)
    layout = recipe.train.layout
    check_layout(recipe.model, recipe.train, recipe.tokenizer.vocab_size, layout.world_size)
    for pipeline_rank in sorted({0, layout.pipeline // 2, layout.pipeline - 1}):
        parts = parts_of(name, pipeline_rank)
        for parameter in parts.parameters.values():
            assert parameter.device.type == "meta"
            pieces = layout.stage_ranks // copies(parameter)
            own, whole = local(parameter).numel(), parameter.numel()
            assert own * pieces >= whole > (own - parameter.numel() / len(parameter)) * pieces  # at most a row uneven


@pytest.mark.parametrize("name", ["llama_1b", "megatron_8.3b"])
def test_one_rank_holds_its_share_of_the_state(name: str, no_group: None) -> None:
    recipe = load_recipe(name)
    layout = recipe.train.layout
    own = sum(local(parameter).numel() for parameter in parts_of(name, 0).parameters.values())
    whole = count_parameters(recipe.model, recipe.tokenizer.vocab_size)
    assert own == pytest.approx(
        whole / layout.shard / layout.tensor, rel=0.01
    )  # norms and biases are not cut by tensor
