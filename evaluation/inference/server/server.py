"""Start the server: the port first, then the model, then the application."""

import signal
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.limits import BatchLimits, default_limits
from gristmill.evaluation.inference.load_model import (
    NO_OTHER_RANKS,
    LoadedModel,
    Ranks,
    load_drafting,
    one_model_on_ranks,
)
from gristmill.evaluation.inference.server.app import ServedModel, make_app
from gristmill.evaluation.inference.server.generation_engine import GenerationEngine, announcer, follow
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.listener import bound, is_loopback


@dataclass(frozen=True)
class ServerOptions:
    """token: that requests must carry. name: of the model in requests; None: the checkpoint's. sequences: of the
    running batch; None: by device. cache_bytes: of keys and values on each rank; None: half of the free memory.
    max_requests: that run or wait; more are refused with status 429. stop_seconds: that requests have to end after the
    server was told to stop; then their streams end with an error. origins: of pages of other sites that may ask, such
    as https://chat.example."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    name: str | None = None
    template: Path | None = None
    sequences: int | None = None
    cache_bytes: int | None = None
    max_requests: int = 1024
    stop_seconds: int = 30
    origins: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises RecipeError for a host that others reach without a token."""
        if self.token is None and not is_loopback(self.host):
            raise RecipeError(
                f"--host {self.host} is reached by other machines; set a token in GRISTMILL_API_TOKEN, or serve on "
                "127.0.0.1"
            )
        if self.token is not None and not (self.token.isascii() and self.token.split() == [self.token]):
            raise RecipeError("the token is empty or has spaces or letters beyond ASCII; choose another")


def serve(
    source: CheckpointPaths,
    config: EvaluateConfig,
    options: ServerOptions,
    reporter: Reporter,
    ranks: Ranks = NO_OTHER_RANKS,
) -> None:
    """Serves until SIGTERM or Ctrl-C; then no request is accepted, and those that run may end. The first of several
    ranks listens, and the others do what it tells them.

    Raises InputError or RecipeError before the model is loaded where the port or the token cannot be used, and
    InputError when another rank is lost."""
    options.check()
    with ExitStack() as stack:
        is_first = ranks.rank.rank == 0
        listener = stack.enter_context(bound(options.host, options.port)) if is_first else None
        loaded, mesh = stack.enter_context(one_model_on_ranks(source, config, ranks))
        drafting = load_drafting(ranks.drafts, loaded, ranks.rank.world_size)
        limits = default_limits(loaded.causal_lm, options.sequences, drafting, options.cache_bytes, mesh.world)
        if listener is None:
            follow(lambda: new_batch(loaded, limits), mesh.world)
            return
        template = loaded.tokenizer.chat_template(options.template)
        engine = GenerationEngine(lambda: new_batch(loaded, limits), options.max_requests, announcer(mesh.world))
        model = ServedModel(
            options.name or loaded.name, engine, loaded.tokenizer, template, options.token, options.origins
        )
        host, port = listener.getsockname()[:2]
        for note in filter(None, (loaded.note, loaded.memory_note)):
            reporter.info(note)
        reporter.info(f"serving {model.name} at http://{host}:{port}/v1")
        run(model, listener, options.stop_seconds)


def new_batch(loaded: LoadedModel, limits: BatchLimits) -> ContinuousBatch:
    return ContinuousBatch(loaded.causal_lm, loaded.tokenizer, limits)


def run(model: ServedModel, listener: socket.socket, stop_seconds: int) -> None:
    """Runs the application on a bound socket until a signal stops it; returns afterwards."""
    settings = uvicorn.Config(
        make_app(model),
        log_level="warning",
        timeout_graceful_shutdown=stop_seconds + ERROR_SECONDS,
        lifespan="off",
        server_header=False,
    )
    server = _StoppingServer(settings, model.engine, stop_seconds)
    # uvicorn raises the signal that stopped it again at the end, for whoever handled it before.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    model.engine.start(lambda: setattr(server, "should_exit", True))
    try:
        server.run(sockets=[listener])
    finally:
        model.engine.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    if model.engine.failure is not None:
        raise InputError(f"the server stopped: {model.engine.failure}; start it again")


ERROR_SECONDS = 5  # for streams to send the error that ends them


class _StoppingServer(uvicorn.Server):
    """A server that ends what still runs some seconds after it was told to stop."""

    def __init__(self, settings: uvicorn.Config, engine: GenerationEngine, stop_seconds: int):
        super().__init__(settings)
        self._engine, self._stop_seconds = engine, stop_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.refuse()
        timer = threading.Timer(self._stop_seconds, self._engine.stop)
        timer.daemon = True
        timer.start()
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
