"""Requests to the served model: their bodies, checked, what the engine answers, and the metrics of both."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from gristmill.evaluation.convert.chat_template import ChatTemplate
from gristmill.evaluation.convert.model_tokenizer import ModelTokenizer
from gristmill.evaluation.inference.generate.generation_request import GenerationRequest, RequestResult, TokenLogprob
from gristmill.evaluation.inference.generate.prompts import format_validation_error
from gristmill.evaluation.inference.generate.slots import CacheUse
from gristmill.evaluation.inference.server.generation_engine import GenerationEngine, Ticket
from gristmill.evaluation.inference.server.openai_api import known_fields
from gristmill.foundation.startup import without_garbage_collection

# Counters of a server in the text format of Prometheus.

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class CacheMetrics:
    """The use of the cache, as it is when it is asked for."""

    def __init__(self, cache_use: Callable[[], CacheUse]):
        self._cache_use = cache_use

    def collect(self) -> Iterator[Metric]:
        use = self._cache_use()
        yield GaugeMetricFamily("gristmill_cache_blocks_used", "Blocks of 16 tokens in the cache.", use.used_blocks)
        if use.max_blocks is not None:
            yield GaugeMetricFamily("gristmill_cache_blocks_limit", "Blocks that the cache may have.", use.max_blocks)
        text = "Blocks of kept prefixes that made room."
        yield CounterMetricFamily("gristmill_cache_blocks_evicted", text, use.evicted_blocks)
        text = "Sequences that lost their cache, to be read again."
        yield CounterMetricFamily("gristmill_preemptions", text, use.preemptions)


class ServerMetrics:
    """Metrics of one server, in a registry of its own. requests: of the engine, that run or wait now."""

    def __init__(self, requests: Callable[[], int], cache_use: Callable[[], CacheUse]):
        self.registry = CollectorRegistry()
        self.registry.register(CacheMetrics(cache_use))
        open_requests = Gauge("gristmill_requests_open", "Requests that run or wait.", registry=self.registry)
        open_requests.set_function(requests)
        self.replies = Counter(
            "gristmill_replies", "Replies by path and HTTP status.", ["path", "status"], registry=self.registry
        )
        self.prompt_tokens = Counter("gristmill_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.new_tokens = Counter("gristmill_generated_tokens", "Tokens generated.", registry=self.registry)
        self.first_token = self._histogram("gristmill_time_to_first_token_seconds", "Until a request's first token.")
        self.between = self._histogram("gristmill_time_between_pieces_seconds", "Between pieces of streamed text.")
        self.whole = self._histogram("gristmill_request_seconds", "Until a request's last token.")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self.registry)

    def text(self) -> bytes:
        return bytes(generate_latest(self.registry))

    def request(self, prompt_tokens: int) -> "RequestTimes":
        self.prompt_tokens.inc(prompt_tokens)
        return RequestTimes(self)


@dataclass
class RequestTimes:
    """Times of one request's pieces."""

    metrics: ServerMetrics
    begun: float = field(default_factory=time.perf_counter)
    last: float | None = None

    def piece(self) -> None:
        now = time.perf_counter()
        if self.last is None:
            self.metrics.first_token.observe(now - self.begun)
        else:
            self.metrics.between.observe(now - self.last)
        self.last = now

    def end(self, new_tokens: int) -> None:
        self.metrics.new_tokens.inc(new_tokens)
        self.metrics.whole.observe(time.perf_counter() - self.begun)


MAX_BODY_BYTES = 16 << 20
POLL_SECONDS = 0.25  # between looks at whether the client is still there
IGNORED_HEADER = "X-Gristmill-Ignored-Fields"
FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ServedModel:
    """name: by which requests name it. token: that requests must carry; None: no one needs one. origins: of pages of
    other sites that may ask."""

    name: str
    engine: GenerationEngine
    tokenizer: ModelTokenizer
    template: ChatTemplate
    token: str | None = None
    origins: tuple[str, ...] = ()

    @cached_property
    def metrics(self) -> ServerMetrics:
        return ServerMetrics(lambda: self.engine.requests, lambda: self.engine.cache_use)

    @cached_property
    def outbox(self) -> "Outbox":
        outbox = Outbox()
        self.engine.after_pass = outbox.send
        return outbox

    @property
    def sequence_length(self) -> int:
        return self.engine.sequence_length

    def encode_prompt(self, prompt: str | list[int]) -> list[int]:
        """A text begins as in `gristmill generate`; ids are taken as they are."""
        return self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt


