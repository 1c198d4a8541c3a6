"""Recipe files: YAML as people write it, overrides of the command line, errors that name the line and the mend."""

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from gristmill.data_pipeline.errors import RecipeError
from gristmill.pipelines.config import Recipe

ConfigClass = TypeVar("ConfigClass", bound=BaseModel)
RECIPES = Path(__file__).with_name("recipes")
SIZE_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
SIZE = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:" + "|".join(sorted(SIZE_SUFFIXES, key=len, reverse=True)) + r")$")


class RecipeLoader(yaml.SafeLoader):
    """YAML 1.2's booleans (`no` is a language, not False), 1e-3 as a float, and sizes: 4M, 16k, 512Ki, 0.5B.

    Only plain scalars are read so: a quoted "4M" stays text."""


RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:bool",)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
RecipeLoader.add_implicit_resolver("!size", SIZE, list("0123456789"))


def parse_size(text: str) -> int:
    """'4M' -> 4000000, '16k' -> 16000, '0.5B' -> 500000000, '512Ki' -> 524288: k, M, G are powers of ten."""
    suffix = next(name for name in sorted(SIZE_SUFFIXES, key=len, reverse=True) if text.endswith(name))
    return round(float(text.removesuffix(suffix)) * SIZE_SUFFIXES[suffix])


RecipeLoader.add_constructor("!size", lambda loader, node: parse_size(node.value))


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(reference: str) -> Path:
    """A file, or the bare name of one of ours. Raises RecipeError with the nearest name."""
    path = Path(reference)
    if path.suffix in (".yaml", ".yml") or path.parent != Path("."):
        if path.is_file():
            return path
        raise RecipeError(f"{reference}: no such recipe file")
    ours = RECIPES / f"{reference}.yaml"
    if ours.is_file():
        return ours
    near = _did_you_mean(reference, recipe_names())
    raise RecipeError(f"no recipe {reference!r}{near}; give a .yaml file or one of {', '.join(recipe_names())}")


def load_recipe(reference: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe with its overrides, checked. Raises RecipeError that names the file, line, field and the mend."""
    path = find_recipe(reference)
    try:
        text = path.read_text("utf-8")
        root = yaml.compose(text, Loader=RecipeLoader)
        content = yaml.load(text, Loader=RecipeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(
            f"{path}: a recipe is a mapping of fields (name, sources, ...), this is {type(content).__name__}"
        )
    for override in overrides:
        _apply(content, override)
    return validate(content, str(path), root)


def validate(content: dict[str, Any], origin: str, root: yaml.Node | None = None) -> Recipe:
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError("\n".join(_explain(item, origin, root) for item in error.errors())) from error


def validate_config(model: type[ConfigClass], fields: dict[str, Any]) -> ConfigClass:
    """A config from the options of a command. Raises RecipeError that names the option."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        said = [
            f"{'.'.join(map(str, item['loc']))}: {item['msg'].removeprefix('Value error, ')}" for item in error.errors()
        ]
        raise RecipeError("; ".join(said)) from error


def _apply(content: dict[str, Any], override: str) -> None:
    """`train.layout.tensor=2` or `sources.0.paths=[a.txt]`: the value is read as YAML."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise RecipeError(f"--set {override}: write field=value, such as --set train.tokens=8M")
    try:
        value = yaml.load(text, Loader=RecipeLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {override}: the value is not YAML ({error}); quote it for the shell") from error
    *parents, last = dotted.split(".")
    target: Any = content
    for key in parents:
        if isinstance(target, list):
            target = target[_list_index(target, key, override)]
        elif isinstance(target, dict):
            inner = target.get(key)
            target[key] = inner = {} if inner is None else inner
            target = inner
        if not isinstance(target, dict | list):
            raise RecipeError(f"--set {override}: {key!r} is a plain value, it has no fields")
    if isinstance(target, list):
        target[_list_index(target, last, override)] = value
    else:
        target[last] = value


def _list_index(target: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(target):
        raise RecipeError(f"--set {override}: {key!r} must be a position from 0 to {len(target) - 1}")
    return int(key)


def _explain(item: Any, origin: str, root: yaml.Node | None) -> str:
    """One error of pydantic in our words: 'demo.yaml:12: train.tokenss: unknown field; did you mean tokens?'"""
    location = tuple(part for part in item["loc"])
    line = _line(root, location)
    where = f"{origin}:{line}" if line else origin
    field = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        known = _fields_at(Recipe, location[:-1])
        return (
            f"{where}: {field}: unknown field{_did_you_mean(str(location[-1]), known)}; known here: {', '.join(known)}"
        )
    if item["type"] == "missing":
        return f"{where}: {field}: missing; it has no default, so write it"
    message = item["msg"].removeprefix("Value error, ")
    given = json.dumps(item.get("input"), default=str, ensure_ascii=False)
    shown = f" (given: {given})" if len(given) <= 80 and item["type"] != "value_error" else ""
    return f"{where}: {field}: {message}{shown}" if field else f"{where}: {message}{shown}"


def _did_you_mean(wrong: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""


def _line(node: yaml.Node | None, location: Sequence[Any]) -> int | None:
    """The line of the deepest part of the location that stands in the file."""
    line = None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if found is None:
                continue  # a tag that pydantic puts in for one branch of a union
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def _fields_at(model: type[BaseModel], location: Sequence[Any]) -> list[str]:
    """The fields of the config that stands at a location: (\"train\", \"layout\") -> those of LayoutConfig."""
    here = [model]
    for part in location:
        inner: list[type[BaseModel]] = []
        for candidate in here:
            if part in candidate.model_fields:
                inner += _models_in(candidate.model_fields[part].annotation)
        here = inner or [candidate for candidate in here if isinstance(part, int) or candidate.__name__ == part] or here
    return sorted({name for candidate in here for name in candidate.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
