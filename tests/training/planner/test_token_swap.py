"""The share of swapped tokens: MEMO's numbers, by hand, and the recipe of a million tokens."""

from dataclasses import replace

import pytest

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.recipe_file import load_recipe
from gristmill.training.costs.model_shape import shape_of
from gristmill.training.planner.command import PlanOptions, make_request, plan_recipe, with_token_share
from gristmill.training.planner.explain import explain
from gristmill.training.planner.hardware import GIB, load_hardware
from gristmill.training.planner.layout import from_config
from gristmill.training.planner.search import Planner
from gristmill.training.planner.token_swap import SwapBytes, hidden_from_tokens, solve_share

# One layer of 7B (4096 wide) over a million tokens on one of 8 ranks: 16 numbers a token and width, 2 bytes each, of
# which the layer's input and the attention's output are 2.
NUMBER = 2**20 * 4096 * 2 / 8
MEMO = SwapBytes(2 * NUMBER, 14 * NUMBER)


def test_the_papers_share_at_a_million_tokens() -> None:
    """2 TB of host memory for 8 GPUs and the 30 layers that swap: (250e9 / 30 - 2.15e9) / 15.03e9 = 0.41. A layer's
    forward pass, (24 s h^2 + 2 s^2 h) / 8 FLOPs at half of 312 TFLOP/s, takes 7.6 s, in which 12 GB/s copy far more."""
    seconds = (24 * 2**20 * 4096**2 + 2 * 2**40 * 4096) / 8 / 156e12
    plan = solve_share(MEMO, 30, seconds, 12e9, 2e12 / 8)
    assert seconds == pytest.approx(7.6, abs=0.05)
    assert plan.share == pytest.approx(0.41, abs=0.005) and plan.bound == "host memory"
    assert plan.link_share > 1 and plan.host_bytes == pytest.approx(250e9)
    assert "41%" in plan.sentence() and "the limit is host memory" in plan.sentence()


def test_the_link_or_nothing_may_be_the_limit() -> None:
    sizes = SwapBytes(always=2.0, others=10.0)
    # 1 s x 7 bytes/s - 2 = 5 of 10
    plan = solve_share(sizes, 4, 1.0, 7.0, 1000.0)
    assert (plan.share, plan.bound, plan.host_bytes) == (0.5, "link", 4 * 7.0)
    assert solve_share(sizes, 4, 10.0, 7.0, 1000.0).bound == "all tokens"
    none = solve_share(sizes, 4, 1.0, 1.0, 4.0)
    assert none.share == 0 and none.link_share < 0 and none.host_share < 0


def test_full_overlap_from_how_many_tokens() -> None:
    """The paper: from 192K at 4096 wide on A800; 12 GB/s and 156 TFLOP/s give 159K, so 192K is the first multiple of
    64K. An H100 with 50 GB/s and 400 TFLOP/s: 24 h + 2 s = 256,000."""
    tokens = hidden_from_tokens(4096, 2, 156, 12)
    assert tokens == pytest.approx(158_848) and 128 * 1024 < tokens <= 192 * 1024
    assert hidden_from_tokens(4096, 2, 400, 50) == pytest.approx(78_848)
    assert hidden_from_tokens(1024, 2, 400, 50) == pytest.approx(115_712)


def test_the_recipe_of_a_million_tokens() -> None:
    recipe = load_recipe("memo_7b_1m")
    model, train = recipe.training()
    shape = shape_of(model, recipe.tokenizer.vocab_size)
    chosen, sentence = with_token_share(model, recipe.tokenizer.vocab_size, train)
    assert 0 < chosen.layout.swapped_tokens < 1 and "the limit is host memory" in sentence
    planner = Planner(make_request(shape, 8, PlanOptions("a100-80g", train.batch_tokens)))
    ours = planner.forecast(from_config(chosen.layout, 1))
    full = planner.forecast(
        from_config(chosen.layout.model_copy(update={"recompute": "full", "swapped_tokens": None}), 1)
    )
    kept = planner.memory(
        from_config(chosen.layout.model_copy(update={"recompute": "none", "swapped_tokens": None}), 1)
    )
    assert ours.memory.total < planner.capacity < kept.total  # it fits, without the policy it does not
    assert ours.memory.host <= load_hardware("a100-80g").host_memory_gib_per_gpu * GIB * 1.0001
    # attention is nearly all of the time, and full recomputation computes its forward pass again: 8/6 and 4/3
    assert 1.2 < ours.tokens_per_second / full.tokens_per_second < 4 / 3


def test_the_planner_chooses_the_policy_and_states_the_share() -> None:
    """Left to itself on the paper's 8 A800: nothing else is as fast, and it says why the share is not larger."""
    recipe = load_recipe("memo_7b_1m")
    model, train = recipe.training()
    plan = plan_recipe(shape_of(model, recipe.tokenizer.vocab_size), train, 8, "a100-80g")
    best = plan.best
    assert best.layout.recompute == "tokens" and 0 < best.layout.swapped_tokens < 1
    assert any("the limit is host memory" in sentence for sentence in explain(plan))
    full = replace(best.layout, recompute="full", swapped_tokens=None)
    assert best.time.total < Planner(plan.request).forecast(full).time.total
    # short samples, whose copies the link does not hide, are recomputed or kept
    short = model.model_copy(update={"sequence_length": 2**13})
    other = plan_recipe(shape_of(short, recipe.tokenizer.vocab_size), train, 8, "a100-80g")
    assert other.best.layout.recompute not in ("tokens", "swap")


def test_host_memory_below_the_input_and_the_attention_output_is_refused() -> None:
    recipe = load_recipe("memo_7b_1m")
    model, train = recipe.training()
    longer = model.model_copy(update={"sequence_length": 2**23})
    with pytest.raises(RecipeError, match=r"a100-80g has 128\.0: lower model\.sequence_length"):
        with_token_share(longer, recipe.tokenizer.vocab_size, train.model_copy(update={"batch_tokens": 2**23}))


def test_later_ranks_of_a_pipeline_swap_less() -> None:
    recipe = load_recipe("memo_7b_1m")
    model, train = recipe.training()
    shape = shape_of(model.model_copy(update={"sequence_length": 2**17}), recipe.tokenizer.vocab_size)
    planner = Planner(make_request(shape, 8, PlanOptions("a100-80g", 2**20)))
    layout = train.layout.model_copy(update={"pipeline": 4, "context": 2, "swapped_tokens": 0.2})
    host = [memory.host for memory in planner.memory_by_rank(from_config(layout, 1))]
    assert host == sorted(host, reverse=True) and host[0] > 2 * host[-1] > 0
