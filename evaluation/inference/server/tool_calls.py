"""Tools of the chat API: the calls that a model's text makes, and the grammar of texts that make them."""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from gristmill.evaluation.inference.generate.structured import schema_grammar
from gristmill.foundation.config import Config

ANY_OBJECT = {"type": "object"}
TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)  # Hermes, Qwen
PREFIXES = ("[TOOL_CALLS]", "<|python_tag|>")  # Mistral, Llama 3


class ToolFunction(Config):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Config):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Config):
    name: str


class ToolChoice(Config):
    """A tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


Choice = Literal["none", "auto", "required"] | ToolChoice


def call_grammar(tools: Sequence[Tool], choice: Choice) -> str | None:
    """The grammar of a text that calls a tool, None where the model may choose to call none.

    A named tool's text is its arguments, another's {"name": ..., "arguments": {...}}."""
    if isinstance(choice, ToolChoice):
        (parameters,) = [tool.function.parameters for tool in tools if tool.function.name == choice.function.name]
        return schema_grammar(parameters or ANY_OBJECT)
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or ANY_OBJECT,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return schema_grammar({"anyOf": calls} if len(calls) > 1 else calls[0])


def read_calls(text: str, tools: Sequence[Tool], choice: Choice) -> tuple[str, list[dict[str, Any]]]:
    """(text beside the calls, calls in the form of the API). Text that is no call of a known tool stays text."""
    names = {tool.function.name for tool in tools}
    if isinstance(choice, ToolChoice):
        return "", [_call(choice.function.name, text)]
    if choice == "none":
        return text, []
    tagged = [_parsed(content, names) for content in TAGGED.findall(text)]
    if tagged and all(tagged):
        return TAGGED.sub("", text).strip(), [call for calls in tagged for call in calls]
    bare = text.strip()
    for prefix in PREFIXES:
        bare = bare.removeprefix(prefix).strip()
    calls = _parsed(bare, names)
    return ("", calls) if calls else (text, [])


def _parsed(text: str, names: set[str]) -> list[dict[str, Any]]:
    """The calls of a JSON text, one object or a list of them; none if it is anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return []
    entries = content if isinstance(content, list) else [content]
    calls = []
    for entry in entries:
        arguments = entry.get("arguments", entry.get("parameters")) if isinstance(entry, dict) else None
        if arguments is None or entry.get("name") not in names:
            return []
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(_call(entry["name"], text))
    return calls


def _call(name: str, arguments: str) -> dict[str, Any]:
    call_id = f"call_{uuid.uuid4().hex[:24]}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
