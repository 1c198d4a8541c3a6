"""Text of a conversation by the model's chat template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gristmill.foundation.errors import InputError

# A pretrained model has no template of its own: a dialogue as documents have them.
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\n{% endfor %}assistant:"
PLAIN_STOPS = ("\n\nuser:", "\n\nsystem:")


class ChatTemplate:
    """A Jinja template in the form of transformers, run in a sandbox. stops: strings that end an answer.
    bounds: the texts of BOS and of the end of a document. writes_symbols: the
    template, not the tokenizer, writes BOS."""

    def __init__(
        self,
        source: str,
        stops: tuple[str, ...] = (),
        symbols: Sequence[str] = (),
        bounds: tuple[str, str] = ("", ""),
    ):
        self.stops, self.symbols = stops, tuple(sorted(symbols, key=len, reverse=True))
        self.bos_token, self.eos_token = bounds
        self.writes_symbols = not stops
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InputError(f"the chat template is not valid Jinja ({error}); correct it") from error

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Raises InputError if the template refuses the messages."""
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error


def _refuse(message: str) -> None:
    raise TemplateError(message)


def chat_template(tokenizer: Path, given: Path | None, bounds: tuple[str, str] = ("", "")) -> ChatTemplate:
    """The given file, else the one of the tokenizer's folder, else PLAIN. Raises InputError for a file that is none."""
    symbols = _symbols(tokenizer / "tokenizer.json")
    if given is not None:
        return ChatTemplate(_text(given), symbols=symbols, bounds=bounds)
    if (tokenizer / "chat_template.jinja").is_file():
        return ChatTemplate(_text(tokenizer / "chat_template.jinja"), symbols=symbols, bounds=bounds)
    settings = tokenizer / "tokenizer_config.json"
    source = json.loads(_text(settings)).get("chat_template") if settings.is_file() else None
    if isinstance(source, list):
        source = _default_template(settings, source)
    if isinstance(source, str):
        return ChatTemplate(source, symbols=symbols, bounds=bounds)
    return ChatTemplate(PLAIN, PLAIN_STOPS)


def _default_template(settings: Path, named: list[Any]) -> str:
    """The template `default` of a list of {name, template}. Raises InputError if there is none."""
    templates = {each.get("name"): each.get("template") for each in named if isinstance(each, dict)}
    source = templates.get("default")
    if not isinstance(source, str):
        raise InputError(
            f"{settings}: chat_template is a list without a template `default` (it has {sorted(map(str, templates))}); "
            "give one with --chat-template FILE"
        )
    return source


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text ({error}); name a file of UTF-8 text") from error


def _symbols(path: Path) -> list[str]:
    """Control symbols of a tokenizer.json, which a template writes as text."""
    if not path.is_file():
        return []
    return [str(token["content"]) for token in json.loads(_text(path)).get("added_tokens", [])]
