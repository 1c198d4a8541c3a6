"""The one base of every config in gristmill."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Config(BaseModel):
    """Frozen, and refuses keys it does not know: a misspelt setting is an error, never ignored.

    Numbers are finite, and true or false is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before", check_fields=False)
    @classmethod
    def true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes true for 1, in `layers: true` too."""
        field = cls.model_fields.get(info.field_name or "")
        if field is not None and _holds_boolean(value) and not _takes_boolean(field.annotation):
            raise ValueError(f"{str(value).lower()} stands where no true or false belongs; write the value itself")
        return value


def _holds_boolean(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(each, bool) for each in value)
    if isinstance(value, dict):
        return any(isinstance(each, bool) for each in value.values())
    return isinstance(value, bool)


def _takes_boolean(annotation: Any) -> bool:
    """True for bool, Any, and what holds another config, which checks its own fields."""
    if annotation is Any or (isinstance(annotation, type) and issubclass(annotation, bool | BaseModel)):
        return True
    return any(_takes_boolean(argument) for argument in get_args(annotation))
