"""The OpenAI-compatible HTTP application of one model, with the embeddings of texts."""

import asyncio
import base64
import hmac
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from pydantic import field_validator, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gristmill.evaluation.inference.generate.generation_request import (
    GenerationRequest,
    GenerationSettings,
    RequestResult,
)
from gristmill.evaluation.inference.server import chat_page
from gristmill.evaluation.inference.server.generation_engine import ServerBusyError, Ticket
from gristmill.evaluation.inference.server.model_calls import (
    IGNORED_HEADER,
    HttpError,
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
from gristmill.evaluation.inference.server.openai_api import (
    MAX_PROMPTS,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    RequestBody,
)
from gristmill.evaluation.inference.server.replies import Replies, error_body, read_calls
from gristmill.evaluation.inference.server.responses import respond
from gristmill.foundation.errors import InputError

BODY_SECONDS = 30.0
LOOPBACK_NAMES = frozenset(["localhost", "127.0.0.1", "[::1]"])
CLIENT_GONE = 499  # nginx's status for a client that closed the connection


@dataclass(frozen=True)
class _Call:
    """One checked request: its prompts, what each is continued with, and the text before the completions.

    begin_tokens: special tokens that were put before each text. ignored: names of fields that are not used. whole: a
    choice is streamed as one piece, since its text may be tool calls."""

    fields: ApiRequest
    requests: list[GenerationRequest]
    echoes: list[str]
    replies: Replies
    begin_tokens: int = 0
    ignored: Sequence[str] = ()
    whole: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return ignored_header(self.ignored)


def make_app(model: ServedModel, body_seconds: float = BODY_SECONDS) -> Starlette:
    """body_seconds: in which the body of a request has to arrive."""
    routes = [
        Route("/", _static(model, chat_page.PAGE, "text/html")),
        Route("/chat.css", _static(model, chat_page.STYLE, "text/css")),
        Route("/chat.js", _static(model, chat_page.SCRIPT, "text/javascript")),
        Route("/health", _handler(model, _health, needs_token=False)),
        Route("/metrics", _handler(model, _metrics)),
        Route("/v1/models", _handler(model, _models)),
        Route("/v1/models/{name:path}", _handler(model, _model)),
        Route("/v1/completions", _handler(model, _completions), methods=["POST"]),
        Route("/v1/chat/completions", _handler(model, _chat), methods=["POST"]),
        Route("/v1/responses", _handler(model, respond), methods=["POST"]),
        Route("/v1/embeddings", _handler(model, embed), methods=["POST"]),
        Route("/tokenizer_info", _handler(model, _tokenizer_info)),
        Route("/tokenize", _handler(model, _tokenize), methods=["POST"]),
        Route("/detokenize", _handler(model, _detokenize), methods=["POST"]),
    ]
    middleware = []
    if model.origins:
        methods, headers = ["GET", "POST"], ["Authorization", "Content-Type"]
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=model.origins,
                allow_methods=methods,
                allow_headers=headers,
                expose_headers=[IGNORED_HEADER],
            )
        )
    handlers: Any = {HTTPException: _http_error, Exception: _server_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.state.body_seconds = body_seconds
    return app


async def _http_error(request: Request, error: Any) -> Response:
    """An error of the framework, such as a path that is none, in the API's form."""
    hints = {404: f"no path {request.url.path}; see / for a page, /v1/models for the API", 405: "use another method"}
    message = hints.get(error.status_code, str(error.detail))
    return JSONResponse(error_body(message), error.status_code, error.headers)


async def _server_error(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(f"the server failed ({type(error).__name__})", "server_error"), 500)


def _handler(
    model: ServedModel, answer: Callable[[ServedModel, Request], Any], needs_token: bool = True
) -> Callable[[Request], Any]:
    """An endpoint whose errors are those of the API, behind the token."""

    async def handle(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if needs_token and model.token is not None and not hmac.compare_digest(given, f"Bearer {model.token}".encode()):
            body = error_body(
                "the token is absent or wrong; send `Authorization: Bearer TOKEN`", "authentication_error"
            )
            return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        reply = await answer_with_errors(request)
        model.metrics.replies.labels(request.scope["route"].path, str(reply.status_code)).inc()
        return reply

    async def answer_with_errors(request: Request) -> Response:
        try:
            _refuse_other_sites(model, request)
            answered: Response = await answer(model, request)
            return answered
        except HttpError as error:
            return JSONResponse(error_body(str(error), error.kind, error.code), error.status)
        except InputError as error:
            return JSONResponse(error_body(str(error)), 400)
        except ServerBusyError as error:
            return JSONResponse(error_body(str(error), "server_busy"), 429, {"Retry-After": "1"})
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)

    return handle


def _static(model: ServedModel, content: str, media_type: str) -> Callable[[Request], Any]:
    """A file of the page that talks to the model. It needs no token: it holds no secret, and its requests need one."""

    async def answer(model: ServedModel, request: Request) -> Response:
        return Response(content, media_type=media_type, headers=chat_page.HEADERS)

    return _handler(model, answer, needs_token=False)


def _refuse_other_sites(model: ServedModel, request: Request) -> None:
    """Raises HttpError for what a page of another site makes a browser send.

    Without a token the server listens on loopback only, so every name in `Host` that is no loopback name is one that a
    page let point here (DNS rebinding). A body that is no JSON is what a form may send without the browser asking."""
    headers = request.headers
    if model.token is None:
        for name in ("host", "origin"):
            value = headers.get(name, "localhost").rpartition("//")[2]
            if name == "origin" and headers.get(name) in model.origins:
                continue
            host = value if value.endswith("]") else re.sub(r":[0-9]*$", "", value)
            if host.lower() not in LOOPBACK_NAMES:
                raise HttpError(
                    403,
                    f"the header {name} names {value[:100]!r}; use localhost, or set a token in GRISTMILL_API_TOKEN",
                )
        is_allowed = headers.get("origin") in model.origins
        if not is_allowed and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise HttpError(403, "a page of another site sent this; set a token in GRISTMILL_API_TOKEN")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json":
        raise HttpError(415, f"the content type is {kind[:100]!r}; send `Content-Type: application/json`")


async def _health(model: ServedModel, request: Request) -> Response:
    """Needs no token. 503 once generation has ended."""
    status = "ok" if model.engine.is_running else "stopped"
    return JSONResponse({"status": status, "requests": model.engine.requests}, 200 if status == "ok" else 503)


async def _metrics(model: ServedModel, request: Request) -> Response:
    return Response(model.metrics.text(), media_type="text/plain; version=0.0.4")


async def _models(model: ServedModel, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_description(model)]})