class HttpError(Exception):
    """A reply that is no answer. kind, code: of the error's body."""

    def __init__(self, status: int, message: str, code: str | None = None, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.code, self.kind = status, code, kind


async def read_body(request: Request) -> Any:
    """The request's JSON. Raises HttpError for one that is too large, too slow or none."""
    content = bytearray()
    try:
        async with asyncio.timeout(request.app.state.body_seconds):
            async for part in request.stream():
                content += part
                if len(content) > MAX_BODY_BYTES:
                    raise HttpError(413, f"the body is larger than {MAX_BODY_BYTES} bytes; send less at once")
    except TimeoutError:
        seconds = request.app.state.body_seconds
        raise HttpError(408, f"the body did not arrive within {seconds:g} seconds; send it again") from None
    try:
        return await asyncio.to_thread(_parsed, content)  # 16 MB take 0.2 s, in which streams would wait
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON ({str(error)[:100]}); send a JSON object") from error


def _parsed(content: bytes | bytearray) -> Any:
    with without_garbage_collection():  # at the recursion limit the finalizers of other objects would fail
        return json.loads(content)


def checked(model: ServedModel, kind: type[Any], body: Any) -> tuple[Any, list[str]]:
    """(the request, names of the body's fields that are ignored)."""
    try:
        body, ignored = known_fields(kind, body)
        fields = kind.model_validate(body)
    except ValidationError as error:
        raise HttpError(400, format_validation_error(error, kind)) from error
    except ValueError as error:
        raise HttpError(400, str(error)) from error
    if fields.model not in (None, model.name):
        raise HttpError(404, f"no model {fields.model!r}; this server has {model.name!r}", "model_not_found")
    return fields, ignored


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names fields which were not used."""
    plain = [name for name in names if FIELD_NAME.fullmatch(name)]
    return {IGNORED_HEADER: ", ".join(plain[:20])} if plain else {}


async def chat_prompt(
    model: ServedModel,
    messages: list[dict[str, Any]],
    tools: list[Mapping[str, Any]] | None,
    variables: dict[str, Any],
) -> tuple[list[int], int]:
    """(token ids of a conversation, tokens that the context has left)."""
    text = await asyncio.to_thread(model.template.render, messages, tools, variables)
    prompt = await asyncio.to_thread(model.tokenizer.encode_chat, text, model.template)
    free_tokens = model.sequence_length - len(prompt)
    if free_tokens <= 0:
        raise HttpError(
            400, f"the messages have {len(prompt)} tokens; this server takes {model.sequence_length - 1}: shorten them"
        )
    return prompt, free_tokens


async def completed(model: ServedModel, request: Request, requests: Sequence[GenerationRequest]) -> list[RequestResult]:
    """The results of all requests. Raises ClientDisconnect once the client has gone, and HttpError for one that
    failed."""
    futures = [asyncio.get_running_loop().create_future() for _ in requests]

    def finish(index: int, result: Any) -> None:
        if not futures[index].done():
            futures[index].set_result(result)

    tickets = submitted(model, requests, finish, streams=False)
    waiting = asyncio.gather(*futures)
    try:
        while not (await asyncio.wait({waiting}, timeout=POLL_SECONDS))[0]:
            if await request.is_disconnected():
                raise ClientDisconnect
    finally:
        model.engine.cancel(tickets)
    results: list[RequestResult] = waiting.result()
    error = next((result.error for result in results if result.error is not None), None)
    if error is not None:
        raise HttpError(500, str(error), kind="server_error")
    return results


class StreamEvents:
    """Events of one streamed reply, which its task takes all at once: several may have come while it waited."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, Any]] = []
        self._arrived = asyncio.Event()

    def put(self, index: int, event: Any) -> None:
        """index: of the prompt; event: a piece or the result."""
        self.pending.append((index, event))
        self._arrived.set()

    async def take(self) -> list[tuple[int, Any]]:
        await self._arrived.wait()
        self._arrived.clear()
        events, self.pending = self.pending, []
        return events


Delivery = tuple[Callable[[int, Any], None], int, Any]


class Outbox:
    """Deliveries of the engine's thread to the event loops, handed over once a step: each hand-over wakes a loop."""

    def __init__(self) -> None:
        self._deliveries: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}

    def put(self, loop: asyncio.AbstractEventLoop, delivery: Delivery) -> None:
        self._deliveries.setdefault(loop, []).append(delivery)

    def send(self) -> None:
        deliveries, self._deliveries = self._deliveries, {}
        for loop, events in deliveries.items():
            with suppress(RuntimeError):  # the loop was closed, so nobody waits
                loop.call_soon_threadsafe(_deliver, events)


def _deliver(deliveries: list[Delivery]) -> None:
    for deliver, index, event in deliveries:
        deliver(index, event)


def submitted(
    model: ServedModel, requests: Sequence[GenerationRequest], deliver: Callable[[int, Any], None], streams: bool
) -> list[Ticket]:
    """Submits the requests; deliver is called in the event loop with (prompt, piece or result)."""
    loop, outbox = asyncio.get_running_loop(), model.outbox
    times = [model.metrics.request(len(request.prompt)) for request in requests]

    def piece(index: int, candidate: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        times[index].piece()
        outbox.put(loop, (deliver, index, (candidate, text, logprobs)))

    def done(index: int, result: RequestResult) -> None:
        _end_times(times[index], result)
        outbox.put(loop, (deliver, index, result))

    tickets = [
        Ticket(request, partial(piece, index) if streams else None, partial(done, index))
        for index, request in enumerate(requests)
    ]
    model.engine.submit(tickets)
    return tickets


def _end_times(times: RequestTimes, result: RequestResult) -> None:
    times.end(sum(len(generation.tokens) for generation in result.generations))


def server_event(content: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    data = b"data: " + orjson.dumps(content) + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data
