"""Bodies of the OpenAI API's requests, checked: /v1/completions and /v1/chat/completions.

Fields that gristmill does not implement are accepted with the value that changes nothing, and refused with another."""

import secrets
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from gristmill.evaluation.inference.config import SamplingConfig
from gristmill.evaluation.inference.generate.request import (
    MAX_TOP_LOGPROBS,
    Generation,
    GenerationSettings,
    RequestOptions,
    RequestResult,
    TokenLogprob,
)
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
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

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


# Replies of the OpenAI API: completions, chat completions and their streamed chunks.


class Vocabulary(Protocol):
    @property
    def pieces(self) -> tuple[str, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Replies:
    """The replies to one HTTP request, which have one id and one time."""

    def __init__(self, vocabulary: Vocabulary, model: str, chat: bool):
        self.vocabulary, self.model, self.chat = vocabulary, model, chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex[:24]}"
        self.created = int(time.time())

    def whole(self, results: Sequence[RequestResult], prompts: Sequence[Sequence[int]], echoes: Sequence[str]) -> Any:
        """echoes: the text before each prompt's completions; empty without echo."""
        choices: list[dict[str, Any]] = []
        for result, echo in zip(results, echoes, strict=True):
            for generation in result.generations:
                choices.append(self._choice(len(choices), generation, echo, result.prompt_logprobs))
        name = "chat.completion" if self.chat else "text_completion"
        return self._reply(name, choices) | {"usage": usage(results, prompts)}

    def piece(self, index: int, text: str, first: bool) -> Any:
        """A streamed piece of the choice with this index."""
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        content: dict[str, Any] = {"delta": delta} if self.chat else {"text": text}
        return self._chunk([{"index": index, **content, "logprobs": None, "finish_reason": None}])

    def end(self, index: int, generation: Generation, prompt_logprobs: Sequence[TokenLogprob] = ()) -> Any:
        """The last chunk of a choice: its finish reason, and the log-probabilities of all its tokens."""
        choice = self._choice(index, generation, "", prompt_logprobs)
        choice |= dict[str, Any](delta={}) if self.chat else {"text": ""}
        choice.pop("message", None)
        return self._chunk([choice])

    def stream_usage(self, results: Sequence[RequestResult], prompts: Sequence[Sequence[int]]) -> Any:
        return self._chunk([]) | {"usage": usage(results, prompts)}

    def _chunk(self, choices: list[Any]) -> Any:
        return self._reply("chat.completion.chunk" if self.chat else "text_completion", choices)

    def _reply(self, name: str, choices: list[Any]) -> Any:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    def _choice(
        self, index: int, generation: Generation, echo: str, prompt_logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        tokens = [*prompt_logprobs, *generation.logprobs]
        logprobs = None
        if tokens:
            logprobs = self._chat_logprobs(tokens) if self.chat else self._completion_logprobs(tokens)
        text = echo + generation.text
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason(generation)}

    def _completion_logprobs(self, tokens: Iterable[TokenLogprob]) -> Any:
        """Log-probabilities in columns. Of tokens with equal texts, such as halves of characters, top_logprobs has the
        likelier one."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = 0
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
        return columns

    def _chat_logprobs(self, tokens: Iterable[TokenLogprob]) -> Any:
        def described(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._text(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {
            "content": [
                {**described(scored.token, scored.logprob), "top_logprobs": [described(*pair) for pair in scored.top]}
                for scored in tokens
            ]
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
