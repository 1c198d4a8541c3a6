"""The thread that runs the continuous batch of a server."""

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.generation_request import GenerationRequest, PieceStream, RequestResult
from gristmill.evaluation.inference.generate.slots import CacheUse
from gristmill.foundation.errors import InputError
from gristmill.training.parallel.mesh import Axis

# A server whose model is sharded: the first rank's engine announces each of its turns, and the others do the same.
#
# A batch gives the same results for the same calls in the same order, so the ranks exchange the calls alone.


@dataclass(frozen=True)
class SchedulerStep:
    """Work of one pass of the engine's loop before its step. added: new requests, in order. cancelled: numbers of
    requests in the batch. prompt_tokens: as in the batch's step. idle: no step follows. stops: it is last."""

    added: tuple[GenerationRequest, ...] = ()
    cancelled: tuple[int, ...] = ()
    prompt_tokens: float = 0
    idle: bool = False
    stops: bool = False


Announce = Callable[[SchedulerStep], None]


def announcer(ranks: Axis) -> Announce | None:
    """How the first rank tells the others of a step; None if there are no others."""
    if ranks.size == 1:
        return None
    return lambda step: dist.broadcast_object_list([step], src=0, group=ranks.group)


def follow(make_batch: Callable[[], ContinuousBatch], ranks: Axis) -> None:
    """Does what the first rank announces, until it stops. Signals are the first rank's to answer."""
    batch = make_batch()
    with _signals_ignored():
        while not (announced := _announced(ranks)).stops:
            for request in announced.added:
                batch.add(request)
            for number in announced.cancelled:
                batch.cancel(number)
            if not announced.idle:
                batch.step(announced.prompt_tokens)


def _announced(ranks: Axis) -> SchedulerStep:
    announced: list[SchedulerStep] = [SchedulerStep()]
    dist.broadcast_object_list(announced, src=0, group=ranks.group)
    return announced[0]


@contextmanager
def _signals_ignored() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


logger = logging.getLogger(__name__)

IDLE_SECONDS = 60.0  # between announcements without work, which keep the other ranks from giving up


class ServerBusyError(Exception):
    """More requests wait than the server takes."""


class RankLostError(Exception):
    """Another rank of the model no longer answers, or its step failed."""


IDLE_PROMPT_TOKENS = 2048  # of one step while nothing else waits for a token
FIRST_PROMPT_TOKENS = 16.0
MIN_PROMPT_TOKENS = 0.5  # so that every prompt is read at last; a part of a few tokens through a layer is more
# Of the time of decoding, that reading prompts takes: above, a step reads less; below, more. At .6 and .45 the 99th
# percentile of a step was 2.07 times one without prompts (prefill_stall of benchmarks/serve.py).
MOST, LEAST = 0.45, 0.35
MAX_SHARE = 16.0
MAX_UNMEASURED = 15  # steps with prompts behind one without
MAX_GROWTH = 1.5  # of the sequences that decode, since one without


