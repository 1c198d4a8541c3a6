"""Constant factors of a model's parts. Without torch."""

from pydantic import Field

from gristmill.foundation.config import Config


class Scales(Config):
    """Constant factors of embedding, layers and logits, as Granite has them (arXiv 2405.04324) and Gemma some."""

    embedding: float = Field(1.0, gt=0, description="of the token embedding; Gemma's is sqrt(width)")
    residual: float = Field(1.0, gt=0, description="of what attention and MLP add to the residual stream")
    attention: float | None = Field(None, gt=0, description="of queries times keys; null: 1 / sqrt(head width)")
    logit_divisor: float = Field(1.0, gt=0, description="logits are divided by it")
