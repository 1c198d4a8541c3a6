"""A model that does not fit in memory is an error before allocation."""

import pytest

from gristmill.foundation.errors import InputError
from gristmill.training.config import TrainConfig
from gristmill.training.memory_check import check_memory, min_process_bytes
from gristmill.training.model_config import ModelConfig

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


def train(**layout: int) -> TrainConfig:
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
