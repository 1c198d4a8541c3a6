"""The fields of a recipe that name code of the user: read with the recipe, so that it holds all that it runs.

Paths are relative to the recipe file."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.filters.presets import PRESETS
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.user_code import UserCode, is_reference, read_user_code

Location = tuple[int | str, ...]
FILTERS: tuple[tuple[str, ...], ...] = (("curate", "filters"), ("sources", "*", "filters"))
CODES: tuple[tuple[str, ...], ...] = (("curate", "signals", "*"), ("sources", "*", "reader"))
# Named here by their paths, and read by the stages of training and evaluation.
NAMES: tuple[tuple[str, ...], ...] = (
    ("train", "objective"),
    ("evaluate", "tasks", "*"),
    ("train", "evaluation", "tasks", "*"),
)


def with_user_code(content: Any, folder: Path, where: Callable[[Location], str]) -> Any:
    """The recipe's fields with the text of every Python file that filters and signals name. where: file and line of a
    field. Raises RecipeError if a file, a function or a package is missing."""
    for pattern in FILTERS:
        for parent, key, location in _at(content, pattern):
            if isinstance(parent[key], list):
                read = [
                    _filter(choice, folder, (*location, number), where) for number, choice in enumerate(parent[key])
                ]
                parent[key] = read
    for pattern in CODES:
        for parent, key, location in _at(content, pattern):
            code = _read(parent[key], folder, location, where)
            parent[key] = parent[key] if code is None else code.model_dump()
    for pattern in NAMES:
        for parent, key, _ in _at(content, pattern):
            if isinstance(parent[key], str) and is_reference(parent[key]):
                parent[key] = str(folder / parent[key])
    return content


def _at(content: Any, pattern: tuple[str, ...], location: Location = ()) -> Iterator[tuple[Any, Any, Location]]:
    """(parent, key, location) of every value at the pattern, of which `*` is any place of a list."""
    key, *rest = pattern
    if key == "*":
        keys: list[Any] = list(range(len(content))) if isinstance(content, list) else []
    else:
        keys = [key] if isinstance(content, dict) and key in content else []
    for name in keys:
        if rest:
            yield from _at(content[name], tuple(rest), (*location, name))
        else:
            yield content, name, (*location, name)


def _filter(choice: Any, folder: Path, location: Location, where: Callable[[Location], str]) -> Any:
    """A filter as it stands, or with the code of its function."""
    thresholds: Any = {}
    name = choice
    if isinstance(choice, dict) and len(choice) == 1:
        [(name, thresholds)] = choice.items()
    code = _read(name, folder, location, where)
    if code is None:
        return choice
    return {"preset": code.label, "thresholds": thresholds or {}, "code": code.model_dump()}


def _read(name: Any, folder: Path, location: Location, where: Callable[[Location], str]) -> UserCode | None:
    if not isinstance(name, str) or name in PRESETS:
        return None
    field = re.sub(r"(\.\d+)+$", "", ".".join(map(str, location)))
    try:
        return read_user_code(name, folder, field)
    except RecipeError as error:
        raise RecipeError(f"{where(location)}: {error}") from error