async def _model(model: ServedModel, request: Request) -> Response:
    name = request.path_params["name"]
    if name != model.name:
        raise HttpError(404, f"no model {name!r}; this server has {model.name!r}", "model_not_found")
    return JSONResponse(_description(model))


def _description(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "gristmill",
        "max_model_len": model.sequence_length,
    }


async def _completions(model: ServedModel, request: Request) -> Response:
    stated: tuple[CompletionRequest, list[str]] = checked(model, CompletionRequest, await read_body(request))
    fields, ignored = stated
    settings = await asyncio.to_thread(fields.generation_settings, model.tokenizer.generation)
    prompts = await asyncio.to_thread(lambda: [model.encode_prompt(prompt) for prompt in fields.prompts])
    requests = [GenerationRequest(tuple(prompt), settings, index) for index, prompt in enumerate(prompts)]
    echoes = [""] * len(prompts)
    if fields.echo:
        echoes = [prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt) for prompt in fields.prompts]
    replies, begin_tokens = Replies(model.tokenizer, model.name, False), len(model.tokenizer.prompt_prefix)
    return await _answered(model, request, _Call(fields, requests, echoes, replies, begin_tokens, ignored))


async def _chat(model: ServedModel, request: Request) -> Response:
    request_fields: tuple[ChatRequest, list[str]] = checked(model, ChatRequest, await read_body(request))
    fields, ignored = request_fields
    tools = fields.active_tools
    # A tool that must be called is in the grammar, which needs no template that knows tools.
    stated = None if model.template.is_plain and fields.tool_choice != "auto" else fields.template_tools()
    messages = [message.for_template() for message in fields.messages]
    prompt, free_tokens = await chat_prompt(model, messages, stated, fields.chat_template_kwargs)
    settings = await asyncio.to_thread(
        fields.generation_settings, free_tokens, model.template.stops, model.tokenizer.generation
    )
    requests = [GenerationRequest(tuple(prompt), settings)]
    reads = partial(read_calls, tools=tools, choice=fields.tool_choice) if tools else None
    replies = Replies(model.tokenizer, model.name, True, reads)
    return await _answered(model, request, _Call(fields, requests, [""], replies, 0, ignored, bool(tools)))


