"""The thread that runs the continuous batch of a server."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gristmill.evaluation.generation.batch import ContinuousBatch
from gristmill.evaluation.generation.request import GenerationRequest, RequestResult, TextStream
from gristmill.foundation.errors import InputError

logger = logging.getLogger(__name__)


class ServerBusyError(Exception):
    """More requests wait than the server takes."""


@dataclass(eq=False)
class Ticket:
    """A submitted request. done is called once, in the engine's thread."""

    request: GenerationRequest
    stream: TextStream | None
    done: Callable[[RequestResult], None]
    number: int = -1  # in the batch


class Engine:
    """submit and cancel may be called by any thread; the batch is used by the engine's own alone."""

    def __init__(self, make_batch: Callable[[], ContinuousBatch], max_requests: int):
        self._make_batch, self.max_requests = make_batch, max_requests
        self._batch = make_batch()
        self._open: dict[int, Ticket] = {}  # by number in the batch
        self._new: deque[Ticket] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that runs; requests that have not ended get an error."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    @property
    def sequence_length(self) -> int:
        return self._batch.causal_lm.sequence_length

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return len(self._open) + len(self._new)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def submit(self, tickets: list[Ticket]) -> None:
        """Queues the requests of one call together. Raises InputError if a prompt does not fit, ServerBusyError if too
        many requests wait."""
        for ticket in tickets:
            ticket.request.check(self._batch.causal_lm.sequence_length, self._batch.causal_lm.vocab_size)
        with self._changed:
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
        while True:
            with self._changed:
                while not (self._stopped or self._new or self._cancelled or self._open):
                    self._changed.wait()
                stopped, new, cancelled = self._stopped, list(self._new), list(self._cancelled)
                self._new.clear()
                self._cancelled.clear()
            if stopped:
                for ticket in [*self._open.values(), *new]:
                    ticket.done(RequestResult(ticket.number, error=InputError("the server is stopping; ask another")))
                return
            self._add([ticket for ticket in new if ticket not in cancelled])
            for ticket in cancelled:
                if self._open.get(ticket.number) is ticket:  # another batch gives its numbers anew
                    del self._open[ticket.number]
                    self._batch.cancel(ticket.number)
            self._step()

    def _add(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            ticket.number = self._batch.add(ticket.request, ticket.stream)
            self._open[ticket.number] = ticket

    def _step(self) -> None:
        try:
            results = self._batch.step()
        except Exception as error:  # of the model or the device: requests that wait are not lost
            logger.exception("a step of generation failed")
            self._recover(error)
            return
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
