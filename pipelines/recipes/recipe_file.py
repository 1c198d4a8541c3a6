"""Loads recipe files: YAML, command-line overrides, errors that name the line and the fix."""

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from gristmill.data_pipeline.filters.presets import PRESETS
from gristmill.foundation.config import YamlDocument, read_yaml, visible
from gristmill.foundation.errors import RecipeError, nearest_name
from gristmill.foundation.files import without_credentials
from gristmill.foundation.user_code import UserCode, is_reference, read_user_code
from gristmill.pipelines.recipes.config import Recipe

ConfigClass = TypeVar("ConfigClass", bound=BaseModel)
RECIPES = Path(__file__).parent
Location = tuple[int | str, ...]

# Recipe fields of earlier versions and the word that replaced each: a message, not an alias.
RENAMED_FIELDS = {
    "curate.words": "word_tokenizer",
    "curate.exact_dedup.normalise": "normalization",
    "curate.span_dedup.normalise": "normalization",
    "tokenizer.strategy": "preset",
    "tokenizer.goals": "requirements",
    "tokenizer.reference": "parity_language",
    "model.hidden": "ffn_hidden_size",
    "model.moe.hidden": "ffn_hidden_size",
    "model.initialisation": "init_method",
    "train.schedule": "lr_schedule",
    "train.layout.schedule": "pipeline_schedule",
    "train.layout.swapped_tokens": "offloaded_token_fraction",
    "train.layout.unswapped_layers": "num_layers_on_device",
    "train.teacher.until": "stop_at_fraction",
    "evaluate.shots": "num_fewshot",
    "evaluate.weights": "quantization",
    "evaluate.samples": "num_continuations",
    "evaluate.sample_tokens": "continuation_tokens",
}
# What a recipe's field is called elsewhere: config.json of Hugging Face and GPT-2, Megatron-LM's and nanoGPT's options.
NAMES_ELSEWHERE = {
    "model": {
        "layers": "num_hidden_layers num_layers n_layer n_layers depth",
        "width": "hidden_size d_model n_embd dim",
        "heads": "num_attention_heads attention_heads n_head n_heads",
        "kv_heads": "num_key_value_heads num_query_groups n_kv_heads n_kv_head",
        "head_width": "head_dim kv_channels",
        "ffn_hidden_size": "intermediate_size ffn_dim n_inner",
        "sequence_length": "max_position_embeddings n_positions block_size seq_length seq_len context_length",
        "rope_base": "rope_theta rotary_base",
        "norm_epsilon": "rms_norm_eps layer_norm_eps layernorm_epsilon",
        "tied_embeddings": "tie_word_embeddings tie_embeddings",
        "window": "sliding_window window_size",
        "dropout": "hidden_dropout attention_dropout resid_pdrop",
        "tokenizer.vocab_size": "vocab_size padded_vocab_size",
    },
    "train": {
        "batch_tokens (tokens of a step: sequences x sequence_length)": "global_batch_size batch_size train_batch_size",
        "tokens (all that the run reads)": "train_iters max_steps max_iters train_samples num_iterations",
        "optimizer.learning_rate": "lr learning_rate max_lr",
        "optimizer.weight_decay": "weight_decay",
        "optimizer.clip_norm": "clip_grad grad_clip max_grad_norm gradient_clipping",
        "lr_schedule.warmup_share": "warmup warmup_iters warmup_steps warmup_ratio lr_warmup_iters",
        "layout.tensor": "tensor_parallel tensor_model_parallel_size tp",
        "layout.pipeline": "pipeline_parallel pipeline_model_parallel_size pp",
    },
}
# What the command line sets, not the recipe, since the output does not depend on it.
COMMAND_OPTIONS = ("workdir", "workers", "engine")


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
    path, document = read_fields(reference, overrides)
    return validate(document.value, str(path), document, Path(".") if path.parent == RECIPES else path.parent)


