"""`POST /v1/responses`: OpenAI's Responses API for texts. Nothing is stored: each request has its whole conversation.

Fields that would change the answer and are not implemented, such as tools, are refused."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from gristmill.evaluation.convert.model_tokenizer import GenerationDefaults
from gristmill.evaluation.inference.generate.generation_request import Generation, GenerationRequest, GenerationSettings
from gristmill.evaluation.inference.generate.structured import schema_grammar
from gristmill.evaluation.inference.server.model_calls import (
    ServedModel,
    StreamEvents,
    chat_prompt,
    checked,
    completed,
    ignored_header,
    read_body,
    server_event,
    submitted,
)
from gristmill.evaluation.inference.server.openai_api import ApiRequest
from gristmill.evaluation.inference.server.replies import ANY_OBJECT
from gristmill.foundation.config import Config


class InputText(Config):
    """A text of the user, or of an answer that is sent back."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Config):
    """id, status: of an answer that is sent back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: list[InputText]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def a_text_is_one_part(cls, content: Any) -> Any:
        return [{"type": "input_text", "text": content}] if isinstance(content, str) else content

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}


class TextFormat(Config):
    """strict: taken and not used; the schema is always kept to."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Config):
    format: TextFormat = TextFormat()
    verbosity: str | None = None


class ResponseRequest(ApiRequest):
    """input: a text of the user, or messages. instructions: the system's message before them."""

    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        "previous_response_id": (None,),
        "conversation": (None,),
        "prompt": (None,),
        "background": (None, False),
        "truncation": (None, "disabled"),
        "include": (None, []),
        "tools": (None, []),
        "tool_choice": (None, "auto", "none"),
        "max_tool_calls": (None,),
        "top_logprobs": (None, 0),
        **{name: (None, 1) for name in ("n", "best_of")},
        **{name: (None,) for name in ("logprobs", "response_format", "max_tokens")},
    }

    input: list[InputMessage] = Field(min_length=1, max_length=4096)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    text: TextOptions = TextOptions()
    metadata: dict[str, str] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def a_text_is_one_message(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @property
    def messages(self) -> list[dict[str, Any]]:
        before = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*before, *(message.for_template() for message in self.input)]

    def text_grammar(self) -> str | None:
        if self.text.format.type == "text":
            return super().text_grammar()
        return schema_grammar(ANY_OBJECT if self.text.format.schema_ is None else self.text.format.schema_)

    def generation_settings(
        self, free_tokens: int, stops: tuple[str, ...], defaults: GenerationDefaults
    ) -> GenerationSettings:
        """free_tokens: those that the context has left. stops: of the chat template."""
        settings = self.settings(self.default_settings(self.max_output_tokens or free_tokens, defaults))
        return replace(settings, stops=settings.stops + stops)


@dataclass
class ResponseBody:
    """The object `response` of one request, as it is before, while and after the text is generated."""

    model: str
    fields: ResponseRequest
    request: GenerationRequest
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    item_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, status: str, generation: Generation | None = None, error: str | None = None) -> dict[str, Any]:
        """generation: None while there is none."""
        sampling, incomplete = self.request.settings.sampling, status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "instructions": self.fields.instructions,
            "max_output_tokens": self.fields.max_output_tokens,
            "metadata": self.fields.metadata or {},
            "model": self.model,
            "output": [] if generation is None else [self.message(status, generation.text)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": self.fields.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "truncation": "disabled",
            "usage": None if generation is None else self._usage(generation),
        }

    def finished(self, generation: Generation) -> dict[str, Any]:
        return self.of("incomplete" if generation.ended == "length" else "completed", generation)

    def message(self, status: str, text: str | None) -> dict[str, Any]:
        """The answer. text: None before it begins."""
        content = [] if text is None else [text_part(text)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _usage(self, generation: Generation) -> dict[str, Any]:
        prompt_tokens, new_tokens = len(self.request.prompt), len(generation.tokens)
        return {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": new_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + new_tokens,
        }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def respond(model: ServedModel, request: Request) -> Response:
    stated: tuple[ResponseRequest, list[str]] = checked(model, ResponseRequest, await read_body(request))
    fields, ignored = stated
    prompt, free_tokens = await chat_prompt(model, fields.messages, None, {})
    settings = await asyncio.to_thread(
        fields.generation_settings, free_tokens, model.template.stops, model.tokenizer.generation
    )
    body = ResponseBody(model.name, fields, GenerationRequest(tuple(prompt), settings))
    headers = ignored_header(ignored)
    if fields.stream:
        events = StreamEvents()
        tickets = submitted(model, [body.request], events.put, streams=True)
        stream = _numbered(_events(body, events))

        async def stream_until_gone() -> AsyncIterator[bytes]:
            try:
                async for event in stream:
                    yield event
            finally:
                model.engine.cancel(tickets)

        return StreamingResponse(stream_until_gone(), media_type="text/event-stream", headers=headers)
    (result,) = await completed(model, request, [body.request])
    return JSONResponse(body.finished(result.generations[0]), headers=headers)


async def _events(body: ResponseBody, events: StreamEvents) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed response, in the order of OpenAI's."""
    item = {"output_index": 0, "item_id": body.item_id}
    part = {**item, "content_index": 0}
    for name in ("created", "in_progress"):
        yield {"type": f"response.{name}", "response": body.of("in_progress")}
    yield {"type": "response.output_item.added", "output_index": 0, "item": body.message("in_progress", None)}
    yield {"type": "response.content_part.added", **part, "part": text_part("")}
    result = None
    while result is None:
        for _, event in await events.take():
            if isinstance(event, tuple):
                yield {"type": "response.output_text.delta", **part, "delta": event[1], "logprobs": []}
            else:
                result = event
    if result.error is not None:
        yield {"type": "response.failed", "response": body.of("failed", error=str(result.error))}
        return
    response = body.finished(result.generations[0])
    text = result.generations[0].text
    yield {"type": "response.output_text.done", **part, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **part, "part": text_part(text)}
    yield {"type": "response.output_item.done", "output_index": 0, "item": response["output"][0]}
    yield {"type": f"response.{response['status']}", "response": response}


async def _numbered(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    number = 0
    async for event in events:
        yield server_event({**event, "sequence_number": number}, event["type"])
        number += 1
