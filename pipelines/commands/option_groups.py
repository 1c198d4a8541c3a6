"""Typer commands with grouped options: a parameter that is a dataclass becomes one option for each of its fields."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its dataclass parameters expanded; it still gets them as values. Fields need defaults.

    Annotations and defaults of the fields are those of the options, as in a plain Typer command."""
    groups: dict[str, Any] = {}
    options: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        annotation = get_type_hints(command, include_extras=True)[parameter.name]
        if is_dataclass(annotation):
            groups[parameter.name] = annotation
            options += _options(annotation)
        else:
            options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=annotation))

    @wraps(command)
    def expanded(**values: Any) -> None:
        grouped = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **grouped)

    expanded.__signature__ = Signature(options)  # type: ignore[attr-defined]
    expanded.__annotations__ = {option.name: option.annotation for option in options}
    return expanded


def _options(group: Any) -> list[Parameter]:
    annotations = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=annotations[field.name])
        for field in fields(group)
    ]
