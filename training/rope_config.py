"""Configuration of rotary positions for contexts longer than those of pretraining. Without torch."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config
from gristmill.training.limits import MAX_SEQUENCE


class RopeScaling(Config):
    """How the rotary frequencies are lowered; the names are those of transformers' config.json.

    linear: all by `factor` (arXiv 2306.15595). llama3: those that turn fewer than low_freq_factor times within the
    original length by `factor`, those that turn more than high_freq_factor times not at all, between them by a share
    that rises linearly with the turns (Llama 3.1, arXiv 2407.21783; the rule of the published models). yarn: the same
    idea with beta_slow and beta_fast turns and a ramp over the features, and cosine and sine scaled by attention_factor
    (arXiv 2309.00071, sections 3.2 and 3.4). ntk: by a larger base, so that the fastest feature keeps its frequency and
    the slowest turns `factor` times slower (the same, section 3.1); transformers has it as a changed rope_theta."""

    rope_type: Literal["linear", "ntk", "llama3", "yarn"] = Field(description="the rule, as above")
    factor: float = Field(ge=1, description="by which frequencies are lowered")
    original_max_position_embeddings: int = Field(
        0, ge=0, le=MAX_SEQUENCE, description="tokens of a sample in pretraining; llama3 and yarn need it"
    )
    low_freq_factor: float = Field(1.0, gt=0, description="of llama3")
    high_freq_factor: float = Field(4.0, gt=0, description="of llama3")
    beta_fast: float = Field(32.0, gt=0, description="of yarn")
    beta_slow: float = Field(1.0, gt=0, description="of yarn")
    attention_factor: float | None = Field(None, gt=0, description="of yarn; null: 0.1 ln(factor) + 1")
    mscale: float | None = Field(
        None, gt=0, description="of yarn: factor of the logarithm above", json_schema_extra={"omit_default": True}
    )
    mscale_all_dim: float | None = Field(
        None,
        gt=0,
        description="of yarn: attention_factor is divided by that of this factor of the logarithm, and latent "
        "attention multiplies its scores by the square of it (DeepSeek)",
        json_schema_extra={"omit_default": True},
    )

    @model_validator(mode="after")
    def bounds_are_in_order(self) -> Self:
        if self.rope_type in ("llama3", "yarn") and not self.original_max_position_embeddings:
            raise ValueError(f"rope_scaling of type {self.rope_type} needs original_max_position_embeddings")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor={self.low_freq_factor} must be below {self.high_freq_factor=}")
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow} must be below {self.beta_fast=}")
        return self

    @property
    def rotation_factor(self) -> float:
        """Factor of cosine and sine."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._logarithmic(1.0)
        return self._logarithmic(self.mscale) / self._logarithmic(self.mscale_all_dim)

    @property
    def latent_score_factor(self) -> float:
        """Factor of the scores of latent attention."""
        return 1.0 if self.mscale_all_dim is None else self._logarithmic(self.mscale_all_dim) ** 2

    def _logarithmic(self, share: float) -> float:
        return 0.1 * share * math.log(self.factor) + 1

    def ntk_base(self, base: float, width: int) -> float:
        """The larger base of ntk, for heads that turn `width` features: base x factor^(width / (width - 2)). 10000, 128
        and factor 4 -> 40890."""
        return base * self.factor ** (width / max(width - 2, 1))
