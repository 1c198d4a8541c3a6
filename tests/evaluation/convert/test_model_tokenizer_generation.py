"""Defaults of generation of published models."""

import json
from pathlib import Path

import pytest

from gristmill.evaluation.convert.model_tokenizer import GenerationDefaults
from gristmill.evaluation.inference.config import SamplingConfig
from gristmill.foundation.errors import InputError

PUBLISHED = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "eos_token_id": [1], "max_length": 20}


def test_the_publishers_sampling_holds_where_the_caller_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(PUBLISHED))
    defaults = GenerationDefaults.read(tmp_path)
    assert SamplingConfig(**defaults.sampling_fields()) == SamplingConfig(temperature=0.6, top_p=0.9)
    assert SamplingConfig(**defaults.sampling_fields(0.0, top_p=0.5)) == SamplingConfig(temperature=0.0, top_p=0.5)
    assert SamplingConfig(**GenerationDefaults.read(tmp_path / "none").sampling_fields()) == SamplingConfig()


def test_a_model_that_does_not_sample_is_greedy_with_its_penalty(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.1, "temperature": 0.7}')
    assert SamplingConfig(**GenerationDefaults.read(tmp_path).sampling_fields()) == SamplingConfig(
        repetition_penalty=1.1
    )


@pytest.mark.parametrize("content", ["[", "3", '{"top_p": 7}', '{"temperature": "warm"}'])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(InputError, match=r"generation_config\.json"):
        GenerationDefaults.read(tmp_path)
