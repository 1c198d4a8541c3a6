"""Chat templates of published models, rendered as transformers renders them, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gristmill.foundation.errors import InputError
from gristmill.tokenizers.tokenizer import SETTINGS_NAME

TEMPLATE_NAME = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
LEGACY_NAME = "chat_template.json"
DEFAULT, TOOL_USE = "default", "tool_use"

# A pretrained model has no template of its own: a dialogue as documents have them.
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\n{% endfor %}assistant:"
PLAIN_STOPS = ("\n\nuser:", "\n\nsystem:")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class GenerationBlocks(Extension):
    """`{% generation %}` blocks, by which transformers marks the assistant's text. They render their content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _content(self, context: nodes.EvalContext, caller: Macro) -> str:
        return str(caller())


class ChatTemplate:
    """Jinja templates in the form of transformers. templates: by name; `tool_use` is taken where there are tools, else
    `default`. symbols: variables such as bos_token. stops: strings that end an answer. writes_symbols: the template,
    not the tokenizer, writes BOS."""

    def __init__(
        self,
        templates: str | Mapping[str, str],
        symbols: Mapping[str, Any] | None = None,
        stops: tuple[str, ...] = (),
    ):
        self.stops, self.symbols, self.writes_symbols = stops, dict(symbols or {}), not stops
        sources = {DEFAULT: templates} if isinstance(templates, str) else templates
        environment = template_environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateError as error:
            raise InputError(f"the chat template is not valid Jinja ({error}); correct it") from error

    @property
    def is_plain(self) -> bool:
        """Whether the model has no template of its own."""
        return self.stops == PLAIN_STOPS

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text up to where the assistant's answer begins. variables: of the template, such as enable_thinking.

        Raises InputError if the template refuses the messages."""
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        fields = {**self.symbols, **(variables or {}), "documents": None}
        if tools and self.is_plain:
            raise InputError("the model has no chat template, so it knows no tools; give one with --chat-template FILE")
        try:
            return self._templates[name].render(
                **fields,
                messages=[_stated(message) for message in messages],
                tools=None if tools is None else list(tools),
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error


def _stated(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without absent fields, its reasoning under the names that templates read."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def template_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up: loop controls, generation blocks, plain JSON, the date, a way to refuse."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes of HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def read_chat_template(folder: Path, given: Path | None, symbols: Mapping[str, Any]) -> ChatTemplate:
    """The given file, else the tokenizer folder's own templates, else PLAIN. Raises InputError for a damaged file."""
    if given is not None:
        return ChatTemplate(_text(given), symbols)
    templates = folder_templates(folder)
    if not templates:
        return ChatTemplate(PLAIN, symbols, PLAIN_STOPS)
    if DEFAULT not in templates:
        raise InputError(
            f"{folder / SETTINGS_NAME}: chat_template is a list without a template `default` (it has "
            f"{sorted(templates)}); give one with --chat-template FILE"
        )
    return ChatTemplate(templates, symbols)


def folder_templates(folder: Path) -> dict[str, str]:
    """Templates by name: those of tokenizer_config.json, which files of their own replace."""
    templates = _named(_fields(folder / SETTINGS_NAME).get("chat_template"))
    templates |= _named(_fields(folder / LEGACY_NAME).get("chat_template"))
    if (folder / TEMPLATE_NAME).is_file():
        templates = {DEFAULT: _text(folder / TEMPLATE_NAME)}
    for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja")):
        templates[path.stem] = _text(path)
    return templates


def _named(templates: Any) -> dict[str, str]:
    """Templates by name, from a text or a list of {name, template}."""
    if isinstance(templates, str):
        return {DEFAULT: templates}
    entries = templates if isinstance(templates, list) else []
    return {
        str(entry.get("name")): entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("template"), str)
    }


def _fields(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); fetch the file again") from error
    return fields if isinstance(fields, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text ({error}); name a file of UTF-8 text") from error