async def _answered(model: ServedModel, request: Request, call: _Call) -> Response:
    if call.fields.stream:
        events = StreamEvents()
        tickets = submitted(model, call.requests, events.put, streams=True)
        stream = _stream(model, call, tickets, events)
        return StreamingResponse(stream, media_type="text/event-stream", headers=call.headers)
    results = await completed(model, request, call.requests)
    prompts = [prompt_request.prompt for prompt_request in call.requests]
    whole = call.replies.whole(_without_begin(call, results), prompts, call.echoes)
    return JSONResponse(whole, headers=call.headers)


def _without_begin(call: _Call, results: Sequence[RequestResult]) -> list[RequestResult]:
    """Results without the log-probabilities of the special tokens that were put before a text."""
    texts = isinstance(call.fields, CompletionRequest) and isinstance(call.fields.prompts[0], str)
    begin = call.begin_tokens if texts else 0
    return [RequestResult(result.number, result.generations, result.prompt_logprobs[begin:]) for result in results]


async def _stream(model: ServedModel, call: _Call, tickets: list[Ticket], events: StreamEvents) -> AsyncIterator[bytes]:
    """Server-sent events, those of one step in one piece. A client that goes away ends this generator, and its requests
    leave the batch."""
    count, replies = call.fields.n, call.replies
    results: dict[int, RequestResult] = {}
    options = call.fields.stream_options
    replies.reports_usage = options is not None and options.include_usage
    failed = False
    try:
        choices = [choice for index, echo in enumerate(call.echoes) if echo for choice in _choices(index, count)]
        if choices:
            yield b"".join(server_event(replies.piece(choice, call.echoes[choice // count])) for choice in choices)
        while len(results) < len(tickets) and not failed:
            chunks: list[bytes] = []
            for index, event in await events.take():
                if isinstance(event, tuple):
                    candidate, text, logprobs = event
                    if not call.whole:
                        chunks.append(server_event(replies.piece(index * count + candidate, text, logprobs)))
                    continue
                if event.error is not None:
                    chunks.append(server_event(error_body(str(event.error), "server_error")))
                    failed = True
                    break
                (results[index],) = _without_begin(call, [event])
                for choice, generation in zip(_choices(index, count), event.generations, strict=True):
                    scored = results[index].prompt_logprobs
                    chunks.append(server_event(replies.end(choice, generation, scored, call.whole)))
            if failed or len(results) == len(tickets):
                if replies.reports_usage and not failed:
                    prompts = [request.prompt for request in call.requests]
                    usage = replies.stream_usage([results[index] for index in range(len(tickets))], prompts)
                    chunks.append(server_event(usage))
                chunks.append(b"data: [DONE]\n\n")
            if chunks:
                yield b"".join(chunks)
    finally:
        model.engine.cancel(tickets)


def _choices(index: int, count: int) -> range:
    """Numbers of the choices of a prompt."""
    return range(index * count, (index + 1) * count)


async def _tokenizer_info(model: ServedModel, request: Request) -> Response:
    """Answer to lm-eval's remote tokenizer."""
    end, begin = (
        model.tokenizer.pieces[token] for token in (model.tokenizer.end_of_document, model.tokenizer.prefix_token)
    )
    return JSONResponse(
        {"eos_token": end, "bos_token": begin, "pad_token": end, "vocab_size": model.tokenizer.vocab_size}
    )


async def _tokenize(model: ServedModel, request: Request) -> Response:
    body = await read_body(request)
    text = body.get("prompt") if isinstance(body, dict) else None
    if not isinstance(text, str):
        raise HttpError(400, "prompt is no text; send {'prompt': TEXT}")
    tokens = await asyncio.to_thread(model.tokenizer.encode_with_symbols, text)
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": model.sequence_length})


async def _detokenize(model: ServedModel, request: Request) -> Response:
    body = await read_body(request)
    tokens = body.get("tokens") if isinstance(body, dict) else None
    size = model.tokenizer.vocab_size
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < size for token in tokens):
        raise HttpError(400, f"tokens is no list of ids from 0 to {size - 1}; send {{'tokens': [...]}}")
    return JSONResponse({"prompt": await asyncio.to_thread(model.tokenizer.decode, tokens)})


# `POST /v1/embeddings`: final hidden states of texts, pooled over their tokens.


class EmbeddingRequest(RequestBody):
    """input: texts or token ids, one or several. dimensions: those of the model, if given. pooling: mean of the hidden
    states of all tokens, or that of the last. normalize: to length 1, as OpenAI's are."""

    input: list[str | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True

    @field_validator("input", mode="before")
    @classmethod
    def one_input_is_a_list(cls, value: Any) -> Any:
        is_one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
        return [value] if is_one else value

    @model_validator(mode="after")
    def has_some_inputs(self) -> Self:
        if not 0 < len(self.input) <= MAX_PROMPTS:
            raise ValueError(f"input has {len(self.input)} texts; give 1 to {MAX_PROMPTS}")
        return self


async def embed(model: ServedModel, request: Request) -> Response:
    stated: tuple[EmbeddingRequest, list[str]] = checked(model, EmbeddingRequest, await read_body(request))
    fields, ignored = stated
    width = model.engine.embedding_width
    if width is None:
        raise HttpError(400, f"{model.name} runs in transformers' code, which gives no hidden states; serve another")
    if fields.dimensions not in (None, width):
        raise HttpError(400, f"dimensions is {fields.dimensions}; this model's embeddings have {width}: leave it out")
    prompts = await asyncio.to_thread(lambda: [model.encode_prompt(text) for text in fields.input])
    settings = GenerationSettings(0, pooling=fields.pooling)
    results = await completed(model, request, [GenerationRequest(tuple(prompt), settings) for prompt in prompts])
    vectors = [result.embedding for result in results if result.embedding is not None]
    entries = [
        {"object": "embedding", "index": index, "embedding": encoded(vector_D, fields)}
        for index, vector_D in enumerate(vectors)
    ]
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    body = {"object": "list", "data": entries, "model": model.name, "usage": usage}
    return JSONResponse(body, headers=ignored_header(ignored))


def encoded(vector_D: np.ndarray, fields: EmbeddingRequest) -> str | list[float]:
    """base64: of little-endian float32."""
    if fields.normalize:
        vector_D = vector_D / max(float(np.linalg.norm(vector_D)), np.finfo(np.float32).tiny)
    vector_D = vector_D.astype("<f4")
    return base64.b64encode(vector_D.tobytes()).decode() if fields.encoding_format == "base64" else vector_D.tolist()
