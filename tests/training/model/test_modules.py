"""Rotary positions for longer contexts."""

import math

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gristmill.evaluation.convert.hf.rope_and_windows import read_rope, write_rope
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.modules import rotary_angles

NTK = {"rope_type": "ntk", "factor": 4.0}


def frequencies(width: int, base: float, scaling: dict) -> torch.Tensor:
    """Of the first half of the features, in radians a token: the angles of position 1."""
    config = ModelConfig(layers=1, width=width, heads=1, rope_base=base, rope_scaling=scaling)
    cosine, sine = rotary_angles(torch.ones(1, 1), width, base, torch.float64, config.rope_scaling)
    return torch.atan2(sine, cosine)[0, 0, : width // 2]


def test_ntk_keeps_the_fastest_feature_and_slows_the_last_by_the_factor() -> None:
    found = frequencies(8, 10000.0, NTK)
    plain = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(found / plain, 4 ** (-torch.tensor([0, 1 / 3, 2 / 3, 1]).double()))


@pytest.mark.parametrize("factor", [1.5, 8.0])
def test_ntk_is_transformers_dynamic_scaling_at_that_length(factor: float) -> None:
    """Dynamic scaling chooses the factor by the length at hand: that of `factor` times the original."""
    dynamic = {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 500000.0}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=100, rope_parameters=dynamic
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=int(100 * factor))
    found = frequencies(64, 500000.0, {"rope_type": "ntk", "factor": factor})
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=0)


def test_ntk_is_exported_as_its_base() -> None:
    config = ModelConfig(layers=1, width=256, heads=2, rope_scaling=NTK)
    written = write_rope(config)
    assert written["rope_theta"] == pytest.approx(10000 * 4 ** (128 / 126)) and "rope_scaling" not in written
    again = ModelConfig(layers=1, width=256, heads=2, **read_rope(written))
    assert again.rope_scaling is None and math.isclose(again.rope_base, 40889.94, rel_tol=1e-6)
