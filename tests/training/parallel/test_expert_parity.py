"""Experts over ranks are the model of one process: losses, every gradient, the norm, parameters and balancing biases
after steps, in float64 to 1e-12."""

from typing import Any
from unittest import mock

import pytest
import torch

from gristmill.training.model.layer_hook import SwappedLayer
from tests.support.parity import Case, by_size, differences, mesh_of_group, outcome

EP2, EP4 = {"data": 2, "expert": 2}, {"data": 4, "expert": 4}
SOME_TOKENS = {"recompute": "tokens", "offloaded_token_fraction": 0.3, "num_layers_on_device": 0}
PP2 = {"pipeline": 2, "micro_batch": 4}
GRID = [
    # experts on one rank each; the data axis alone
    Case({"data": 1}, "experts"),
    Case({"data": 2}, "experts"),
    Case({"tensor": 2}, "experts"),
    Case({"tensor": 2, "sequence_parallel": False}, "experts"),
    # the expert axis over data ranks, with and without ranks that hold the same experts
    Case(EP2, "experts"),
    Case(EP4, "experts"),
    Case({"data": 4, "expert": 2}, "experts"),
    Case({"data": 4, "expert": 2, "micro_batch": 1}, "experts_by_groups"),
    Case(EP2 | {"fsdp_reshard_after_forward": "never"}, "pr_moe"),
    # HSDP: shard groups that hold all experts, and experts over the copies
    Case({"data": 4, "replicate": 2, "expert": 2}, "experts"),
    # folded over tensor ranks
    Case({"tensor": 2, "expert": 2}, "experts"),
    Case({"tensor": 2, "expert": 2, "sequence_parallel": False}, "pr_moe"),
    Case({"data": 2, "tensor": 2, "expert": 4}, "experts"),
    Case({"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 2}, "experts"),
    Case({"data": 2, "expert_tensor": 2}, "pr_moe"),
    # capacity within documents, whose tokens tensor and context ranks share
    Case(EP2, "last_drops", documents=True),
    Case({"tensor": 2, "expert": 2}, "last_drops", documents=True),
    Case({"context": 2}, "last_drops", documents=True),
    Case({"context": 2}, "random_drops", documents=True),
    # pipelines
    Case(PP2, "last_drops", documents=True),
    Case(EP2 | PP2 | {"pipeline_schedule": "zbv"}, "experts_deep"),
    Case(PP2 | {"pipeline_schedule": "dualpipev", "tensor": 2, "expert": 2}, "experts_deep"),
    # recomputation
    Case(EP2 | {"recompute": "full"}, "experts"),
    Case(EP2 | {"recompute": "attention"}, "pr_moe"),
    Case(EP2 | {"recompute": "operators"}, "experts"),
    # activations of some tokens in host memory, those of routed experts whole
    Case({"tensor": 2, "expert": 2} | SOME_TOKENS, "pr_moe"),
    # Muon, whose matrices are those of each expert
    Case({"data": 4, "expert": 2}, "experts", optimizer="muon"),
]
# further pairs of the same parts, by hand (-m slow)
RARE = [
    Case(PP2 | {"data": 2, "tensor": 2, "expert": 4, "pipeline_schedule": "zbv"}, "experts_deep"),
    Case(EP2 | PP2, "experts_deep"),
    Case(EP2 | PP2 | {"recompute": "operators"}, "experts_deep"),
    Case({"data": 8, "micro_batch": 1, "expert": 4}, "pr_moe"),
    Case({"context": 2, "tensor": 2}, "last_drops", documents=True),
    Case({"tensor": 2, "sequence_parallel": False}, "random_drops", documents=True),
    Case({"data": 4, "replicate": 4, "expert": 2}, "experts"),
    Case(EP2 | PP2 | {"pipeline_schedule": "zbv", "recompute": "full"}, "experts_deep"),
    Case(PP2 | {"data": 2, "tensor": 2, "expert": 2}, "experts_deep"),
    Case({"data": 2, "tensor": 2, "expert": 2}, "experts_by_groups"),
    Case(EP2 | PP2 | {"pipeline_schedule": "interleaved"}, "experts_deep"),
    Case(EP2 | SOME_TOKENS, "pr_moe"),
    Case(EP2 | PP2 | SOME_TOKENS, "experts_deep"),
    Case({"tensor": 2, "expert": 2, "sequence_parallel": False} | SOME_TOKENS, "experts"),
]


@pytest.mark.parametrize("case", by_size(GRID, RARE))
def test_every_layout_of_experts_is_one_process(case: Case, pool: Any) -> None:
    found = differences(case, pool)
    assert max(found.values()) < 1e-12, found


def shapes_in_host_memory(case: Case) -> set[tuple[int, ...]]:
    """Of what a swap copies there whole."""
    shapes, stored = set(), SwappedLayer._stored

    def recorded(layer: SwappedLayer, tensor: torch.Tensor) -> Any:
        shapes.add(tuple(tensor.shape))
        return stored(layer, tensor)

    with mock.patch.object(SwappedLayer, "_stored", recorded):
        outcome(case, mesh_of_group(*case.configs))
    return shapes


def test_gathered_weights_of_experts_stay_on_the_device(pool: Any) -> None:
    """Two experts on each rank, of width 16 and 8 hidden; the rows of their tokens are swapped."""
    for shapes in pool.run(2, shapes_in_host_memory, Case(EP2 | SOME_TOKENS, "experts")):
        assert not shapes & {(2, 8, 16), (2, 16, 8)}
        assert any(len(shape) == 2 and shape[1] == 8 for shape in shapes)


PLAIN_TENSOR = {"tensor": 2, "sequence_parallel": False}
CONTROLS = [
    ("tokens come back in another order", Case(EP2, "experts"), "loss"),
    ("counts of this rank only", Case(EP2, "experts"), "parameters"),
    ("a router's gradient of this rank's tokens only", Case(PLAIN_TENSOR, "experts"), "gradients"),
    ("load of this rank's tokens only", Case({"tensor": 2}, "experts"), "gradients"),
    ("capacity of this rank's tokens only", Case({"tensor": 2}, "pr_moe"), "loss"),
    ("side losses without their factor", Case(EP2, "experts"), "gradients"),
    ("the outputs' bias added by every share", Case({"data": 2, "expert_tensor": 2}, "pr_moe"), "loss"),
    ("a replicated norm counted twice", Case({"data": 4, "replicate": 2, "expert": 2}, "experts"), "norm"),
]


@pytest.mark.parametrize(("mutation", "case", "quantity"), CONTROLS, ids=[control[0] for control in CONTROLS])
def test_a_broken_expert_axis_is_caught(mutation: str, case: Case, quantity: str, pool: Any) -> None:
    assert differences(case, pool, mutation)[quantity] > 1e-6
