"""A server whose model is sharded: the first rank's engine announces each of its turns, and the others do the same.

A batch gives the same results for the same calls in the same order, so the ranks exchange the calls alone."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from gristmill.evaluation.generation.batch import ContinuousBatch
from gristmill.evaluation.generation.request import GenerationRequest
from gristmill.training.parallel.mesh import Axis


@dataclass(frozen=True)
class Turn:
    """What one pass of the engine's loop does before its step. added: new requests, in order. cancelled: numbers of
    requests in the batch. idle: no step follows. stops: it is the last."""

    added: tuple[GenerationRequest, ...] = ()
    cancelled: tuple[int, ...] = ()
    idle: bool = False
    stops: bool = False


Announce = Callable[[Turn], None]


def announcer(ranks: Axis) -> Announce | None:
    """How the first rank tells the others of a turn; None if there are no others."""
    if ranks.size == 1:
        return None
    return lambda turn: dist.broadcast_object_list([turn], src=0, group=ranks.group)


def follow(make_batch: Callable[[], ContinuousBatch], ranks: Axis) -> None:
    """Does what the first rank announces, until it stops. Signals are the first rank's to answer."""
    batch = make_batch()
    with _signals_ignored():
        while not (turn := _heard(ranks)).stops:
            for request in turn.added:
                batch.add(request)
            for number in turn.cancelled:
                batch.cancel(number)
            if not turn.idle:
                batch.step()


def _heard(ranks: Axis) -> Turn:
    found: list[Turn] = [Turn()]
    dist.broadcast_object_list(found, src=0, group=ranks.group)
    return found[0]


@contextmanager
def _signals_ignored() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
