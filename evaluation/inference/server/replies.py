"""Replies of the OpenAI API: completions, chat completions, their streamed chunks, errors, and the calls
of tools that a text makes."""

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

from pydantic import Field

from gristmill.evaluation.inference.generate.generation_request import Generation, RequestResult, TokenLogprob
from gristmill.evaluation.inference.generate.structured import schema_grammar
from gristmill.foundation.config import Config

# Tools of the chat API: the calls that a model's text makes, and the grammar of texts that make them.

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


ReadCalls = Callable[[str], tuple[str, list[dict[str, Any]]]]


class Vocabulary(Protocol):
    @property
    def pieces(self) -> tuple[str, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Replies:
    """The replies to one HTTP request, which have one id and one time. read_calls: finds tool calls in a text."""

    def __init__(self, vocabulary: Vocabulary, model: str, chat: bool, read_calls: ReadCalls | None = None):
        self.vocabulary, self.model, self.chat, self.read_calls = vocabulary, model, chat, read_calls
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex[:24]}"
        self.created = int(time.time())
        self.reports_usage = False
        self._offsets: dict[int, int] = {}  # characters of a streamed choice so far
        self._begun: set[int] = set()

    def whole(self, results: Sequence[RequestResult], prompts: Sequence[Sequence[int]], echoes: Sequence[str]) -> Any:
        """echoes: the text before each prompt's completions; empty without echo."""
        choices: list[dict[str, Any]] = []
        for result, echo in zip(results, echoes, strict=True):
            for generation in result.generations:
                choices.append(self._choice(len(choices), generation, echo, result.prompt_logprobs))
        name = "chat.completion" if self.chat else "text_completion"
        return self._reply(name, choices) | {"usage": usage(results, prompts)}

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Any:
        """A streamed piece of the choice with this index."""
        return self._chunk(index, self._delta(index, {"content": text}) if self.chat else text, logprobs, None)

    def end(
        self, index: int, generation: Generation, prompt_logprobs: Sequence[TokenLogprob] = (), whole: bool = False
    ) -> Any:
        """The last chunk of a choice: its finish reason. whole: nothing of it was streamed before, as where there are
        tools."""
        if not self.chat:
            return self._chunk(index, generation.text if whole else "", prompt_logprobs, finish_reason(generation))
        if not whole:
            return self._chunk(index, self._delta(index, {}), (), finish_reason(generation))
        message, reason = self._message(generation)
        calls = [{"index": number, **call} for number, call in enumerate(message.pop("tool_calls", []))]
        fields = {"content": message["content"], **({"tool_calls": calls} if calls else {})}
        return self._chunk(index, self._delta(index, fields), generation.logprobs, reason)

    def stream_usage(self, results: Sequence[RequestResult], prompts: Sequence[Sequence[int]]) -> Any:
        return self._reply(self._chunk_name, []) | {"usage": usage(results, prompts)}

    def _delta(self, index: int, fields: dict[str, Any]) -> dict[str, Any]:
        first = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        return first | fields

    def _chunk(self, index: int, content: Any, logprobs: Sequence[TokenLogprob], reason: str | None) -> Any:
        choice = {"index": index, "delta" if self.chat else "text": content}
        choice |= {"logprobs": self._logprobs(index, logprobs), "finish_reason": reason}
        extra = {"usage": None} if self.reports_usage else {}
        return self._reply(self._chunk_name, [choice]) | extra

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _reply(self, name: str, choices: list[Any]) -> Any:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    def _choice(
        self, index: int, generation: Generation, echo: str, prompt_logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        logprobs = self._logprobs(index, [*prompt_logprobs, *generation.logprobs])
        if not self.chat:
            content: dict[str, Any] = {"text": echo + generation.text}
            return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason(generation)}
        message, reason = self._message(generation)
        message = {"role": "assistant", **message}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _message(self, generation: Generation) -> tuple[dict[str, Any], str]:
        """(content and tool calls of a chat answer, its finish reason)."""
        text, calls = (generation.text, []) if self.read_calls is None else self.read_calls(generation.text)
        if not calls:
            return {"content": text}, finish_reason(generation)
        reason = "length" if generation.ended == "length" else "tool_calls"
        return {"content": text or None, "tool_calls": calls}, reason

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> Any:
        if not tokens:
            return None
        return self._chat_logprobs(tokens) if self.chat else self._completion_logprobs(index, tokens)

    def _completion_logprobs(self, index: int, tokens: Iterable[TokenLogprob]) -> Any:
        """Log-probabilities in columns. Of tokens with equal texts, such as halves of characters, top_logprobs has the
        likelier one."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = self._offsets.get(index, 0)
        for scored in tokens:
            text = self._text(scored.token)
            top: dict[str, float] | None = None
            if scored.logprob is not None:
                top = {}
                for token, logprob in sorted([*scored.top, (scored.token, scored.logprob)], key=lambda pair: -pair[1]):
                    top.setdefault(self._text(token), logprob)
            for name, value in zip(columns, (text, scored.logprob, top, offset), strict=True):
                columns[name].append(value)
            offset += len(text)
        self._offsets[index] = offset
        return columns

    def _chat_logprobs(self, tokens: Iterable[TokenLogprob]) -> Any:
        def described(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._text(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {
            "content": [
                {**described(scored.token, scored.logprob), "top_logprobs": [described(*pair) for pair in scored.top]}
                for scored in tokens
            ],
            "refusal": None,
        }

    def _text(self, token: int) -> str:
        """The text of a token, or the name of a control symbol, which has none."""
        if token >= len(self.vocabulary.pieces):
            return ""
        return self.vocabulary.decode([token]) or self.vocabulary.pieces[token]


def finish_reason(generation: Generation) -> str:
    return "length" if generation.ended == "length" else "stop"


def usage(results: Sequence[RequestResult], prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Token counts; a prompt counts once, whatever is drawn from it."""
    prompt_tokens = sum(map(len, prompts))
    new_tokens = sum(len(generation.tokens) for result in results for generation in result.generations)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
