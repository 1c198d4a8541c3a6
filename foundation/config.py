"""Base class of every config in gristmill."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Config(BaseModel):
    """Frozen; unknown keys are errors. Numbers must be finite, and booleans are not accepted as numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    @field_validator("*", mode="before", check_fields=False)
    @classmethod
    def reject_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans for numeric fields: pydantic accepts true as 1."""
        field = cls.model_fields.get(info.field_name or "")
        if field is not None and _holds_boolean(value) and not _takes_boolean(field.annotation):
            raise ValueError(f"{str(value).lower()} is not a valid value here; write the value itself")
        return value


def _holds_boolean(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(member, bool) for member in value)
    if isinstance(value, dict):
        return any(isinstance(member, bool) for member in value.values())
    return isinstance(value, bool)


def _takes_boolean(annotation: Any) -> bool:
    """True for bool, Any, and containers of other configs, which check their own fields."""
    if annotation is Any or (isinstance(annotation, type) and issubclass(annotation, bool | BaseModel)):
        return True
    return any(_takes_boolean(argument) for argument in get_args(annotation))
