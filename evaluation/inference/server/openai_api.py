"""Bodies of the OpenAI API's requests, checked: /v1/completions and /v1/chat/completions.

Fields that would change the answer and are not implemented are refused. Others that are not known are ignored, and a
header of the reply names them."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from gristmill.evaluation.convert.model_tokenizer import GenerationDefaults
from gristmill.evaluation.inference.config import SamplingConfig
from gristmill.evaluation.inference.generate.generation_request import (
    MAX_TOP_LOGPROBS,
    GenerationSettings,
    RequestOptions,
)
from gristmill.evaluation.inference.generate.structured import (
    choice_grammar,
    lark_grammar,
    regex_grammar,
    schema_grammar,
)
from gristmill.evaluation.inference.server.replies import ANY_OBJECT, Choice, Tool, ToolChoice, call_grammar
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError, nearest_name

MAX_PROMPTS = 1024
TYPO_SIMILARITY = 0.85  # of the name of a field
COMPLETION_TOKENS = 16  # OpenAI's default for completions; chat answers go on to the end of the context
# Fields that change the answer, with the values that do not.
REFUSED: dict[str, tuple[object, ...]] = {
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "use_beam_search": (None, False),
    "continue_final_message": (None, False),
    "prompt_embeds": (None,),
    "length_penalty": (None, 1, 1.0),
}
# Fields of the API that say nothing about the answer.
HARMLESS = frozenset(
    {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"parallel_tool_calls", "verbosity", "reasoning_effort", "priority", "request_id", "skip_special_tokens"}
    | {"spaces_between_special_tokens"}
)


def known_fields(kind: type[Config], body: Any) -> tuple[Any, list[str]]:
    """(the body's fields that the request has, names of those that are ignored).

    Raises ValueError for a field that would change the answer, or whose name is nearly that of one that is known."""
    if not isinstance(body, dict):
        raise ValueError("the body is not a JSON object; send one with a prompt or messages")
    refused, ignored = REFUSED | getattr(kind, "refused", {}), []
    for name, value in body.items():
        if name in refused:
            if value not in refused[name]:
                raise ValueError(f"{name} is not supported; leave it out")
        elif name in kind.model_fields:
            continue
        elif name not in HARMLESS and (near := nearest_name(name, kind.model_fields, TYPO_SIMILARITY)):
            raise ValueError(f"unknown field {name!r}, did you mean {near!r}?")
        else:
            ignored.append(name)
    used = {name: value for name, value in body.items() if name in kind.model_fields and name not in refused}
    return used, sorted(ignored)


class StreamOptions(Config):
    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Config):
    """The answer's schema. strict: taken and not used; the schema is always kept to."""

    name: str = "answer"
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Config):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type is json_schema, and there is no json_schema; give {'name': ..., 'schema': {...}}")
        return self

    def grammar(self) -> str | None:
        if self.type == "text":
            return None
        stated = self.json_schema.schema_ if self.json_schema is not None else None
        return schema_grammar(ANY_OBJECT if stated is None else stated)


