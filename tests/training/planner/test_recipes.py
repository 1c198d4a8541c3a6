"""The planner's parameters, FLOPs and ranks of every bundled recipe equal the engine's."""

from math import prod

import pytest
from model_counts import count_parameters, matmul_flops_per_token, rank_weights

from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.training.planner.costs import model_shape
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count, sharded_count
from gristmill.training.planner.engine_profile import GRISTMILL
from gristmill.training.planner.hardware import FITTED, Rates
from gristmill.training.planner.layout import from_config
from gristmill.training.planner.layout_checks import micro_batch_size
from gristmill.training.planner.memory import MemoryModel
from gristmill.training.planner.step_time import StepModel

EXPERTS = ("dsmoe_1.3b_128e", "prmoe_31b", "mos_27b", "qwen3_30b_a3b")
BERTS = ("bert_tiny", "bert_tiny_sources", "bert_345m", "bert_1.3b", "bert_3.9b")
RECIPES = (
    "demo",
    "speedrun_cpu",
    "ladder_cpu",
    "speedrun_124m",
    *BERTS,
    "mgpt_1.3b",
    "mgpt_13b",
    "mamba2_hybrid_8b",
    "gpt2_124m",
    "llama_1b",
    "megatron_8.3b",
    "ptdp_1t",
    "mt_nlg_530b",
    *EXPERTS,
)


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_and_flops_are_the_engines(name):
    recipe = load_recipe(name)
    model, vocab = recipe.model, recipe.tokenizer.vocab_size
    shape = shape_of(model, vocab)
    assert parameter_count(shape) == count_parameters(model, vocab)
    attention = (
        3
        * sum(model_shape.attention_flops(block, model.sequence_length) for block in shape.blocks)
        / model.sequence_length
    )
    assert model_shape.flops_per_token(shape) == matmul_flops_per_token(model, vocab) + attention


@pytest.mark.parametrize("name", RECIPES)
def test_what_the_first_a_middle_and_the_last_rank_keep(name, hardware, engine_shapes):
    recipe = load_recipe(name)
    model, layout, vocab = recipe.model, recipe.train.layout, recipe.tokenizer.vocab_size
    shape, planned = shape_of(model, vocab), from_config(layout, micro_batch_size(model, recipe.train))
    held = StepModel(shape, Rates(hardware, FITTED), GRISTMILL).rank_layers(planned)
    memory = MemoryModel(shape, GRISTMILL)
    for place in sorted({0, layout.pipeline // 2, layout.pipeline - 1}):
        rank = place * layout.world_size // layout.pipeline
        shapes = engine_shapes(model, vocab, layout, rank)
        copied = prod(shapes.pop("", (0,)))
        real = sum(prod(each) for each in shapes.values())
        weights = rank_weights(shape, held[place])
        counted = sharded_count(weights, layout.tensor, 0, model.num_kv_heads, layout.shard, 0)
        assert counted + planned.expert_sharding.sharded_count(weights) == real
        forecast = memory.rank(
            planned, held[place], place, planned.microbatches(recipe.train.batch_tokens // model.sequence_length)
        )
        assert forecast.parameters == forecast.gradients == 4 * (real + copied)
        assert forecast.optimizer == 8 * real
