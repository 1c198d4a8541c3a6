"""The recipe's JSON schema accepts what `gristmill` accepts, as an editor reads it, and describes every field."""

import pytest
import yaml
from bad_input import small

from gristmill.pipelines.recipes.recipe_file import find_recipe, recipe_names
from gristmill.pipelines.recipes.schema import DESCRIPTIONS, DIALECT, recipe_schema

jsonschema = pytest.importorskip("jsonschema", reason="the oracle of schemas: pip install jsonschema (extra `test`)")


@pytest.fixture(scope="module")
def validator():
    schema = recipe_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_ours_is_valid(validator, name):
    """Read by plain YAML, as an editor does: 8M is text there."""
    content = yaml.safe_load(find_recipe(name).read_text("utf-8"))
    assert [error.message for error in validator.iter_errors(content)] == []


@pytest.mark.parametrize(
    "change",
    [
        "train.tokens: 8M",
        "sources.0.weight: 1k",
        "curate.filters: [gopher_quality]",
        "curate.filters: [{gopher_quality: {min_words: 20, min_stop_words: null}}, {c4: null}]",
        "curate.filters: [{preset: gopher_quality, thresholds: {min_words: 5}}]",
        "curate.span_dedup: {unit: line}",
        "curate.span_dedup: [{unit: line}, {unit: paragraph}]",
        "curate.decontaminate: {tasks: [mtnlg, {name: piqa, fields: [goal]}]}",
        "curate.decontaminate: {tasks: mtnlg}",
        "train.layout: auto",
        "model.window: [16, null]",
        "model: null",
    ],
)
def test_short_forms_are_valid(validator, change):
    assert [error.message for error in validator.iter_errors(yaml.safe_load(small(change)))] == []


@pytest.mark.parametrize(
    "change",
    [
        "train.tokns: 8M",
        "train.tokens: 8 million",
        "train.tokens: -1",
        "sources.0.format: jsnl",
        "curate.filters: [gopher]",
        "curate.filters: [{gopher_quality: {min_word: 20}}]",
        "curate.span_dedup: {unit: page}",
        "train.layout: automatic",
        "sources: []",
    ],
)
def test_what_a_recipe_may_not_hold_is_invalid(validator, change):
    assert list(validator.iter_errors(yaml.safe_load(small(change))))


def test_the_dialect_is_named():
    assert recipe_schema()["$schema"] == DIALECT == "https://json-schema.org/draft/2020-12/schema"


def properties(schema):
    if isinstance(schema, dict):
        yield from schema.get("properties", {}).items()
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from properties(inner)


def test_every_property_is_described():
    found = list(properties(recipe_schema()))
    assert len(found) > 200
    missing = [name for name, field in found if not field.get("description", "").strip()]
    assert missing == [], "give each a Field(description=...), or `name: what it is` in the docstring of its class"


def test_the_table_of_descriptions_names_fields_that_exist():
    schema = recipe_schema()
    for model, fields in DESCRIPTIONS.items():
        definition = schema if model == "Recipe" else schema["$defs"][model]
        known = definition.get("properties") or definition["anyOf"][0]["properties"]
        assert set(fields) <= set(known), model
