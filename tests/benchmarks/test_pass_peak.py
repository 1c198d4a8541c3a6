"""The forecast peak of a pass is that of the allocations of a real one."""

from typing import Any
from unittest import mock

import pytest
import torch
from support.address_plan import live_peak, recorded
from support.pass_peak import pass_peak
from torch.utils._python_dispatch import _disable_current_modes

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.engine.passes import output_of, scaled_sum
from gristmill.training.parallel.mesh import single_process
from gristmill.training.parallel.offload.swap import InHostMemory
from gristmill.training.planner.activations import ElementSizes, cpu_logits
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.engine_profile import GRISTMILL
from gristmill.training.planner.layout import from_config
from gristmill.training.planner.memory import MemoryModel

VOCAB, TOKENS = 512, 256
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "full": {"recompute": "full"},
    "swap": {"recompute": "swap"},
    "some tokens": {"recompute": "tokens", "offloaded_token_fraction": 0.5},
    "no tokens": {"recompute": "tokens", "offloaded_token_fraction": 0.0},
}
MODELS = {
    "swiglu": ModelConfig(layers=4, width=64, heads=8, sequence_length=TOKENS),
    "gelu": ModelConfig(layers=4, width=64, heads=8, sequence_length=TOKENS, mlp="gelu", norm="layernorm"),
}


def measured_peak(model: ModelConfig, train: TrainConfig) -> int:
    """Beside the weights and what is in host memory."""
    stage = build_local_model(model, VOCAB, train, single_process(), seed=0).stages[0]
    tokens = torch.randint(0, VOCAB, (4, TOKENS))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "weights": torch.ones(4, TOKENS)}
    make = InHostMemory.__init__

    def not_recorded(self: Any, values: torch.Tensor, swap: Any) -> None:
        with _disable_current_modes():
            make(self, values, swap)

    with (
        mock.patch.object(InHostMemory, "__init__", not_recorded),
        recorded() as blocks,
        output_of([stage], causal_loss(z_loss=False)),
    ):
        losses_bn = stage(batch["tokens"], **batch)
        scaled_sum(losses_bn, [1.0] * losses_bn.shape[1]).backward()
    return live_peak(blocks())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_the_peak_of_a_pass_is_forecast(model: str, policy: str) -> None:
    config = MODELS[model]
    layout = {"micro_batch": 4} | POLICIES[policy]
    train = TrainConfig(tokens=4 * TOKENS, batch_tokens=4 * TOKENS, precision="fp32", layout=layout)
    memories = MemoryModel(shape_of(config, VOCAB), GRISTMILL, ElementSizes(4, 4, cuda=False))
    forecast = pass_peak(memories, from_config(train.layout, 4))
    assert forecast == pytest.approx(measured_peak(config, train), rel=0.05)


def test_chunks_of_logits_by_hand() -> None:
    """2^24 logits are 333 tokens of 50,304; 1,024 tokens make 4 chunks of 256."""
    assert cpu_logits(1024, 50_304, 4) == 256 * 50_304
    assert cpu_logits(100, 512, 4) == 100 * 512
