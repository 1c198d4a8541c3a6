"""The one base of every config in gristmill."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen, and refuses keys it does not know: a misspelt setting is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")