def read_fields(reference: str, overrides: Sequence[str] = ()) -> tuple[Path, YamlDocument]:
    """The path of a recipe, and its fields with the overrides, which are a mapping but not validated yet."""
    path = find_recipe(reference)
    try:
        document = read_yaml(path.read_bytes(), str(path))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if not isinstance(document.value, dict):
        content = "empty" if document.value is None else f"a {type(document.value).__name__}"
        raise RecipeError(f"{path}: a recipe is a mapping of fields (name: ..., sources: ...), but this is {content}")
    for override in overrides:
        _apply(document, override)
    _refuse_credentials(document, str(path))
    return path, document


def _refuse_credentials(document: YamlDocument, origin: str) -> None:
    """Raises RecipeError naming the field of an address with credentials, whichever field it is: the recipe goes whole
    into manifests, logs, reports and trackers."""
    waiting: list[tuple[Location, Any]] = [((), document.value)]
    while waiting:
        location, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*location, key), member) for key, member in value.items()]
            waiting += [((*location, "a field's name"), key) for key in value if isinstance(key, str)]
        elif isinstance(value, list):
            waiting += [((*location, number), member) for number, member in enumerate(value)]
        elif isinstance(value, str):
            try:
                without_credentials(value)
            except ValueError as error:
                field = ".".join(map(str, location))
                raise RecipeError(f"{document.where(location, origin)}: {field}: {error}") from None


def validate(
    content: dict[str, Any], origin: str, document: YamlDocument | None = None, folder: Path = Path(".")
) -> Recipe:
    """The recipe of these fields. folder: that paths of Python files are relative to. Raises RecipeError."""
    content = with_user_code(
        copy.deepcopy(content), folder, lambda location: document.where(location, origin) if document else origin
    )
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
    option = f"--set {_without_secret(override)}"
    if not equals or not dotted:
        raise RecipeError(f"{option}: write field=value, such as --set train.tokens=8M")
    value = read_yaml(text, option, name_lines=False).value
    *parents, last = dotted.split(".")
    target: Any = document.value
    location: list[str | int] = []
    for key in parents:
        place: Any = _index_or_name(target, key, option)
        location.append(place)
        if isinstance(target, list):
            target = target[place]
        else:
            inner = target.get(key)
            target[key] = inner = {} if inner is None else inner
            target = inner
        if not isinstance(target, dict | list):
            raise RecipeError(f"{option}: {key!r} is a plain value and has no fields")
    location.append(_index_or_name(target, last, option))
    target[location[-1]] = value
    document.replaced[tuple(location)] = option


def _without_secret(override: str) -> str:
    """The option as messages repeat it: `sources.0.paths=...` where the value is an address with credentials."""
    try:
        return without_credentials(override)
    except ValueError:
        return f"{re.split('=|://', override, maxsplit=1)[0]}=..."


def _index_or_name(target: dict[str, Any] | list[Any], key: str, option: str) -> int | str:
    if isinstance(target, dict):
        return key
    names = [item.get("name") if isinstance(item, dict) else None for item in target]
    if key in names:
        return names.index(key)
    if not re.fullmatch("[0-9]{1,9}", key) or int(key) >= len(target):
        named = f", or one of {', '.join(map(str, names))}" if any(names) else ""
        raise RecipeError(f"{option}: {key!r} must be a position from 0 to {len(target) - 1}{named}")
    return int(key)


# Formats pydantic errors: file, line, field, what is wrong and how to fix it.

MAX_SHOWN = 80  # characters of a value that a message repeats


def explain_errors(
    error: ValidationError,
    model: type[BaseModel],
    content: Any,
    origin: str = "",
    document: YamlDocument | None = None,
) -> list[str]:
    """One line an error: 'demo.yaml:12: train.tokenss: unknown field, did you mean 'tokens'?'

    A value that matches no branch of a union gives one line; a list whose entries are wrong is not also reported as
    too short."""
    by_field: dict[Location, list[Any]] = {}
    for item in error.errors():
        by_field.setdefault(_field(item["loc"], content, item["type"]), []).append(item)
    lines = []
    for location, items in by_field.items():
        inside = any(other[: len(location)] == location for other in by_field if other != location)
        if inside and all(item["type"] in ("too_short", "tuple_type", "list_type") for item in items):
            continue
        if inside and _is_union(items, location):
            continue
        position = document.where(location, origin) if document else origin
        where = f"{position}: " if position else ""
        field = ".".join(str(part) for part in location)
        message = " ".join(visible(_explain(items, location, model)).split("\n"))
        lines.append(f"{where}{visible(field)}: {message}" if field else f"{where}{message}")
    return lines