@dataclass
class PromptPace:
    """How many tokens of prompts a step may read, so that with them it takes at most about twice as long as without:
    what the streams of others wait for. Where more than a quarter as many requests wait as run, prompts have more of
    the time, by the number of requests. The number follows the measured times of each step, since a token behind a long
    beginning costs more than the first.

    Where prompts are read in the pass that decodes, a step without any measures decoding: every 16th, and where the
    number of sequences has changed.

    tokens: that take about as long as decoding does."""

    tokens: float = FIRST_PROMPT_TOKENS
    share: float = 1.0  # of prompts in the time of the last step, beside 1 for decoding
    decode_seconds: float = 0.0  # of the last step without prompts, of so many sequences, so many steps before
    measured: int = 0
    unmeasured: int = 0

    def prompt_tokens(self, decoding: int, reading: int, together: bool) -> float:
        """decoding: sequences that wait for their next token; reading: those whose prompts are to be read; together:
        in one pass."""
        if not decoding:
            return IDLE_PROMPT_TOKENS
        self.share = min(max(1.0, 4 * reading / decoding), MAX_SHARE)
        is_measured = self.unmeasured < MAX_UNMEASURED and 1 / MAX_GROWTH <= self.measured / decoding <= MAX_GROWTH
        if together and not is_measured:
            return 0.0
        return min(self.share * self.tokens, IDLE_PROMPT_TOKENS)

    def record_pass(self, decoding: int, prompt_tokens: float, seconds: float) -> None:
        """The tokens of prompts that a pass read beside decoding, and its time."""
        if not prompt_tokens:
            self.decode_seconds, self.measured, self.unmeasured = seconds, decoding, 0
            return
        self.unmeasured += 1
        self.record(prompt_tokens, max(0.0, seconds - self.decode_seconds), self.decode_seconds)

    def record(self, prompt_tokens: float, prompt_seconds: float, decode_seconds: float) -> None:
        """The tokens of prompts that a step read beside decoding, and the times of both."""
        if not prompt_tokens:
            return
        ratio = prompt_seconds / max(decode_seconds, 1e-9) / self.share
        if ratio > MOST:
            self.tokens = max(MIN_PROMPT_TOKENS, 0.8 * self.tokens)
        elif ratio < LEAST and prompt_tokens >= 0.7 * min(self.share * self.tokens, IDLE_PROMPT_TOKENS):
            factor = min((MOST + LEAST) / 2 / max(ratio, 1e-9), 2.0)
            self.tokens = min(factor * self.tokens, IDLE_PROMPT_TOKENS)


@dataclass(eq=False)
class Ticket:
    """A submitted request. done is called once, in the engine's thread."""

    request: GenerationRequest
    stream: PieceStream | None
    done: Callable[[RequestResult], None]
    number: int = -1  # in the batch


