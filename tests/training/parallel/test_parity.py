"""The same seed gives the same model on every layout: losses, every gradient, the norm, and parameters after steps.

Measured floors (2 cores, gloo, torch 2.13): float64 4e-15, float32 2e-6 of a tensor's largest element."""

from typing import Any

import numpy as np
import pytest

from tests.support.parity import Case, by_size, differences, on_this_rank

TOLERANCES = {"fp64": 1e-12, "fp32": 1e-5}

PP2, PP4 = {"pipeline": 2}, {"pipeline": 4}
CUBE = {"data": 2, "tensor": 2, "pipeline": 2}
HOST = {"offload": {"optimizer": "cpu"}}
SWAP = {"recompute": "swap", "num_layers_on_device": 0}
SOME_TOKENS = {"recompute": "tokens", "offloaded_token_fraction": 0.3, "num_layers_on_device": 0}
HOST_AND_DEVICE = {"offload": {"optimizer": "interleaved", "stride": 2, "subgroup_parameters": 1}}
IN_HOST_MEMORY = {"offload": {"parameters": "host"}}
ON_DISK = {"offload": {"parameters": "disk", "subgroup_parameters": 1}}
LESS_STATE = {"fsdp_reshard_after_forward": "always", "reduce_each_micro_batch": True}
ASYNC = {"async_tensor_parallel": True}
GRID = [
    # each axis alone
    Case({"data": 1, "tensor": 1}),
    Case({"data": 2}),
    Case({"data": 4, "micro_batch": 1}),
    Case({"data": 2, "fsdp_reshard_after_forward": "never"}),
    Case({"data": 4, "replicate": 2}),
    Case({"tensor": 2}),
    Case({"tensor": 2, "sequence_parallel": False}),
    Case({"tensor": 4}),
    Case({"tensor": 4, "sequence_parallel": False}),
    Case(PP2),
    Case(PP2 | {"pipeline_schedule": "gpipe"}),
    Case(PP2 | {"pipeline_schedule": "interleaved"}),
    Case(PP2 | {"pipeline_schedule": "zbv"}),
    Case(PP2 | {"pipeline_schedule": "dualpipev"}),
    Case(PP4),
    Case(PP4 | {"pipeline_schedule": "interleaved"}, "deep"),
    Case(PP4 | {"pipeline_schedule": "zbv"}, "deep"),
    Case(PP2 | {"split_points": (3,)}),
    Case(PP2 | {"pipeline_schedule": "interleaved", "virtual_stages": 4}, "deep"),
    # pairs
    Case({"data": 2, "tensor": 2}),
    Case({"data": 2} | PP2),
    Case({"data": 4, "replicate": 2} | PP2 | {"pipeline_schedule": "interleaved"}),
    Case({"tensor": 2} | PP2 | {"sequence_parallel": False}),
    # weights given up between passes, gradients reduced with each micro-batch
    Case({"data": 2, "micro_batch": 2, "reduce_each_micro_batch": True}),
    Case({"data": 2} | PP2 | LESS_STATE),
    # products beside the ring of their tokens
    Case({"tensor": 4} | ASYNC, "gpt2"),
    # norms without parameters, outputs that begin at zero, and rates of the tables' own
    Case({"data": 2, "tensor": 2}, "nanochat", optimizer="muon"),
    Case({"tensor": 2} | PP2, "nanochat"),
    Case({"data": 2, "tensor": 2, "recompute": "operators"} | ASYNC),
    # all three
    Case(CUBE),
    Case(CUBE | {"pipeline_schedule": "zbv"}),
    # recomputation
    Case({"data": 2, "recompute": "full"}),
    Case({"data": 2, "tensor": 2, "recompute": "operators"}),
    Case({"tensor": 2, "recompute": "attention"}),
    Case(PP2 | {"recompute": "full", "recompute_every": 2}),
    Case(PP2 | {"pipeline_schedule": "zbv", "recompute": "full"}),
    # tied embeddings, GPT-2's parts
    Case({"data": 2, "tensor": 2}, "tied"),
    Case(PP2, "tied"),
    Case(PP2 | {"pipeline_schedule": "zbv"}, "tied"),
    Case({"tensor": 2}, "gpt2"),
    # fewer key/value heads than tensor ranks; windows, norms after, muP; whole documents only
    Case({"tensor": 2}, "one_kv_head"),
    Case({"tensor": 2, "data": 2}, "windows"),
    Case({"data": 4, "replicate": 2}, "banded"),
    Case(PP2 | {"pipeline_schedule": "interleaved", "recompute": "attention"}, "banded"),
    Case(PP2 | {"pipeline_schedule": "zbv"}, "banded"),
    Case({"tensor": 2, "data": 2}, documents=True),
    Case(PP2 | {"pipeline_schedule": "interleaved"}, "gpt2", documents=True),
    # ALiBi, whose slopes go with the heads, and a norm right behind the embedding
    Case({"tensor": 2}, "bloom"),
    # biases of query, key and value alone, scaled rotary positions
    Case({"tensor": 2, "sequence_parallel": False}, "qwen2"),
    # layers of other families
    Case({"tensor": 2}, "gpt_neox"),
    Case({"tensor": 2, "sequence_parallel": False}, "gptj"),
    Case({"tensor": 2}, "opt"),
    Case({"data": 2, "tensor": 2}, "olmo"),
    Case({"tensor": 4, "sequence_parallel": False, "recompute": "attention"}, "olmo2"),  # 2 key/value heads, each twice
    Case({"tensor": 4, "sequence_parallel": False, "recompute": "full"}, "gemma2"),
    # activations in host memory, of all tokens or of some
    Case({"data": 2} | SWAP, "banded"),
    Case({"tensor": 2} | SOME_TOKENS, "gpt2"),
    Case(PP2 | SOME_TOKENS | {"num_layers_on_device": 1}, documents=True),
    # the optimizer's state in host memory, updated there or in turns; Muon, which needs whole matrices
    Case({"data": 1, "micro_batch": 4} | HOST_AND_DEVICE, "tied", optimizer="muon"),
    Case({"data": 2} | HOST),
    Case({"data": 2, "tensor": 2} | HOST_AND_DEVICE, optimizer="muon"),
    # weights of the layers in host memory or on disk
    Case({"data": 2} | ON_DISK, "tied"),
    Case({"data": 2, "tensor": 2} | IN_HOST_MEMORY, documents=True, optimizer="muon"),
    # float32
    Case({"tensor": 2}, precision="fp32"),
]
# further pairs of the same parts, by hand (-m slow)
RARE = [
    Case({"tensor": 4} | ASYNC, "one_kv_head", documents=True),
    Case({"tensor": 2, "micro_batch": 1} | ASYNC),
    Case(CUBE | ASYNC | {"pipeline_schedule": "zbv"}, "tied"),
    Case({"tensor": 2, "context": 2, "recompute": "full"} | ASYNC),
    Case({"tensor": 2} | ASYNC, "hybrid"),
    Case({"tensor": 2} | ASYNC | SOME_TOKENS),
    Case({"tensor": 2, "data": 2, "expert": 2} | ASYNC, "experts"),
    Case({"data": 4, "replicate": 2} | PP2 | LESS_STATE | {"pipeline_schedule": "interleaved"}, "tied"),
    Case({"data": 2, "reduce_each_micro_batch": True} | PP2 | {"pipeline_schedule": "zbv"}),
    Case({"data": 2, "expert": 2} | PP2 | LESS_STATE | {"recompute": "full"}, "experts_deep"),
    Case({"data": 2, "tensor": 2, "micro_batch": 2, "reduce_each_micro_batch": True} | HOST_AND_DEVICE, "tied"),
    Case(CUBE | {"pipeline_schedule": "interleaved"}),
    Case({"data": 4, "replicate": 2, "tensor": 2}, optimizer="muon"),
    Case(CUBE | {"pipeline_schedule": "interleaved"}, "gpt2", documents=True),
    Case(CUBE | {"pipeline_schedule": "dualpipev"}),
    Case(CUBE | {"recompute": "full", "recompute_every": 2}),
    Case({"tensor": 4, "data": 2}, "one_kv_head"),
    Case(CUBE | {"pipeline_schedule": "zbv"}, "one_kv_head", optimizer="muon"),
    Case(CUBE | HOST_AND_DEVICE, "tied"),
    Case({"tensor": 4, "sequence_parallel": False, "recompute": "full"}, "bloom"),
    Case(CUBE | {"pipeline_schedule": "interleaved"}, "tied"),
    Case({"data": 4, "replicate": 2, "tensor": 2}),
    Case({"tensor": 2} | PP4),
    Case({"tensor": 4} | PP2 | {"pipeline_schedule": "zbv"}),
    Case(CUBE | {"sequence_parallel": False}),
    Case(CUBE | {"pipeline_schedule": "interleaved", "recompute": "attention"}),
    Case(CUBE, "tied"),
    Case(CUBE, "gpt2"),
    Case({"tensor": 4, "sequence_parallel": False}, "gpt2"),
    Case(CUBE, "one_kv_head"),
    Case({"tensor": 2, "recompute": "full"}, "banded"),
    Case(CUBE | {"recompute": "operators"}, "banded", documents=True),
    Case(CUBE, "bloom", documents=True),
    Case(CUBE, "qwen2"),
    Case(CUBE | {"recompute": "attention"}, "gpt_neox"),
    Case(CUBE | {"recompute": "attention"}, "gptj"),
    Case({"tensor": 2} | PP2, "opt"),
    Case(CUBE, "olmo2"),
    Case(CUBE, "gemma2", documents=True),
    Case(CUBE, precision="fp32"),
    Case({"data": 4, "replicate": 4}),
    Case(PP4 | {"pipeline_schedule": "dualpipev"}, "deep"),
    Case(CUBE | {"pipeline_schedule": "gpipe"}),
    Case(CUBE | {"replicate": 2}),
    Case(CUBE | {"pipeline_schedule": "dualpipev"}, "tied"),
    Case(PP2 | {"pipeline_schedule": "zbv"}, "bloom"),
    Case(PP2 | {"pipeline_schedule": "zbv", "recompute": "full"}, "qwen2"),
    Case(CUBE | {"pipeline_schedule": "interleaved"}, "tied", precision="fp32"),
    Case({"data": 2}, precision="fp32"),
    Case({"tensor": 4, "data": 2}, "one_kv_head", precision="fp32"),
    Case({"data": 4, "replicate": 2, "fsdp_reshard_after_forward": "never"} | HOST_AND_DEVICE),
    Case(CUBE | SOME_TOKENS | {"pipeline_schedule": "interleaved"}, "windows"),
    Case(CUBE | SWAP | {"pipeline_schedule": "zbv"}, "tied"),
    Case(CUBE | SWAP, "gemma2", documents=True),
    Case({"context": 2, "tensor": 2} | SOME_TOKENS, documents=True),
    Case({"tensor": 2, "sequence_parallel": False} | SOME_TOKENS, "gpt2"),
    Case({"data": 2, "tensor": 4} | SOME_TOKENS, "olmo2"),
    Case({"context": 2, "context_method": "all_to_all", "data": 2} | SOME_TOKENS, "banded"),
    Case({"data": 2, "expert": 2} | SWAP, "experts"),
    Case({"tensor": 2} | SWAP, "mamba2"),
    Case(PP2 | {"pipeline_schedule": "zbv"} | HOST, "tied"),
    Case({"context": 2, "data": 2} | HOST_AND_DEVICE, documents=True),
    Case({"data": 2, "expert": 2} | HOST_AND_DEVICE, "experts"),
    Case({"data": 2, "expert": 2} | ON_DISK, "experts"),
    Case({"data": 4, "replicate": 2, "fsdp_reshard_after_forward": "never"} | IN_HOST_MEMORY, "windows"),
    Case({"context": 2, "data": 2, "recompute": "full"} | ON_DISK, documents=True),
    Case({"tensor": 2} | SWAP | ON_DISK, "mamba2"),
    Case({"data": 1, "micro_batch": 1} | ON_DISK, "gemma2"),
]


