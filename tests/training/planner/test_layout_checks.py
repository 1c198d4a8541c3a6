"""Invalid layouts give errors with the nearest valid value."""

from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.layout_checks import check_layout, micro_batch_size

MODEL = {"layers": 4, "width": 48, "heads": 6, "kv_heads": 3, "ffn_hidden_size": 96, "sequence_length": 48}


def refusal(layout: dict, world_size: int, model: dict | None = None, vocab: int = 300, **train: Any) -> str:
    config = TrainConfig(**({"tokens": 16 * 48, "batch_tokens": 16 * 48} | train), layout=layout)
    with pytest.raises(RecipeError) as caught:
        check_layout(ModelConfig(**(MODEL | (model or {}))), config, vocab, world_size)
    return str(caught.value)


def test_a_right_layout_passes() -> None:
    layout = {"data": 2, "tensor": 2, "pipeline": 2}
    config = TrainConfig(tokens=768, batch_tokens=768, layout=layout)
    check_layout(ModelConfig(**(MODEL | {"heads": 4, "kv_heads": 2})), config, 300, 8)


def test_the_number_of_processes() -> None:
    assert "= 4 processes, but 2 run; start 4 (torchrun --nproc-per-node 4), or set data: 2" in refusal({"data": 4}, 2)
    assert "tensor x pipeline x context is 4" in refusal({"tensor": 2, "pipeline": 2}, 6)


def test_what_tensor_ranks_cut() -> None:
    assert "tensor 4: 6 heads do not split evenly; legal for this model: [1, 3, 6]" in refusal({"tensor": 4}, 4)
    assert "3 key/value heads neither split over the ranks nor repeat" in refusal({"tensor": 2}, 2)
    assert "the hidden width 50 does not split" in refusal(
        {"tensor": 3}, 3, {"ffn_hidden_size": 50, "sequence_length": 33}, batch_tokens=528
    )
    assert "a vocabulary of 4 leaves the last rank without a row" in refusal({"tensor": 3}, 3, vocab=4)
    assert "sequence_length 32 does not split evenly; set sequence_parallel: false" in refusal(
        {"tensor": 3}, 3, {"sequence_length": 32}
    )


def test_what_context_ranks_cut() -> None:
    assert (
        "sequence_length 48 does not split into 2 blocks for each rank of the ring; set sequence_length: 50, or "
        in (refusal({"context": 5}, 5))
    )
    assert "or context to one of [1, 2, 3, 4, 6, 8, 12, 24]" in refusal({"context": 16}, 16)
    heads = {"context": 4, "context_method": "all_to_all"}
    assert (
        "all_to_all: 6 heads of a tensor rank do not split evenly; set context to one of [1, 2, 3, 6], or "
        in refusal(heads, 4)
    )
    assert "does not split into a share for each rank; set sequence_length: 45" in refusal(
        {"context": 9, "context_method": "all_to_all"}, 9
    )
    assert "share of the sequence, 8 does not split evenly; set sequence_parallel: false" in refusal(
        {"tensor": 3, "context": 6}, 18
    )


def test_what_a_pipeline_needs() -> None:
    interleaved = {"pipeline": 4, "pipeline_schedule": "interleaved"}
    assert "8 stages but 4 layers; use at most 2 pipeline ranks with 2 stages each" in refusal(interleaved, 4)
    assert "needs 2 micro-batches or more, a data rank has 1" in refusal({"pipeline": 2, "micro_batch": 16}, 2)
    assert "split_points [9] must lie between 1 and 3" in refusal({"pipeline": 2, "split_points": [9]}, 2)
    three = {"pipeline": 2, "pipeline_schedule": "interleaved", "micro_batch": 1}
    assert "no whole number of rounds" in refusal(three, 2, batch_tokens=15 * 48, tokens=15 * 48)


def test_what_a_batch_needs() -> None:
    assert "not a whole number of samples of 48 tokens on each of 3 data ranks; try 720" in refusal({"data": 3}, 3)
    assert "micro-batches of 3; try one of [1, 2, 4, 8, 16]" in refusal({"micro_batch": 3}, 1)


