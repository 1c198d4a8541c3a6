"""Writes the generated pages of docs/: every command with its options, and every field of a recipe.

python tests/support/reference_pages.py"""

from pathlib import Path
from typing import Any

import typer

from gristmill.pipelines.cli.commands import app
from gristmill.pipelines.recipes.schema import recipe_schema

DOCS = Path(__file__).parents[2] / "docs"
SCALARS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}


def pages() -> dict[str, str]:
    """File name -> content."""
    return {"reference_commands.md": commands_page(), "reference_recipe.md": recipe_page()}


def commands_page() -> str:
    group: Any = typer.main.get_command(app)
    lines = ["# Commands", "", "Written by `tests/support/reference_pages.py` from the program.", ""]
    for words, command in _commands(group, ()):
        arguments = [part for part in command.params if part.param_type_name == "argument"]
        usage = " ".join(part.metavar or part.name.upper() for part in arguments)
        lines += [f"## gristmill {' '.join(words)}", "", _cell(command.help or ""), "", "```"]
        lines += [f"gristmill {' '.join(words)} {usage}".rstrip(), "```", ""]
        options = [part for part in command.params if part.param_type_name == "option" and not part.hidden]
        if options:
            lines += ["| option | what it does | default |", "|---|---|---|"]
            lines += [
                f"| `{' '.join(part.opts)}` | {_cell(part.help or '')} | {_default(part.default)} |" for part in options
            ]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _commands(command: Any, words: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", {})
    if not children:
        return [(words, command)]
    return [found for name in sorted(children) for found in _commands(children[name], (*words, name))]


def _default(value: Any) -> str:
    return "" if value is None or value is False or callable(value) else f"`{value}`"


def recipe_page() -> str:
    schema = recipe_schema()
    lines = [
        "# Fields of a recipe",
        "",
        "Written by `tests/support/reference_pages.py` from the schema that `gristmill schema`",
    ]
    lines += [
        "prints. Sizes may be written `4M`, `16k`, `0.5B` or `512Ki`. A name in the column of types is a table below.",
        "",
    ]
    lines += _table("Recipe", schema)
    for name, definition in sorted(schema["$defs"].items()):
        for model in [definition, *definition.get("anyOf", [])]:
            if "properties" in model and name not in ("FilterChoice", "UserCode"):
                lines += _table(name, model)
                break
    return "\n".join(lines).rstrip() + "\n"


def _table(name: str, model: dict[str, Any]) -> list[str]:
    lines = [f"## {name}", "", "| field | type | default | what it is |", "|---|---|---|---|"]
    for field, schema in model["properties"].items():
        required = field in model.get("required", ())
        default = "required" if required else _value(schema.get("default"))
        lines.append(f"| `{field}` | {_type(schema)} | {default} | {_cell(schema.get('description', ''))} |")
    return [*lines, ""]


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if name not in ("FilterChoice", "UserCode") else name
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{value}`" for value in values)
    if "anyOf" in schema:
        kinds = [_type(each) for each in schema["anyOf"] if "pattern" not in each]
        return " or ".join(dict.fromkeys(kinds))
    if schema.get("type") == "array":
        items = schema.get("items") or {}
        return f"list of {_type(items)}" if items else "list"
    if schema.get("type") == "object":
        return "mapping"
    return SCALARS.get(schema.get("type", ""), "value")


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "its defaults"
    text = f"{value}".lower() if isinstance(value, bool) else f"{value}"
    return f"`{text}`" if len(text) <= 60 else "see its table"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    for name, content in pages().items():
        (DOCS / name).write_text(content, "utf-8")
