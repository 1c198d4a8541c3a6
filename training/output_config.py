"""Configuration of a linear output beside the vocabulary's. Without torch."""

from typing import Literal

from pydantic import Field

from gristmill.foundation.config import Config
from gristmill.training.limits import MAX_WIDTH


class OutputConfig(Config):
    """A linear output beside the vocabulary's. over: of the pooled first token, or of every token."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="by which an objective asks for it")
    size: int = Field(ge=1, le=MAX_WIDTH, description="numbers it gives, such as the classes")
    over: Literal["pooled", "tokens"] = "pooled"
