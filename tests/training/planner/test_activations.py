"""Activation bytes: forecasts compared with what autograd saves, and with the papers' formulas."""

import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel.mesh import build_mesh, single_process
from gristmill.training.planner.activations import (
    ElementSizes,
    SwapBytes,
    ends_bytes,
    hidden_from_tokens,
    korthikanti_ends,
    korthikanti_layer,
    layer_bytes,
    solve_share,
)
from gristmill.training.planner.command import PlanOptions, make_request, plan_recipe, with_token_share
from gristmill.training.planner.costs.model_shape import gpt, shape_of
from gristmill.training.planner.engine_profile import GRISTMILL
from gristmill.training.planner.hardware import GIB, load_hardware
from gristmill.training.planner.layout import from_config
from gristmill.training.planner.plan_report import explain
from gristmill.training.planner.search import Planner

GPT2 = {"mlp": "gelu", "norm": "layernorm", "positions": "learned", "biases": True, "tied_embeddings": True}
MAMBA2 = {"head_width": 16, "state": 32, "groups": 4, "chunk": 16}
TCNCA = {"kernel": 5, "blocks": 2, "chunk": 16, "shared": 32}
LATENT = {
    "head_width": 24,
    "rope_width": 8,
    "mixers": {"latent_attention": {"key_value_rank": 32, "query_rank": 48, "value_width": 16}},
}
SIZE = {"layers": 4, "width": 128, "heads": 8, "sequence_length": 64}
MODELS = {
    "llama": ModelConfig(**SIZE, kv_heads=2),
    "gpt2": ModelConfig(**SIZE, **GPT2),
    "gpt2_dropout": ModelConfig(**SIZE, **GPT2, dropout=0.1),
    "banded": ModelConfig(**SIZE, **GPT2, window=(None, 16)),
    "qk_norm": ModelConfig(**SIZE, kv_heads=4, qk_norm=True),
    "gpt_neox": ModelConfig(**SIZE, **(GPT2 | {"positions": "rope"}), parallel_residual=True),
    "gptj": ModelConfig(**SIZE, **(GPT2 | {"positions": "rope", "biases": "mlp"}), parallel_residual="one_norm"),
    "parallel_llama": ModelConfig(**SIZE, parallel_residual=True, rope_width=8),
    "opt": ModelConfig(**SIZE, **(GPT2 | {"mlp": "relu", "position_offset": 2})),
    "olmo": ModelConfig(**SIZE, norm="plain_layernorm", qkv_clip=1.0),
    "nanochat": ModelConfig(**SIZE, norm="plain_rmsnorm", mlp="relu2", qk_norm=True, embedding_norm=True),
    "olmo2": ModelConfig(**SIZE, kv_heads=2, norm_order="output"),
    "gemma2": ModelConfig(
        **SIZE, kv_heads=2, mlp="geglu", norm_order="sandwich", norm_plus_one=True, attention_softcap=5.0
    ),
    "mamba2": ModelConfig(**SIZE, mixer="mamba2", mixers={"mamba2": MAMBA2}),
    "hybrid": ModelConfig(**SIZE, mlp="relu2", positions="none", pattern="M-*M", mixers={"mamba2": MAMBA2}),
    "tcnca": ModelConfig(**SIZE, mixer="tcnca", mixers={"tcnca": TCNCA}),
    "tcnca_simple": ModelConfig(**SIZE, mlp="gelu", pattern="T-*T", mixers={"tcnca": TCNCA | {"gated": False}}),
    "latent": ModelConfig(**SIZE, mixer="latent_attention", **LATENT),
    "experts": ModelConfig(**SIZE, moe={"experts": 8, "top_k": 2, "ffn_hidden_size": 96}),
    "shared_experts": ModelConfig(**SIZE, moe={"experts": 4, "top_k": 1, "ffn_hidden_size": 64, "shared_experts": 1}),
}
NUMBERS = {torch.float32: ElementSizes(4, 4, cuda=False), torch.bfloat16: ElementSizes(2, 4, cuda=False)}


