"""Counters of a server in the text format of Prometheus."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gristmill.evaluation.inference.generate.slots import CacheUse

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