def _field(location: Location, content: Any, kind: str) -> Location:
    """The location without the names that pydantic inserts for branches of a union.

    For a missing field the last part is kept although the content does not hold it."""
    field: Location = ()
    for number, part in enumerate(location):
        is_last = number + 1 == len(location)
        if (isinstance(content, dict) and part in content) or _has_position(content, part):
            content = content[part]
        elif part == "thresholds" and isinstance(content, dict) and len(content) == 1:
            [(part, content)] = content.items()  # a filter's short form: {gopher_quality: {min_words: 20}}
        elif not (kind == "missing" and is_last):
            continue
        field = (*field, part)
    return field


def _has_position(content: Any, part: int | str) -> bool:
    return isinstance(content, list | tuple) and isinstance(part, int) and part < len(content)


def _is_union(items: Sequence[Any], location: Location) -> bool:
    return any(len(item["loc"]) > len(location) for item in items)


def _explain(items: Sequence[Any], location: Location, model: type[BaseModel]) -> str:
    item = items[0]
    if item["type"] == "extra_forbidden":
        known = fields_at(model, location[:-1])
        if renamed := RENAMED_FIELDS.get(".".join(part for part in location if isinstance(part, str))):
            return f"this field is called {renamed} now"
        if len(location) == 1 and location[0] in COMMAND_OPTIONS:
            return f"no field of a recipe; give the command --{location[0]} instead"
        if name := _name_here(location):
            return f"unknown field; here it is {name}"
        return f"unknown field{did_you_mean(str(location[-1]), known)}; known here: {', '.join(known)}"
    if item["type"] == "missing":
        return "missing; it has no default, so write it"
    messages = dict.fromkeys(_message(error) for error in items)
    given_text = ""
    if item["type"] != "value_error":
        given = _given(item.get("input"))
        given_text = f" (given: {given})" if given else ""
    return ", or ".join([next(iter(messages)), *_rest(messages)]) + given_text


def _name_here(location: Location) -> str | None:
    names = NAMES_ELSEWHERE.get(str(location[0]), {}) if len(location) == 2 else {}
    return next((name for name, elsewhere in names.items() if location[1] in elsewhere.split()), None)


def _rest(messages: dict[str, None]) -> Iterator[str]:
    for message in list(messages)[1:]:
        yield message.removeprefix("Input should be ")


def _message(item: Any) -> str:
    """pydantic's message in YAML terms."""
    if item["type"] == "finite_number":
        return "must be a finite number, not infinity or NaN"
    if item["type"] == "int_parsing" and re.fullmatch(r"[0-9.]+ ?[A-Za-z]+", str(item.get("input"))):
        return "Input should be a valid integer; sizes are written 4M, 16k, 0.5B (powers of ten) or 512Ki"
    message = re.sub(" or instance of [A-Za-z]+", "", item["msg"].removeprefix("Value error, "))
    if item["type"] == "literal_error":
        message += did_you_mean(str(item.get("input")), re.findall("'([^']*)'", message))
    return message.replace("a valid tuple", "a list").replace("a valid dictionary", "a mapping of fields")


def _given(value: Any) -> str:
    """The value as written in the file; empty if it is long."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):
        return ""
    return text if len(text) <= MAX_SHOWN else ""


def did_you_mean(wrong: str, known: Sequence[str]) -> str:
    near = nearest_name(wrong, known, cutoff=0.5)
    return f", did you mean {near!r}?" if near else ""


def fields_at(model: type[BaseModel], location: Location) -> list[str]:
    """The field names of the config at a location: ("train", "layout") -> those of LayoutConfig."""
    here = [model]
    for part in location:
        if isinstance(part, int):
            continue
        inner = [
            inner_model
            for candidate in here
            if part in candidate.model_fields
            for inner_model in _models_in(candidate.model_fields[part].annotation)
        ]
        here = inner or here
    return sorted({name for candidate in here for name in candidate.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


# The fields of a recipe that name code of the user: read with the recipe, so that it holds all that it runs.
#
# Paths are relative to the recipe file.


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
