"""Configuration of the optimizer, the learning rate schedule and the batch size ramp. Without torch."""

from typing import Literal

from pydantic import Field

from gristmill.foundation.config import Config
from gristmill.training.limits import MAX_BATCH_TOKENS, MAX_TOKENS


class OptimizerConfig(Config):
    """AdamW on every parameter, or Muon on the matrices of the layers and AdamW on the rest. Weight decay is not
    applied to vectors."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip_norm: float | None = Field(1.0, gt=0, description="maximum global gradient norm; null: no clipping")
    muon_learning_rate: float = Field(0.02, gt=0)
    muon_momentum: float = Field(0.95, ge=0, lt=1)


class ScheduleConfig(Config):
    """Learning rate schedule: linear warm-up from 0, then decay to final_ratio of the peak. Shares are of the run's
    tokens.

    over_tokens: length of the schedule if it is not that of the run, such as for a run that stops early."""

    shape: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    over_tokens: int | None = Field(None, ge=1)
    warmup_share: float = Field(0.02, ge=0, le=1)
    final_ratio: float = Field(0.1, ge=0, le=1)
    decay_share: float = Field(0.2, gt=0, le=1, description="wsd: the last share of the run, in which the rate falls")
    decay_shape: Literal["linear", "cosine", "one_minus_sqrt", "exponential"] = "one_minus_sqrt"


class RampConfig(Config):
    """The batch grows from start_tokens in equal increments until it is batch_tokens, after over_tokens of training."""

    start_tokens: int = Field(ge=1, le=MAX_BATCH_TOKENS)
    increment_tokens: int = Field(ge=1, le=MAX_BATCH_TOKENS)
    over_tokens: int = Field(ge=1, le=MAX_TOKENS)
