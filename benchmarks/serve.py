"""A server under load: sampling over a large vocabulary, long prompts beside streams, and three loads by HTTP.

`sampling_128k`: tokens a CPU second of the sampler at a vocabulary of 131,072, beside transformers' processors and
torch.multinomial on the same logits (flat; `_peaked`: as a trained model's; temperature .8, top-p .95).

`prefill_stall`: the time between the tokens of sixteen streams while a prompt of 12,000 tokens is read, as a multiple
of the median without it, which grows with the streams: it is measured before and after, and between them by their
length. The 99th percentile; below 2 the prompt never doubles the time. In CPU seconds of the process.

`serve_mixed`, `serve_long`, `serve_shared`: tokens of requests by a real HTTP client (32 at a time) a CPU second of the
server's process, beside transformers.generate at its best cache and batch size on the same prompts, with equal tokens.
Times to the first token and between tokens at the 50th and 95th percentile, on the wall, are printed."""

import http.client
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generate import MODEL, VOCABULARY, Work, agree, best_peer, transformers_tokens
from measure import Figure, arguments, in_turn, print_figures
from transformers import AutoModelForCausalLM, TemperatureLogitsWarper, TopPLogitsWarper

from gristmill.evaluation.convert.huggingface import write_huggingface
from gristmill.evaluation.inference.config import EvaluateConfig, SamplingConfig
from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.generation_request import (
    GenerationRequest,
    GenerationSettings,
    RequestResult,
)
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.generate.sampler import RowChoice, choose_tokens
from gristmill.evaluation.inference.load_model import load_for_evaluation
from gristmill.evaluation.inference.server.generation_engine import GenerationEngine, Ticket
from gristmill.evaluation.inference.server.server import ServerOptions, serve
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.foundation.progress import Reporter
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer
from tokenizers import Tokenizer, models, pre_tokenizers

LARGE_VOCABULARY, SAMPLED_ROWS = 131_072, 8
LONG_PROMPT, STREAMS, ALONE_TOKENS = 12_000, 16, 100
CLIENTS = 32
CONTEXT = 16_384


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="*", default=None, help="names of figures (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    if _asked(options, "sampling_128k"):
        figures += sampling(rounds=2 if options.quick else 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        if _asked(options, "prefill_stall"):
            figures.append(prefill_stall(folder, 1500 if options.quick else LONG_PROMPT))
        if any(_asked(options, figure) for figure in ("serve_mixed", "serve_long", "serve_shared")):
            with running(folder) as server:
                figures += served(folder, server, options)
    print_figures(figures)


def _asked(options: Any, figure: str) -> bool:
    return options.only is None or figure in options.only


def sampling(rounds: int) -> list[Figure]:
    figures = []
    for name, scale in (("peaked", 4.0), ("flat", 1.0)):
        generator = torch.Generator().manual_seed(0)
        logits_BV = torch.randn(SAMPLED_ROWS, LARGE_VOCABULARY, generator=generator) * scale
        config = SamplingConfig(temperature=0.8, top_p=0.95)
        rows = [RowChoice(config, float(number)) for number in np.random.default_rng(0).random(SAMPLED_ROWS)]
        chain = [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.95)]
        ours, peer = partial(choose_tokens, logits_BV, rows), partial(_by_transformers, logits_BV, chain)
        our_seconds, peer_seconds, ratio = in_turn(ours, peer, rounds=rounds)
        figures.append(
            Figure(
                "sampling_128k" if name == "flat" else f"sampling_128k_{name}",
                SAMPLED_ROWS / our_seconds,
                "tokens/CPU s",
                SAMPLED_ROWS / peer_seconds,
                "transformers' processors",
                ratio=ratio,
                goal=1.0,
            )
        )
    return figures


def _by_transformers(logits_BV: torch.Tensor, chain: Sequence[Any]) -> torch.Tensor:
    scores = logits_BV.clone()
    for processor in chain:
        scores = processor(None, scores)
    return torch.multinomial(scores.softmax(dim=-1), 1)


