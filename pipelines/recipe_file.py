"""Loads recipe files: YAML, command-line overrides, errors that name the line and the fix."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.strict_yaml import YamlDocument, read_yaml
from gristmill.pipelines.config import Recipe
from gristmill.pipelines.explain_errors import did_you_mean, explain_errors

ConfigClass = TypeVar("ConfigClass", bound=BaseModel)
RECIPES = Path(__file__).with_name("recipes")


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(reference: str) -> Path:
    """The path of a recipe file, or of a bundled recipe by name. Raises RecipeError with the nearest name."""
    path = Path(reference)
    if path.suffix in (".yaml", ".yml") or path.parent != Path("."):
        if path.is_file():
            return path
        raise RecipeError(f"{reference}: no such recipe file")
    bundled = RECIPES / f"{reference}.yaml"
    if bundled.is_file():
        return bundled
    near = did_you_mean(reference, recipe_names())
    raise RecipeError(f"no recipe {reference!r}{near}; give a .yaml file or one of {', '.join(recipe_names())}")


def load_recipe(reference: str, overrides: Sequence[str] = ()) -> Recipe:
    """The validated recipe with its overrides. Raises RecipeError naming the file, line, field and fix."""
    path = find_recipe(reference)
    try:
        document = read_yaml(path.read_bytes(), str(path))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if not isinstance(document.value, dict):
        found = "empty" if document.value is None else f"a {type(document.value).__name__}"
        raise RecipeError(f"{path}: a recipe is a mapping of fields (name: ..., sources: ...), but this is {found}")
    for override in overrides:
        _apply(document, override)
    return validate(document.value, str(path), document)


def validate(content: dict[str, Any], origin: str, document: YamlDocument | None = None) -> Recipe:
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError("\n".join(explain_errors(error, Recipe, content, origin, document))) from error


def validate_config(model: type[ConfigClass], fields: dict[str, Any]) -> ConfigClass:
    """A config from command options. Raises RecipeError naming the option."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise RecipeError("; ".join(explain_errors(error, model, fields))) from error


def _apply(document: YamlDocument, override: str) -> None:
    """`train.layout.tensor=2` or `sources.0.paths=[a.txt]`: the value is read as YAML."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise RecipeError(f"--set {override}: write field=value, such as --set train.tokens=8M")
    value = read_yaml(text, f"--set {override}", name_lines=False).value
    *parents, last = dotted.split(".")
    target: Any = document.value
    location: list[str | int] = []
    for key in parents:
        location.append(_index_or_name(target, key, override))
        if isinstance(target, list):
            target = target[int(key)]
        else:
            inner = target.get(key)
            target[key] = inner = {} if inner is None else inner
            target = inner
        if not isinstance(target, dict | list):
            raise RecipeError(f"--set {override}: {key!r} is a plain value and has no fields")
    location.append(_index_or_name(target, last, override))
    target[location[-1]] = value
    document.replaced[tuple(location)] = f"--set {override}"


def _index_or_name(target: dict[str, Any] | list[Any], key: str, override: str) -> int | str:
    if isinstance(target, dict):
        return key
    if not re.fullmatch("[0-9]{1,9}", key) or int(key) >= len(target):
        raise RecipeError(f"--set {override}: {key!r} must be a position from 0 to {len(target) - 1}")
    return int(key)
