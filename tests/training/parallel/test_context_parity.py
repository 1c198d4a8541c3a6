"""Tokens of a sample over ranks are the model of one process: losses, every gradient, the norm and parameters after
steps, in float64 to 1e-12."""

from typing import Any

import pytest

from tests.support.parity import Case, by_size, differences

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
