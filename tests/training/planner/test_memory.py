"""A model that does not fit in memory is an error before allocation."""

from pathlib import Path
from typing import Any

import pytest

from gristmill.foundation.errors import InputError
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import OptimizerConfig, TrainConfig
from gristmill.training.planner.memory import (
    check_disk,
    check_host_memory,
    check_memory,
    memory_statement,
    min_process_bytes,
    stated_memory,
)

# GPT-2 (124M): 124,439,808 parameters (Radford et al. 2019; transformers counts the same)
GPT2 = ModelConfig(
    layers=12,
    width=768,
    heads=12,
    sequence_length=1024,
    mlp="gelu",
    norm="layernorm",
    positions="learned",
    biases=True,
    tied_embeddings=True,
)


def train(**layout: Any) -> TrainConfig:
    return TrainConfig(tokens=2**20, batch_tokens=2**16, layout=layout)


def test_the_least_of_gpt2() -> None:
    assert min_process_bytes(GPT2, train(), 50257) == 124_439_808 * 12
    assert min_process_bytes(GPT2, train(tensor=2, pipeline=2, data=4, replicate=2), 50257) == 124_439_808 * 12 // 8


def test_a_model_that_cannot_stand_in_memory_is_named() -> None:
    check_memory(GPT2, train(), 50257, 2 * 2**30)
    with pytest.raises(
        InputError, match=r"124,439,808 parameters: .* at least 1\.4 GiB on each process, which has 1\.0"
    ):
        check_memory(GPT2, train(), 50257, 2**30)
    giant = ModelConfig(layers=10_000, width=1_000_000, heads=1000)
    with pytest.raises(InputError, match=r"parameters: .*lower model\.layers or model\.width"):
        check_memory(giant, train(), 50257, 2**40)


@pytest.mark.parametrize(
    ("optimizer", "offload", "each"),
    [
        ("adamw", {"optimizer": "cpu"}, 16),  # two moments, weight and gradient
        ("adamw", {"optimizer": "interleaved", "stride": 2}, 12),
        ("adamw", {"optimizer": "static", "device_share": 1.0}, 8),
        ("muon", {"optimizer": "cpu"}, 12),
    ],
)
def test_host_memory_too_small_names_the_largest_that_fits(optimizer: str, offload: dict, each: int) -> None:
    config = train(data=2, offload=offload).model_copy(update={"optimizer": OptimizerConfig(name=optimizer)})
    parameters = 124_439_808 / 2
    check_host_memory(GPT2, config, 50257, 2, int(2 * parameters * each))
    with pytest.raises(
        InputError, match=rf"each of 2 processes .* at most {2**28 // each // 2:,} parameters a process"
    ):
        check_host_memory(GPT2, config, 50257, 2, 2**28)
    assert min_process_bytes(GPT2, config, 50257) == parameters * 4  # the weights stay on the device


def streamed(parameters: str, **layout: Any) -> TrainConfig:
    changes = {"precision": "fp32", "layout": {"micro_batch": 1, "offload": {"parameters": parameters}} | layout}
    return TrainConfig(tokens=2**20, batch_tokens=2**10, **changes)


# Of GPT-2, 12 layers of 7,087,872 parameters (12 x 768^2 + 13 x 768); the largest matrix of one has 4 x 768^2.
LAYER = 7_087_872
ENDS = 124_439_808 - 12 * LAYER


def test_streamed_weights_by_hand() -> None:
    """One sample a step: two layers, the ends with their gradients, and the largest gradient, 4 bytes each. In the
    store 16 bytes of a layer's parameter and the moments, 8, of another."""
    stated = stated_memory(GPT2, streamed("disk"), 50257)
    assert stated.parameters == 4 * (ENDS + 2 * LAYER) and stated.optimizer == stated.host == 0
    assert stated.gradients == 4 * (ENDS + 4 * 768**2)
    assert stated.disk == 16 * 12 * LAYER + 8 * ENDS
    assert stated_memory(GPT2, streamed("host"), 50257).host == stated.disk
    assert min_process_bytes(GPT2, streamed("disk"), 50257) == stated.parameters + stated.gradients
    assert "at most 2 layers'" in memory_statement(stated) and f"{stated.total / 2**30:.3f} GiB" in memory_statement(
        stated
    )


def test_a_place_too_small_for_streamed_weights_names_the_largest_that_fits(tmp_path: Path, monkeypatch: Any) -> None:
    stated = stated_memory(GPT2, streamed("disk"), 50257)
    check_host_memory(GPT2, streamed("host"), 50257, 2, int(2 * stated.disk))
    with pytest.raises(InputError, match=r"on host memory, which has 0\.5 GiB; at most 19,931,366 parameters"):
        check_host_memory(GPT2, streamed("host"), 50257, 2, 2**29)
    disk = type("Usage", (), {"free": 2**28})
    monkeypatch.setattr("gristmill.training.planner.memory.shutil.disk_usage", lambda folder: disk)
    with pytest.raises(InputError, match=r"the disk of .*, which has 0\.2 GiB; at most 19,931,366 parameters"):
        check_disk(GPT2, streamed("disk").with_offload_folder(tmp_path / "absent"), 50257, 1)


def test_nothing_in_host_memory_needs_none() -> None:
    check_host_memory(GPT2, train(), 50257, 8, 0)
