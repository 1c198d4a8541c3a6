"""Tokens of a sample over ranks are the model of one process: losses, every gradient, the norm and parameters after
steps, in float64 to 1e-12."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from gristmill.training.model.attention import ring
from gristmill.training.parallel.context import Passing
from gristmill.training.parallel.mesh import Axis
from tests.support.parity import MUTATIONS, Case, by_size, differences, mesh_of_group, outcome

RING2, RING4 = {"context": 2}, {"context": 4}
HEADS2, HEADS4 = RING2 | {"context_method": "all_to_all"}, RING4 | {"context_method": "all_to_all"}
PP2 = {"pipeline": 2, "micro_batch": 4}
GRID = [
    # the ring and the exchange of heads alone; two key/value heads over four ranks
    Case(RING4),
    Case(HEADS4),
    Case(RING2, documents=True),
    Case(RING4, "one_kv_head", documents=True),
    Case(HEADS2, "banded", documents=True),
    # windows, learned positions, ALiBi, scaled rotary positions
    Case(RING2, "windows"),
    Case(HEADS2, "bloom", documents=True),
    # a soft cap of the scores with windows and other angles in them, offset positions
    Case(RING2, "gemma2", documents=True),
    # with tensor ranks
    Case(RING2 | {"tensor": 2}),
    Case(HEADS2 | {"tensor": 2}, "one_kv_head"),
    # with a pipeline
    Case(RING2 | PP2 | {"pipeline_schedule": "interleaved"}, "tied"),
    # with data ranks, and all axes
    Case(RING2 | {"data": 2}, documents=True),
    # experts, whose ranks are those of data x context x tensor
    Case(RING2 | {"expert": 2}, "experts"),
    # recomputation
    Case(RING2 | {"recompute": "full"}, "banded", documents=True),
    # bidirectional attention, with an output of the pooled first token
    Case(RING2, "bert", masked=True),
]
# further pairs of the same parts, by hand (-m slow)
RARE = [
    Case(RING2 | PP2 | {"tensor": 2, "data": 1, "pipeline_schedule": "interleaved"}, documents=True),
    Case(HEADS2 | PP2 | {"pipeline_schedule": "zbv"}, "gpt2", documents=True),
    Case(RING2 | {"tensor": 2, "recompute": "attention"}),
    Case(HEADS2 | {"data": 2, "expert": 2}, "experts_by_groups"),
    Case(HEADS2 | {"recompute": "operators"}),
    Case(RING2),
    Case(HEADS2),
    Case(RING4, "banded", documents=True),
    Case(RING4, "bloom"),
    Case(RING2, "qwen2"),
    Case(HEADS2, "gemma2"),
    Case(RING2, "opt"),
    Case(RING2 | {"tensor": 2, "sequence_parallel": False}, "bloom", documents=True),
    Case(HEADS2 | {"tensor": 2}, "bloom"),
    Case(RING2 | PP2, documents=True),
    Case(RING2 | PP2 | {"pipeline_schedule": "zbv"}),
    Case(RING2 | {"data": 4, "replicate": 2}),
    Case(RING2 | {"data": 2, "fsdp_reshard_after_forward": "never"}, optimizer="muon"),
    Case(HEADS2 | PP2 | {"tensor": 2}, "gpt2"),
    Case(RING2 | {"tensor": 2, "expert": 4}, "experts", documents=True),
    Case(RING2 | {"tensor": 2, "sequence_parallel": False, "expert": 2}, "pr_moe"),
    Case(RING2 | {"recompute": "operators"}),
    Case(RING2 | PP2 | {"pipeline_schedule": "zbv", "recompute": "full"}),
    Case(HEADS2 | {"tensor": 2}, "bert", masked=True),
]


@pytest.mark.parametrize("case", by_size(GRID, RARE))
def test_every_layout_of_tokens_is_one_process(case: Case, pool: Any) -> None:
    found = differences(case, pool)
    assert max(found.values()) < 1e-12, found


FLASH = [
    Case(RING4),
    Case(RING4, "one_kv_head", documents=True),
    Case(RING2 | {"tensor": 2}, "windows", documents=True),
    Case(RING2, "bloom", documents=True),
    Case(RING2, "bert", masked=True),
]


@pytest.mark.parametrize("case", by_size(FLASH[:2], FLASH[2:]))
def test_tiles_by_flash_kernels_are_one_process(case: Case, pool: Any) -> None:
    found = differences(case, pool, "tiles by flash kernels")
    assert max(found.values()) < 1e-12, found


COMPILED = [
    Case(RING2, "windows", documents=True, compiled=True),
    Case(RING2, "banded", documents=True, compiled=True),
    Case(HEADS2 | {"tensor": 2}, "one_kv_head", compiled=True),
    Case(RING2 | {"tensor": 2, "recompute": "operators"}, "gemma2", documents=True, compiled=True),
    Case(RING2 | {"recompute": "full"}, "bloom", compiled=True),
    Case(RING2 | {"expert": 2}, "experts", compiled=True),
    Case(RING2, "bert", masked=True, compiled=True),
    Case(RING2, "latent", documents=True, compiled=True),
    Case(HEADS2, "hybrid", documents=True, compiled=True),
    Case(RING2, "mamba2", documents=True, compiled=True),
    Case(RING2, "tcnca", documents=True, compiled=True),
]


@contextmanager
def without_code_generation() -> Iterator[None]:
    """Layers are traced and differentiated by the compiler; the graphs run as they are."""
    compiler = torch.compile
    torch._dynamo.reset()
    with mock.patch.object(torch, "compile", partial(compiler, backend="aot_eager")):
        yield


MUTATIONS["compiled without code"] = without_code_generation


def key_and_value_gradients_stay(sent: torch.Tensor, axis: Axis, tag: int) -> Passing:
    return Passing(sent, sent, [])


@contextmanager
def compiled_with_a_broken_ring() -> Iterator[None]:
    with without_code_generation(), mock.patch.object(ring, "pass_on", key_and_value_gradients_stay):
        yield


MUTATIONS["compiled, gradients of keys and values left where they are"] = compiled_with_a_broken_ring


@pytest.mark.parametrize(
    "case", [COMPILED[0], *(pytest.param(case, marks=pytest.mark.slow) for case in COMPILED[1:])], ids=str
)
def test_compiled_layers_on_a_context_axis_are_one_process(case: Case, pool: Any) -> None:
    found = differences(case, pool, "compiled without code")
    assert max(found.values()) < 1e-12, found


@pytest.mark.slow
@pytest.mark.parametrize("case", [COMPILED[1], COMPILED[2], COMPILED[-2]], ids=str)
def test_generated_code_on_a_context_axis_is_one_process(case: Case, pool: Any) -> None:
    found = differences(case, pool)
    assert max(found.values()) < 1e-12, found


def test_a_broken_ring_is_caught_in_compiled_layers(pool: Any) -> None:
    broken = "compiled, gradients of keys and values left where they are"
    assert differences(Case(RING2, compiled=True), pool, broken)["gradients"] > 1e-4


def graphs_on_this_rank(case: Case) -> tuple[int, int]:
    """(graphs, graph breaks) of two steps, whose batches have other documents."""
    with without_code_generation():
        counters.clear()
        outcome(case, mesh_of_group(*case.configs))
        return counters["stats"]["unique_graphs"], len(counters["graph_break"])


def test_the_ring_is_an_operator_of_one_graph(pool: Any) -> None:
    """Without dropout one graph serves all layers and all batches."""
    case = Case(RING2, "latent", documents=True, compiled=True)
    assert pool.run(2, graphs_on_this_rank, case) == [(2, 0)] * 2  # dropout knows the layer's number


CONTROLS = [
    ("blocks merged without their log-sum-exp", Case(RING2), "gradients"),
    ("tokens numbered as if not zig-zag", Case(RING2), "loss"),
    ("gradients of keys and values left where they are", Case(RING2), "gradients"),
    ("documents seen by each other", Case(RING2, documents=True), "gradients"),
    ("sums of this rank's tokens only", Case(RING2), "loss"),
    ("heads come back in another order", Case(HEADS2), "gradients"),
    ("an output's gradient counted by every rank", Case(RING2, "bert", masked=True), "gradients"),
    ("sums of this rank's tokens only", Case(RING2 | {"expert": 2}, "experts"), "gradients"),
]


@pytest.mark.parametrize(
    ("mutation", "case", "quantity"), CONTROLS, ids=[f"{control[0]}, {control[1].model}" for control in CONTROLS]
)
def test_a_broken_context_axis_is_caught(mutation: str, case: Case, quantity: str, pool: Any) -> None:
    assert differences(case, pool, mutation)[quantity] > 1e-4
