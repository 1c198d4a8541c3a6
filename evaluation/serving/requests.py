"""Bodies of the OpenAI API's requests, checked: /v1/completions and /v1/chat/completions.

Fields that gristmill does not implement are accepted with the value that changes nothing, and refused with another."""

import secrets
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gristmill.evaluation.config import SamplingConfig
from gristmill.evaluation.generation.options import MAX_TOP_LOGPROBS, RequestOptions
from gristmill.evaluation.generation.request import GenerationSettings
from gristmill.foundation.config import Config

MAX_PROMPTS = 1024
COMPLETION_TOKENS = 16  # OpenAI's default for completions; chat answers go on to the end of the context
NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}


class StreamOptions(Config):
    include_usage: bool = False


class ApiRequest(RequestOptions):
    """The fields that both endpoints have. temperature is 1 by default, as in OpenAI's API. user, store, metadata:
    taken and not used."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    store: bool | None = None
    metadata: Any = None

    @model_validator(mode="before")
    @classmethod
    def unsupported_fields_change_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            raise ValueError("the body is not a JSON object; send one with a prompt or messages")
        for name, neutral in NEUTRAL.items():
            if name in fields and fields[name] not in neutral:
                raise ValueError(f"{name} is not supported; leave it out")
        return {name: value for name, value in fields.items() if name not in NEUTRAL}

    @model_validator(mode="after")
    def streams_what_it_returns(self) -> Self:
        if self.stream and self.best_of is not None and self.best_of > self.n:
            raise ValueError("best_of chooses at the end, so it cannot be streamed; leave stream or best_of out")
        return self

    def default_settings(self, new_tokens: int) -> GenerationSettings:
        """A seed is drawn where none is given."""
        return GenerationSettings(new_tokens, SamplingConfig(temperature=1.0, seed=secrets.randbits(62)))


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
        return [each for each in self.prompt if not isinstance(each, int)]

    @model_validator(mode="after")
    def has_some_prompts(self) -> Self:
        if not 0 < len(self.prompts) <= MAX_PROMPTS:
            raise ValueError(f"prompt has {len(self.prompts)} prompts; give 1 to {MAX_PROMPTS}")
        return self

    def generation_settings(self) -> GenerationSettings:
        wants_prompt = self.echo and self.logprobs is not None
        return self.settings(self.default_settings(COMPLETION_TOKENS), wants_prompt)


class TextPart(Config):
    type: Literal["text"]
    text: str


class Message(Config):
    """content: a text, or parts of type text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(ApiRequest):
    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

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

    def generation_settings(self, room: int, stops: tuple[str, ...]) -> GenerationSettings:
        """room: tokens that the context has left. stops: of the chat template."""
        settings = self.settings(self.default_settings(self.max_completion_tokens or room))
        return GenerationSettings(**{**vars(settings), "stops": settings.stops + stops})