def saved_bytes(model: ModelConfig, layout: LayoutConfig, samples: int, dtype: torch.dtype) -> int:
    """What autograd keeps of one micro-batch, each storage once, parameters left out: measured on the real model."""
    mesh = (
        single_process()
        if layout.world_size == 1
        else build_mesh(layout, model.num_kv_heads, torch.device("cpu"), model.has_experts)
    )
    part = Transformer(model, 512, mesh, layout, options=ComputeOptions(dtype)).to_empty(device="cpu").to(dtype)
    own = {_local(p).untyped_storage().data_ptr() for p in part.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _local(tensor).untyped_storage().data_ptr() not in own:
            kept[_local(tensor).untyped_storage().data_ptr()] = _local(tensor)
        return tensor

    tokens = torch.zeros(samples, model.sequence_length, dtype=torch.int64)
    weights, numbers = torch.ones(samples, model.sequence_length), torch.arange(samples)
    part.output = causal_loss()
    batch = {"tokens": tokens, "targets": tokens, "weights": weights} | ({"samples": numbers} if model.dropout else {})
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        part(tokens, **batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_forecast_is_within_5_percent_of_what_autograd_keeps(name, dtype, tensor, fake_process):
    model, samples = MODELS[name], 4
    for sequence_parallel in (False, True) if tensor > 1 else (False,):
        layout = LayoutConfig(tensor=tensor, sequence_parallel=sequence_parallel, micro_batch=samples)
        with fake_process(tensor, 0) if tensor > 1 else nullcontext():
            real = saved_bytes(model, layout, samples, dtype)
        shape, planned = shape_of(model, 512), from_config(layout, samples)
        layers = [layer_bytes(block, shape, planned, GRISTMILL, NUMBERS[dtype]) for block in shape.blocks]
        forecast = sum(layer.kept for layer in layers) + sum(ends_bytes(shape, planned, GRISTMILL, NUMBERS[dtype]))
        assert forecast == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("name", ["llama", "gpt2_dropout", "banded"])
def test_the_forecast_of_context_ranks_is_within_5_percent(name, method, dtype, fake_process):
    model, samples = MODELS[name], 4
    layout = LayoutConfig(context=2, context_method=method, micro_batch=samples)
    with fake_process(2, 0):
        real = saved_bytes(model, layout, samples, dtype)
    shape, planned = shape_of(model, 512), from_config(layout, samples)
    layers = [layer_bytes(block, shape, planned, GRISTMILL, NUMBERS[dtype]) for block in shape.blocks]
    forecast = sum(layer.kept for layer in layers) + sum(ends_bytes(shape, planned, GRISTMILL, NUMBERS[dtype]))
    assert forecast == pytest.approx(real, rel=0.05)


class LiveStorages(TorchDispatchMode):
    """Records every storage that is created inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[weakref.ref, int, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made.append((weakref.ref(storage), storage.data_ptr(), storage.nbytes()))
        return result

    def bytes_but(self, own: set[int]) -> int:
        """Bytes of the storages still in memory, each once, without those at the given addresses."""
        return sum(
            {at: size for reference, at, size in self.made if reference() is not None and at not in own}.values()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", ["none", "operators", "attention", "full"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_forecast_is_within_2_percent_of_memory_after_the_forward_pass(name, recompute, dtype):
    model, samples, layout = MODELS[name], 4, LayoutConfig(recompute=recompute)
    part = Transformer(model, 512, None, layout, options=ComputeOptions(dtype)).to_empty(device="cpu").to(dtype)
    own = {p.untyped_storage().data_ptr() for p in part.parameters()}
    tokens = torch.zeros(samples, model.sequence_length, dtype=torch.int64)
    part.output = causal_loss()
    with LiveStorages() as live:
        loss = part(tokens, tokens=tokens, targets=tokens, weights=torch.ones(samples, model.sequence_length))
    real = live.bytes_but(own) - loss.untyped_storage().nbytes()
    # The forward pass above ran without dropout.
    shape, planned = shape_of(model.model_copy(update={"dropout": 0.0}), 512), from_config(layout, samples)
    one = layer_bytes(shape.blocks[0], shape, planned, GRISTMILL, NUMBERS[dtype])
    forecast = model.layers * one.kept + sum(ends_bytes(shape, planned, GRISTMILL, NUMBERS[dtype]))
    assert forecast == pytest.approx(real, rel=0.02)


def test_gpt3_by_hand():
    """s b h (34 + 5 a s / h): 2048 x 12288 x (34 + 80) = 2.87 GB a layer; over 8 ranks 10 + 3 + 10 = 23 a number."""
    block = gpt(96, 12288, 96).blocks[0]
    whole = korthikanti_layer(block, 2048, 2048)
    assert whole == 2048 * 12288 * (34 + 80)
    assert korthikanti_layer(block, 2048, 2048, tensor=8) == 2048 * 12288 * (10 + 3 + 10)
    assert korthikanti_layer(block, 2048, 2048, tensor=8, sequence_parallel=True) == whole / 8
    assert korthikanti_layer(block, 2048, 2048, 8, True, "attention") == 2048 * 12288 * 34 / 8
    assert korthikanti_layer(block, 2048, 2048, 8, False, "full") == 2048 * 12288 * 2


def test_selective_recomputation_saves_what_the_paper_says():
    """arXiv 2205.05198, section 5: without the scores, 70 % of GPT-3's and 65 % of the 530B model's are saved."""
    for width, heads, saved in ((12288, 96, 0.70), (20480, 128, 0.65)):
        block = gpt(1, width, heads).blocks[0]
        kept = korthikanti_layer(block, 2048, 2048, recompute="attention")
        assert 1 - kept / korthikanti_layer(block, 2048, 2048) == pytest.approx(saved, abs=0.01)


def test_the_ends_by_hand():
    """4 tokens, width 2, vocabulary 10, over 2 ranks with their tokens cut: mask 4, head 4 x 4 x (1 + 5) = 96."""
    assert korthikanti_ends(4, 2, 10, 2, True) == (4.0, 96.0)


def test_more_recomputation_keeps_fewer_activations():
    shape = shape_of(ModelConfig(layers=2, width=512, heads=8, sequence_length=512), 1000)
    kept = []
    for mode in ("none", "operators", "attention", "full"):
        planned = from_config(LayoutConfig(tensor=2, recompute=mode), 2)
        kept.append(layer_bytes(shape.blocks[0], shape, planned, GRISTMILL, ElementSizes()).kept)
    assert kept[0] > kept[1] > kept[3] and kept[0] > kept[2] > kept[3]


# The share of swapped tokens: MEMO's numbers, by hand, and the recipe of a million tokens.

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
    assert 0 < chosen.layout.offloaded_token_fraction < 1 and "the limit is host memory" in sentence
    planner = Planner(make_request(shape, 8, PlanOptions("a100-80g", train.batch_tokens)))
    ours = planner.forecast(from_config(chosen.layout, 1))
    full = planner.forecast(
        from_config(chosen.layout.model_copy(update={"recompute": "full", "offloaded_token_fraction": None}), 1)
    )
    kept = planner.memory(
        from_config(chosen.layout.model_copy(update={"recompute": "none", "offloaded_token_fraction": None}), 1)
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
    assert best.layout.recompute == "tokens" and 0 < best.layout.offloaded_token_fraction < 1
    assert any("the limit is host memory" in sentence for sentence in explain(plan))
    full = replace(best.layout, recompute="full", offloaded_token_fraction=None)
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
    layout = train.layout.model_copy(update={"pipeline": 4, "context": 2, "offloaded_token_fraction": 0.2})
    host = [memory.host for memory in planner.memory_by_rank(from_config(layout, 1))]
    assert host == sorted(host, reverse=True) and host[0] > 2 * host[-1] > 0