@pytest.mark.parametrize("case", by_size(GRID, RARE))
def test_every_layout_is_one_process(case: Case, pool: Any) -> None:
    found = differences(case, pool)
    assert max(found.values()) < TOLERANCES[case.precision], found


@pytest.mark.parametrize(
    "model", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "three_mixers", "pr_moe"))]
)
def test_tokens_of_each_shard_are_recomputed(model: str, pool: Any) -> None:
    """Under sequence parallelism, cut at the third of a shard's eight tokens."""
    case = Case({"tensor": 2} | SOME_TOKENS, model)
    found = differences(case, pool, "tokens cut anywhere")
    assert max(found.values()) < TOLERANCES["fp64"], found


@pytest.mark.parametrize("model", ["experts", pytest.param("hybrid_experts", marks=pytest.mark.slow)])
def test_grouped_products_read_the_weights_of_all_data_ranks(model: str, pool: Any) -> None:
    """The path of GPUs, which FSDP must know of to gather the experts for it."""
    case = Case({"data": 2}, model, precision="fp32")
    found = differences(case, pool, "grouped products of experts")
    assert max(found.values()) < TOLERANCES["fp32"], found


def test_bf16_on_a_layout_is_bf16_alone_to_its_rounding(pool: Any) -> None:
    case = Case({"tensor": 2, "pipeline_schedule": "zbv"} | PP2, precision="bf16")
    found = differences(case, pool)
    assert found["loss"] < 2e-3 and found["norm"] < 2e-2, found  # bf16 has 8 bits; measured 4e-4 and 4e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case({"data": 2, "tensor": 2}, precision="fp32", compiled=True),
        Case({"tensor": 2, "pipeline": 2}, precision="fp32", compiled=True),
        Case({"data": 2} | SWAP, precision="fp32", compiled=True),
        Case({"data": 2, "expert": 2}, "experts", compiled=True),
        Case({"tensor": 2}, "hybrid_experts", compiled=True),
        Case({"data": 2, "tensor": 2, "recompute": "operators"}, "gemma2", documents=True, compiled=True),
    ],
    ids=str,
)
def test_compiled_layers_are_the_same_model(case: Case, pool: Any) -> None:
    found = differences(case, pool)
    assert max(found.values()) < TOLERANCES[case.precision], found