def write_model(folder: Path) -> None:
    """A model of 6.8 million parameters with random weights, whose token i is the word wi."""
    config = ModelConfig(**{**MODEL.model_dump(exclude_defaults=True), "sequence_length": CONTEXT})
    model = Transformer(config, VOCABULARY)
    initialize(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w0"}))
    write_huggingface(folder, model, end_of_document=0)


@dataclass
class Stream:
    """One streamed completion: its words and when each piece came."""

    begun: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def tokens(self) -> list[int]:
        return [int(word[1:]) for word in self.text.split()]


@dataclass(frozen=True)
class Server:
    port: int
    process: int

    def cpu_seconds(self, function: Callable[[], list[Stream]]) -> tuple[float, list[Stream]]:
        """User and system seconds of the server's process while the function runs, and what it returns."""
        before = self._clock()
        streams = function()
        return self._clock() - before, streams

    def _clock(self) -> float:
        fields = Path(f"/proc/{self.process}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """A server of the model in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder, port))
    process.start()
    try:
        for _ in range(600):
            try:
                if _request(port, "GET", "/health").status == 200:
                    break
            except OSError:
                time.sleep(0.1)
        yield Server(port, process.pid or 0)
    finally:
        process.terminate()
        process.join()


def _serve(folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    options = ServerOptions(port=port, name="mill", sequences=CLIENTS, stop_seconds=0)
    serve(CheckpointPaths(folder), EvaluateConfig(), options, Reporter.silent())


def _request(port: int, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    content = None if body is None else json.dumps(body)
    connection.request(method, path, content, {"Content-Type": "application/json"})
    return connection.getresponse()


def complete(port: int, prompt: Sequence[int], count: int, stream: Stream | None = None) -> Stream:
    """Streams a greedy completion of so many tokens."""
    stream = stream or Stream()
    body = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "stream": True, "ignore_eos": True}
    for line in _request(port, "POST", "/v1/completions", body):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if text := event["choices"][0]["text"]:
            stream.times.append(time.perf_counter())
            stream.text += text
    return stream


def prefill_stall(folder: Path, length: int) -> Figure:
    """Streams run alone for a while, then a long prompt comes. The clock counts the process's CPU seconds, which others
    on the machine do not change."""
    loaded = load_for_evaluation(CheckpointPaths(folder), EvaluateConfig())
    limits = BatchLimits(STREAMS + 1)
    engine = GenerationEngine(
        lambda: ContinuousBatch(loaded.causal_lm, loaded.tokenizer, limits, time.process_time), 64
    )
    rng = np.random.default_rng(0)
    streams = [Stream() for _ in range(STREAMS)]
    ended = threading.Event()
    span: list[float] = []

    def prompt(size: int) -> tuple[int, ...]:
        return tuple(rng.integers(1, VOCABULARY, size).tolist())

    def finished(result: RequestResult) -> None:
        span.append(time.process_time())
        ended.set()

    settings = GenerationSettings(4000, ignore_end=True)
    tickets = [
        Ticket(GenerationRequest(prompt(32), settings), partial(_note, stream), lambda _: None) for stream in streams
    ]
    engine.start()
    engine.submit(tickets)
    _wait_for_tokens(streams, ALONE_TOKENS)
    span.append(time.process_time())
    engine.submit([Ticket(GenerationRequest(prompt(length), GenerationSettings(1)), None, finished)])
    ended.wait()
    _wait_for_tokens(streams, ALONE_TOKENS + min(len(stream.times) for stream in streams))
    engine.stop()
    begun, over = span
    gaps = [
        (number, moment, gap)
        for stream in streams
        for number, (moment, gap) in enumerate(zip(stream.times[1:], stream.gaps, strict=True))
    ]
    before = [(number, gap) for number, moment, gap in gaps if moment < begun]
    after = [(number, gap) for number, moment, gap in gaps if moment > over]
    (first, alone), (last, alone_after) = (np.median(part, axis=0) for part in (before, after))
    beside = [(number, gap) for number, moment, gap in gaps if begun <= moment <= over]
    slowdowns = [gap / np.interp(number, [first, last], [alone, alone_after]) for number, gap in beside]
    worst = float(np.percentile(slowdowns, 99))
    print(
        f"a prompt of {length} tokens, read in {over - begun:.1f} s: between tokens {1e3 * alone:.1f} ms before, "
        f"{1e3 * alone_after:.1f} after; beside it {statistics.median(slowdowns):.2f} times that at the same length"
        f" as the median, {worst:.2f} at the 99th percentile, {max(slowdowns):.2f} at most"
    )
    return Figure("prefill_stall", worst, "times", 2.0, "twice the median", 2.0 / worst, 1.0)


def _wait_for_tokens(streams: Sequence[Stream], number: int) -> None:
    while min(len(stream.times) for stream in streams) < number:
        time.sleep(0.02)


def _note(stream: Stream, candidate: int, text: str, logprobs: object) -> None:
    stream.times.append(time.process_time())


def loads_of(quick: bool, seed: int) -> list[Work]:
    """Three loads: mixed short, long prompts, many with one long beginning. seed: of the prompts alone, so that no
    prompt comes twice."""
    rng, sizes = np.random.default_rng([1, seed]), np.random.default_rng(1)
    requests = 32 if quick else 64

    def prompt(length: int) -> list[int]:
        return rng.integers(1, VOCABULARY, length).tolist()

    lengths = np.exp(sizes.uniform(np.log(8), np.log(256), (2, requests))).astype(int)
    begin = prompt(400 if quick else 800)
    new_tokens = np.exp(sizes.uniform(np.log(4), np.log(64), requests)).astype(int).tolist()
    long, short = sizes.integers(300, 900, requests), sizes.integers(4, 40, requests)
    return [
        Work("serve_mixed", [prompt(int(length)) for length in lengths[0]], lengths[1].tolist(), 2.5),
        Work("serve_long", [prompt(int(length)) for length in long], new_tokens, 2.0),
        Work("serve_shared", [begin + prompt(int(length)) for length in short], new_tokens, 4.0),
    ]


def served(folder: Path, server: Server, options: Any) -> list[Figure]:
    """The figures of the loads that were asked for. Each round has prompts of its own; before the first one the server
    and the peer have served a load of the same kind."""
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    peer.generation_config.eos_token_id = None
    peer.generation_config.pad_token_id = 0
    rounds = [loads_of(options.quick, seed) for seed in range(2 if options.quick else 3)]
    figures = []
    for warm_up, *measured in zip(*rounds, strict=True):
        if _asked(options, warm_up.figure):
            by_http(server.port, warm_up)
            cache, size = best_peer(warm_up, peer)
            pairs = [_pair(server, work, partial(transformers_tokens, peer, work, cache, size)) for work in measured]
            ours, theirs = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
            ratio = statistics.median(other / own for own, other in pairs)
            name, rates = f"transformers.generate, {cache} cache, batch size {size}", warm_up.tokens
            figures.append(
                Figure(warm_up.figure, rates / ours, "tokens/CPU s", rates / theirs, name, ratio, warm_up.goal)
            )
    return figures


def _pair(server: Server, work: Work, by_transformers: Callable[[], list[list[int]]]) -> tuple[float, float]:
    """CPU seconds of the server and of transformers. Raises AssertionError where a token differs."""
    own, streams = server.cpu_seconds(partial(by_http, server.port, work))
    begun = time.process_time()
    tokens = by_transformers()
    other = time.process_time() - begun
    agree([stream.tokens for stream in streams], tokens)
    first = np.percentile([stream.times[0] - stream.begun for stream in streams], [50, 95])
    gaps = 1e3 * np.percentile([gap for stream in streams for gap in stream.gaps], [50, 95])
    print(
        f"{work.figure}: first token {first[0]:.2f} s at p50, {first[1]:.2f} s at p95; between tokens {gaps[0]:.0f}, "
        f"{gaps[1]:.0f} ms; {own:.1f} s of the server's CPU, {other:.1f} s of transformers'"
    )
    return own, other


def by_http(port: int, work: Work) -> list[Stream]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(partial(complete, port), work.prompts, work.new_tokens))


if __name__ == "__main__":
    main()