class GenerationEngine:
    """submit and cancel may be called by any thread; the batch is used by the engine's own alone.

    announce: tells the other ranks of a sharded model of each step; None without others. A rank that is lost ends the
    engine, and `failure` says so."""

    def __init__(
        self,
        make_batch: Callable[[], ContinuousBatch],
        max_requests: int,
        announce: Announce | None = None,
    ):
        self._make_batch, self.max_requests, self._announce = make_batch, max_requests, announce
        self._batch = make_batch()
        self._open: dict[int, Ticket] = {}  # by number in the batch
        self._new: deque[Ticket] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._stopped = self._refuses = False
        self._pace = PromptPace()
        self.failure: RankLostError | None = None
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._on_failure: Callable[[], None] = lambda: None
        # Called in the engine's thread behind the calls of streams and `done` of a step.
        self.after_pass: Callable[[], None] = lambda: None

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """on_failure: called in the engine's thread when it ends because a rank was lost."""
        self._on_failure = on_failure
        self._thread.start()

    def refuse(self) -> None:
        """Takes no more requests; those that run or wait go on."""
        with self._changed:
            self._refuses = True

    def stop(self) -> None:
        """Ends the thread after the step that runs; requests that have not ended get an error."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest sequence that the model and the cache hold."""
        return self._batch.sequence_length

    @property
    def embedding_width(self) -> int | None:
        return self._batch.embedding_width

    @property
    def cache_use(self) -> CacheUse:
        return self._batch.cache_use

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return len(self._open) + len(self._new)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def submit(self, tickets: list[Ticket]) -> None:
        """Queues the requests of one call together. Raises InputError if one does not fit the model or the cache,
        ServerBusyError if too many requests wait, or the engine has ended."""
        for ticket in tickets:
            self._batch.check(ticket.request)
        with self._changed:
            if self._stopped or self._refuses:
                raise ServerBusyError("the server is stopping; ask another")
            if self.requests + len(tickets) > self.max_requests:
                raise ServerBusyError(
                    f"{self.requests} requests run or wait, at most {self.max_requests} may: try later"
                )
            self._new += tickets
            self._changed.notify()

    def cancel(self, tickets: list[Ticket]) -> None:
        with self._changed:
            self._cancelled += tickets
            self._changed.notify()

    def _run(self) -> None:
        reason = "the server is stopping; ask another"
        try:
            while self._pass():
                self.after_pass()
        except RankLostError as error:
            logger.error("%s", error)
            self.failure, reason = error, f"{error}; the server is stopping"
            self._on_failure()
        with self._changed:
            self._stopped = True
            tickets = [*self._open.values(), *self._new]
            self._new.clear()
        for ticket in tickets:
            ticket.done(RequestResult(ticket.number, error=InputError(reason)))
        self.after_pass()

    def _pass(self) -> bool:
        """Takes what was submitted and cancelled, and does a step; False once the engine is told to stop."""
        with self._changed:
            if not (self._stopped or self._new or self._cancelled or self._open):
                self._changed.wait(IDLE_SECONDS)
            stopped, new, cancelled = self._stopped, list(self._new), list(self._cancelled)
            if not stopped:
                self._new.clear()
            self._cancelled.clear()
        new = [ticket for ticket in new if ticket not in cancelled]
        # Another batch gives its numbers anew, so a number alone does not name a ticket.
        ended = [ticket.number for ticket in cancelled if self._open.get(ticket.number) is ticket]
        idle = not (self._open or new)
        if stopped:
            self._tell(SchedulerStep(stops=True))
            return False
        self._add(new)
        batch = self._batch
        prompt_tokens = self._pace.prompt_tokens(batch.decoding, batch.reading, batch.reads_together)
        self._tell(SchedulerStep(tuple(ticket.request for ticket in new), tuple(ended), prompt_tokens, idle))
        for number in ended:
            del self._open[number]
            batch.cancel(number)
        if not idle:
            self._step(prompt_tokens)
        return True

    def _tell(self, step: SchedulerStep) -> None:
        """Raises RankLostError if another rank does not answer."""
        if self._announce is None:
            return
        try:
            self._announce(step)
        except Exception as error:
            raise _lost(error) from error

    def _add(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            ticket.number = self._batch.add(ticket.request, ticket.stream)
            self._open[ticket.number] = ticket

    def _step(self, prompt_tokens: float) -> None:
        batch = self._batch
        decoding, read = batch.decoding, batch.read_prompt_tokens
        prompt_seconds, decode_seconds = batch.prompt_seconds, batch.decode_seconds
        try:
            results = batch.step(prompt_tokens)
        except Exception as error:  # of the model or the device: requests that wait are not lost
            if self._announce is not None:  # the others stand at another place of the step
                raise _lost(error) from error
            logger.exception("a step of generation failed")
            self._recover(error)
            return
        read_tokens = batch.read_prompt_tokens - read
        times = batch.prompt_seconds - prompt_seconds, batch.decode_seconds - decode_seconds
        if decoding and batch.reads_together:
            self._pace.record_pass(decoding, read_tokens, sum(times))
        elif decoding:
            self._pace.record(read_tokens, *times)
        for result in results:
            self._open.pop(result.number).done(result)

    def _recover(self, error: Exception) -> None:
        """Ends the requests of the running batch with an error; those that have not begun go to a new batch."""
        running = self._batch.running_numbers()
        tickets, self._open = self._open, {}
        self._batch = self._make_batch()
        for number, ticket in tickets.items():
            if number in running:
                message = f"generation failed in this batch ({type(error).__name__}: {error}); send the request again"
                ticket.done(RequestResult(number, error=InputError(message)))
        self._add([ticket for number, ticket in tickets.items() if number not in running])


def _lost(error: Exception) -> RankLostError:
    return RankLostError(f"another process of the model was lost ({type(error).__name__}: {str(error)[:200]})")