@pytest.mark.parametrize(
    ("layout", "fix"),
    [
        ({"data": 4, "replicate": 3}, "try one of [1, 2, 4]"),
        ({"expert": 2}, "does not divide the 1 ranks of data x context x tensor that hold experts; try one of [1]"),
        ({"pipeline": 2, "pipeline_schedule": "1f1b", "virtual_stages": 2}, "leave virtual_stages out"),
        ({"pipeline": 2, "pipeline_schedule": "interleaved", "virtual_stages": 1}, "set virtual_stages to 2 or more"),
        ({"pipeline": 2, "pipeline_schedule": "zbv", "recompute": "operators"}, "set recompute: full"),
        (
            {"pipeline": 2, "pipeline_schedule": "dualpipev", "recompute": "operators"},
            "dualpipev splits the backward pass",
        ),
        ({"pipeline": 3, "split_points": [2]}, "split_points must be 2 rising layer numbers"),
    ],
)
def test_errors_of_a_layout_alone(layout: dict, fix: str) -> None:
    with pytest.raises(ValidationError) as caught:
        LayoutConfig(**layout)
    assert fix in str(caught.value)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_schedules_that_cannot_compile(schedule: str) -> None:
    with pytest.raises(
        ValidationError, match=f"schedule {schedule} needs; set compile: false or pipeline_schedule: interleaved"
    ):
        TrainConfig(tokens=9, batch_tokens=9, compile=True, layout={"pipeline": 2, "pipeline_schedule": schedule})


def test_the_engine_chooses_a_micro_batch() -> None:
    model = ModelConfig(**MODEL)
    choose = lambda **layout: micro_batch_size(model, TrainConfig(tokens=768, batch_tokens=768, layout=layout))  # noqa: E731
    assert choose() == 16  # the whole batch: 768 tokens
    assert choose(pipeline=4) == 4  # four in flight
    assert choose(data=2, micro_batch=2) == 2


def test_what_asynchronous_tensor_parallelism_excludes() -> None:
    layout = {"tensor": 3, "async_tensor_parallel": True}
    assert "async_tensor_parallel is not built for compiled layers; set compile: false" in refusal(
        layout, 3, compile=True
    )
    assert "float8 scales all at once; leave one out" in refusal(layout, 3, float8=True)


def test_what_cuda_graphs_exclude() -> None:
    assert "not built for 2 processes, whose weights FSDP gathers anew; set cuda_graphs: false" in refusal(
        {"data": 2}, 2, cuda_graphs=True
    )
    for layout in ({"offload": {"optimizer": "cpu"}}, {"offload": {"parameters": "host"}}, {"recompute": "swap"}):
        assert "cuda_graphs is not built for memory on the host" in refusal(layout, 1, cuda_graphs=True)
    experts = {"moe": {"experts": 4, "top_k": 1, "ffn_hidden_size": 8}}
    says = refusal({}, 1, experts, cuda_graphs=True, precision="fp32")
    assert "in fp32 the host reads how many tokens each expert has; set precision: bf16" in says


def test_what_is_not_built_for_replicas_that_may_be_lost() -> None:
    layout = {"data": 2, "replicate": 2, "lost_replicas": "continue"}
    config = TrainConfig(tokens=768, batch_tokens=768, layout=layout)
    check_layout(ModelConfig(**MODEL), config, 300, 1)
    assert "continue starts its 2 processes itself, but 2 run; start it without torchrun" in refusal(layout, 2)
    said = refusal(layout | {"pipeline": 2}, 1, precision="fp16", compile=True, checkpoint={"asynchronous": True})
    for name in ("pipeline above 1", "precision fp16", "compile", "checkpoint.asynchronous"):
        assert f"lost_replicas: continue is not built for {name}" in said
    experts = {"moe": {"experts": 4, "top_k": 2, "ffn_hidden_size": 8}}
    assert "is not built for a model with experts; leave it out, or set lost_replicas" in refusal(layout, 1, experts)
    for wrong, reason in (({"data": 2}, "needs other replicas"), ({"auto": True}, "auto leaves it open")):
        with pytest.raises(ValidationError, match=reason):
            LayoutConfig(lost_replicas="continue", **wrong)
