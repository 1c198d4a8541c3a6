"""Numbers of a recipe with which training could not work are refused, and the message says what to set."""

from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.foundation.config import Config
from gristmill.training.config.layers import MoeConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import GuardConfig, OptimizerConfig, ScheduleConfig, TeacherConfig, TrainConfig

MODEL = {"layers": 1, "width": 16, "heads": 2, "sequence_length": 8}
MOE = {"experts": 4}
TRAIN = {"tokens": 64, "batch_tokens": 8}
REFUSED: list[tuple[type[Config], dict[str, Any], str]] = [
    (OptimizerConfig, {"betas": (1.5, 0.9)}, "set both from 0 to below 1"),
    (OptimizerConfig, {"betas": (0.9, 1.0)}, "set both from 0 to below 1"),
    (OptimizerConfig, {"betas": (-0.1, 0.9)}, "set both from 0 to below 1"),
    (OptimizerConfig, {"learning_rate": 0}, "greater than 0"),
    (OptimizerConfig, {"learning_rate": 1e30}, "less than or equal to 10"),
    (OptimizerConfig, {"muon_learning_rate": 1e30}, "less than or equal to 10"),
    (OptimizerConfig, {"muon_momentum": 1}, "less than 1"),
    (OptimizerConfig, {"epsilon": 0}, "greater than 0"),
    (OptimizerConfig, {"epsilon": 1e30}, "less than or equal to 1"),
    (OptimizerConfig, {"weight_decay": -0.1}, "greater than or equal to 0"),
    (OptimizerConfig, {"weight_decay": 1e30}, "less than or equal to 10"),
    (OptimizerConfig, {"clip_norm": 0}, "greater than 0"),
    (ScheduleConfig, {"shape": "inverse_sqrt", "warmup_share": 0}, "set warmup_share above 0"),
    (ScheduleConfig, {"shape": "wsd", "warmup_share": 0.6, "decay_share": 0.6}, "their sum is at most 1"),
    (ScheduleConfig, {"warmup_share": 1.1}, "less than or equal to 1"),
    (ScheduleConfig, {"final_ratio": 1.1}, "less than or equal to 1"),
    (ScheduleConfig, {"decay_share": 0}, "greater than 0"),
    (ModelConfig, MODEL | {"init_std": 1e30}, "less than or equal to 1"),
    (ModelConfig, MODEL | {"init_std": 0}, "greater than 0"),
    (ModelConfig, MODEL | {"dropout": 1}, "less than 1"),
    (ModelConfig, MODEL | {"logit_softcap": 0}, "greater than 0"),
    (ModelConfig, MODEL | {"attention_softcap": -1}, "greater than 0"),
    (MoeConfig, MOE | {"balance_loss": 1e30}, "less than or equal to 100"),
    (MoeConfig, MOE | {"router_z_loss": 1e30}, "less than or equal to 100"),
    (MoeConfig, MOE | {"router_z_loss": -1}, "greater than or equal to 0"),
    (MoeConfig, MOE | {"capacity_factor": 0}, "greater than 0"),
    (ModelConfig, MODEL | {"rope_base": 1e30}, "less than or equal to 1000000000000"),
    (ModelConfig, MODEL | {"norm_epsilon": 1e30}, "less than or equal to 1"),
    (ModelConfig, MODEL | {"scales": {"residual": 1e30}}, "less than or equal to 1000000"),
    (ModelConfig, MODEL | {"rope_scaling": {"rope_type": "linear", "factor": 1e30}}, "less than or equal to 1000000"),
    (TrainConfig, TRAIN | {"lr_schedule": {"shape": "inverse_sqrt", "warmup_share": 0.01}}, "never reaches its peak"),
    (TrainConfig, TRAIN | {"z_loss": 1e30}, "less than or equal to 1"),
    (TrainConfig, TRAIN | {"z_loss": -1}, "greater than or equal to 0"),
    (GuardConfig, {"sigmas": 0}, "greater than 0"),
    (TeacherConfig, {"checkpoint": "x", "stop_at_fraction": 1.5}, "less than or equal to 1"),
]


@pytest.mark.parametrize(("config", "values", "words"), REFUSED, ids=str)
def test_a_number_out_of_bounds_is_refused(config: type[Config], values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**values)


def test_phases_that_meet_are_taken() -> None:
    assert ScheduleConfig(shape="wsd", warmup_share=0.7, decay_share=0.3).shape == "wsd"
    assert ScheduleConfig(warmup_share=0.9, decay_share=0.9).shape == "cosine"  # which has no decay_share