class RequestBody(Config):
    """Body of a request, in which null stands for a field's default."""

    @model_validator(mode="before")
    @classmethod
    def null_is_the_default(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class ApiRequest(RequestBody, RequestOptions):
    """The fields that both endpoints have. temperature is by default the model's own, else 1, as in OpenAI's API.
    guided_json, guided_regex, guided_choice, guided_grammar: vLLM's names of a text's form."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def streams_what_it_returns(self) -> Self:
        if self.stream and self.best_of is not None and self.best_of > self.n:
            raise ValueError("best_of chooses at the end, so it cannot be streamed; leave stream or best_of out")
        return self

    def default_settings(self, new_tokens: int, defaults: GenerationDefaults) -> GenerationSettings:
        """The publisher's sampling. A seed is drawn where none is given."""
        temperature = None if defaults.do_sample else 1.0
        fields = defaults.sampling_fields(temperature, seed=secrets.randbits(62))
        return GenerationSettings(new_tokens, SamplingConfig(**fields), grammar=self.text_grammar())

    def text_grammar(self) -> str | None:
        """The grammar that the text has to follow. Raises InputError for several."""
        grammars = [
            self.response_format.grammar() if self.response_format is not None else None,
            schema_grammar(self.guided_json) if self.guided_json is not None else None,
            regex_grammar(self.guided_regex) if self.guided_regex is not None else None,
            choice_grammar(self.guided_choice) if self.guided_choice is not None else None,
            lark_grammar(self.guided_grammar) if self.guided_grammar is not None else None,
        ]
        stated = [grammar for grammar in grammars if grammar is not None]
        if len(stated) > 1:
            raise InputError("the form of the text is given twice; give one of response_format and guided_*")
        return stated[0] if stated else None


class CompletionRequest(ApiRequest):
    """prompt: texts or token ids, one or several. echo: the text begins with the prompt."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @model_validator(mode="after")
    def has_some_prompts(self) -> Self:
        if not 0 < len(self.prompts) <= MAX_PROMPTS:
            raise ValueError(f"prompt has {len(self.prompts)} prompts; give 1 to {MAX_PROMPTS}")
        return self

    def generation_settings(self, defaults: GenerationDefaults) -> GenerationSettings:
        wants_prompt = self.echo and self.logprobs is not None
        return self.settings(self.default_settings(COMPLETION_TOKENS, defaults), wants_prompt)


class TextPart(Config):
    type: Literal["text"]
    text: str


class CalledFunction(Config):
    name: str
    arguments: str = "{}"


class MessageCall(Config):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Config):
    """content: a text, or parts of type text; absent where the assistant called tools. tool_call_id: of the call that
    a message of the role tool answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def absent_fields_are_left_out(cls, fields: Any) -> Any:
        """Clients send the fields of an answer back, such as refusal and audio, which are null."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value not in (None, [])}

    @model_validator(mode="after")
    def says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError(f"content: the message of the {self.role} has no content; give a text")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: arguments of calls as values, developers as the system."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        fields = {"role": role, "content": content, "name": self.name, "tool_call_id": self.tool_call_id}
        fields["reasoning_content"] = self.reasoning_content
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _value(call)}}
            for call in self.tool_calls or []
        ]
        return fields | ({"tool_calls": calls} if calls else {})


def _value(call: MessageCall) -> Any:
    try:
        return json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        return call.function.arguments


class ChatRequest(ApiRequest):
    """chat_template_kwargs: variables of the template, such as enable_thinking."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] = Field(default=[], max_length=128)
    tool_choice: Choice = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def logprobs_is_a_switch(cls, fields: Any) -> Any:
        """In chat logprobs is true or false, and top_logprobs the number."""
        if isinstance(fields, dict) and fields.get("logprobs") is not None:
            if not isinstance(fields["logprobs"], bool):
                raise ValueError("logprobs is true or false in chat; give the number as top_logprobs")
            count = fields.get("top_logprobs") or 0
            return {**fields, "logprobs": count if fields["logprobs"] else None}
        return fields

    @field_validator("tool_choice", mode="after")
    @classmethod
    def chooses_a_tool(cls, choice: Choice, info: Any) -> Choice:
        names = [tool.function.name for tool in info.data.get("tools", [])]
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise ValueError(f"no tool {choice.function.name!r}; tools has {names}")
        if choice == "required" and not names:
            raise ValueError("a tool is required, and tools is empty; give some")
        return choice

    @property
    def active_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools

    def template_tools(self) -> list[Mapping[str, Any]] | None:
        return [tool.model_dump(exclude_none=True) for tool in self.active_tools] or None

    def generation_settings(
        self, free_tokens: int, stops: tuple[str, ...], defaults: GenerationDefaults
    ) -> GenerationSettings:
        """free_tokens: those that the context has left. stops: of the chat template."""
        settings = self.settings(self.default_settings(self.max_completion_tokens or free_tokens, defaults))
        called = call_grammar(self.active_tools, self.tool_choice)
        if called is not None and settings.grammar is not None:
            raise InputError("a tool must be called and the text has a form; leave tool_choice or the form out")
        return replace(settings, stops=settings.stops + stops, grammar=called or settings.grammar)
