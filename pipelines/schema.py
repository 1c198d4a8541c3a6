"""The JSON schema of recipes, for editors, with a description of every field.

Editors read `8M` as a string and do not know short forms, so they are added to pydantic's schema."""

import re
from typing import Any, get_args

from pydantic import BaseModel

from gristmill.data_pipeline.filters.presets import LINE_OPTIONS, PRESETS
from gristmill.foundation.strict_yaml import SIZE
from gristmill.pipelines.config import Recipe
from gristmill.pipelines.field_descriptions import DESCRIPTIONS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SIZE_SCHEMA = {"type": "string", "pattern": f"^(?:{SIZE.pattern})$"}


def recipe_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12. Every property has a description."""
    schema = Recipe.model_json_schema()
    definitions = schema["$defs"]
    for model in _models(Recipe):
        target = schema if model is Recipe else definitions.get(model.__name__)
        for name, text in field_descriptions(model).items() if target else ():
            target["properties"][name]["description"] = text
    _with_sizes(schema)
    definitions["FilterChoice"] = {"anyOf": [definitions["FilterChoice"], *_short_filters()]}
    curate, decontaminate = definitions["CurateConfig"]["properties"], definitions["DecontaminateConfig"]["properties"]
    spans = curate["span_dedup"]
    curate["span_dedup"] = _either(spans, {"$ref": "#/$defs/SpanDedupConfig"}, {"type": "null"})
    definitions["TaskChoice"] = {"anyOf": [definitions["TaskChoice"], {"type": "string", "minLength": 1}]}
    decontaminate["tasks"] = _either(decontaminate["tasks"], {"$ref": "#/$defs/TaskChoice"})
    return {"$schema": DIALECT, "title": "A recipe of gristmill", **{k: v for k, v in schema.items() if k != "title"}}


def field_descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Field -> description: Field(description=...), else the class docstring's text after `field:`, else the one in
    field_descriptions.py."""
    documented = _from_docstring(model)
    own = {name: field.description for name, field in model.model_fields.items() if field.description}
    return {**DESCRIPTIONS.get(model.__name__, {}), **documented, **own}


def _from_docstring(model: type[BaseModel]) -> dict[str, str]:
    """`validation, test: shares. seed: of the draw.` -> the first sentence for two fields, the second for one."""
    text = " ".join((model.__doc__ or "").split())
    name = "|".join(sorted(map(re.escape, model.model_fields), key=len, reverse=True))
    if not name:
        return {}
    found = list(re.finditer(rf"(?:^|(?<=[.;)] ))((?:{name})(?:, (?:{name}))*): ", text))
    ends = [*(match.start() for match in found[1:]), len(text)][: len(found)]
    described = {}
    for match, end in zip(found, ends, strict=True):
        for field in match[1].split(", "):
            described[field] = text[match.end() : end].strip()
    return described


def _models(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The model and all models of its fields, each once."""
    found = [model]
    for each in found:
        for field in each.model_fields.values():
            found += [inner for inner in _models_in(field.annotation) if inner not in found]
    return found


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return list(dict.fromkeys(model for argument in get_args(annotation) for model in _models_in(argument)))


def _with_sizes(schema: Any) -> None:
    """Allows a size string for every number, in place."""
    if isinstance(schema, list):
        for inner in schema:
            _with_sizes(inner)
    if not isinstance(schema, dict):
        return
    for inner in schema.values():
        _with_sizes(inner)
    if schema.get("type") in ("integer", "number"):
        kept = {key: schema.pop(key) for key in list(schema) if key not in ("title", "description", "default")}
        schema["anyOf"] = [kept, SIZE_SCHEMA]


def _either(schema: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """anyOf of the schema and the others, with description and default outside."""
    outside: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    inside = {key: value for key, value in schema.items() if key not in outside}
    return {**outside, "anyOf": [inside, *others]}


def _short_filters() -> list[dict[str, Any]]:
    """`gopher_quality`, and `{gopher_quality: {min_words: 20}}`."""
    number_or_null = {"anyOf": [{"type": "number"}, SIZE_SCHEMA, {"type": "null"}]}
    shorts: list[dict[str, Any]] = [{"enum": sorted(PRESETS), "description": "a filter with published thresholds"}]
    for preset, rules in PRESETS.items():
        names = [rule.name for rule in rules] + list(LINE_OPTIONS.get(preset, ()))
        thresholds = {
            name: number_or_null | {"description": f"threshold of {preset}.{name}; null disables it"} for name in names
        }
        shorts.append(
            {
                "type": "object",
                "properties": {
                    preset: {
                        "description": f"the filter {preset} with custom thresholds",
                        "anyOf": [
                            {"type": "object", "properties": thresholds, "additionalProperties": False},
                            {"type": "null"},
                        ],
                    }
                },
                "required": [preset],
                "additionalProperties": False,
            }
        )
    return shorts