def test_a_repeated_run_is_bitwise_equal(pool: Any) -> None:
    case = Case({"data": 2} | PP2, precision="fp32")
    first, second = (pool.run(4, on_this_rank, case, None) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        assert all(np.array_equal(one.parameters[name], other.parameters[name]) for name in one.parameters)


CONTROLS = [
    ("no all-reduce behind the column layers", Case({"tensor": 2, "sequence_parallel": False}), "gradients"),
    ("no sum in the reduce-scatter", Case({"tensor": 2}), "gradients"),
    ("gradients averaged over data ranks", Case({"data": 2}), "gradients"),
    ("a replicated norm counted twice", Case({"tensor": 2}), "norm"),
    ("tied gradients not summed", Case(PP2, "tied"), "gradients"),
    ("valid tokens counted on this rank only", Case({"data": 2}), "parameters"),
    (
        "a swapped layer recomputed from its first tokens",
        Case({"tensor": 2, "sequence_parallel": False} | SOME_TOKENS),
        "gradients",
    ),
    ("tokens cut anywhere, of another shard", Case({"tensor": 2} | SOME_TOKENS), "gradients"),
    ("gradients in host memory not clipped", Case({"data": 2} | HOST), "parameters"),
    ("weights of the step before", Case({"data": 2} | ON_DISK), "parameters"),
    ("logits normalized by this rank's sum", Case({"tensor": 2}), "loss"),
]


@pytest.mark.parametrize(("mutation", "case", "quantity"), CONTROLS, ids=[control[0] for control in CONTROLS])
def test_a_broken_engine_is_caught(mutation: str, case: Case, quantity: str, pool: Any) -> None:
    assert differences(case, pool, mutation)[quantity] > 1e-4
