"""Reports hangs and failures: rank, step, phase, stack traces, and the first error of all ranks."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from gristmill.foundation.errors import InputError
from gristmill.training.parallel.mesh import Mesh

HANGING = 75  # exit code: temporary failure (BSD's sysexits.h), so that torchrun starts the run again
FAILURE = "gristmill.failure"
BRIEF = 500


def end_process() -> None:
    os._exit(HANGING)  # the thread that hangs cannot be asked to leave


class Watchdog:
    """A thread that ends the process after `timeout_seconds` without progress, and prints where it hangs.

    The process group's own time-out must be longer, so that this error comes first."""

    def __init__(self, mesh: Mesh, timeout_seconds: float, end: Callable[[], None] = end_process):
        self.place = (
            f"rank {mesh.world.rank} (pipeline {mesh.pipeline.rank}, data {mesh.data.rank}, "
            f"context {mesh.context.rank}, tensor {mesh.tensor.rank})"
        )
        self.timeout_seconds, self._end = timeout_seconds, end
        self._where, self._since = "starting", time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def at(self, where: str) -> None:
        """Records progress: the process begins the phase `where`."""
        self._where, self._since = where, time.monotonic()

    def progress(self) -> None:
        """Records progress within the phase."""
        self._since = time.monotonic()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self.timeout_seconds / 4)):
            silent = time.monotonic() - self._since
            if silent > self.timeout_seconds:
                print(
                    f"{self.place} hangs: {self._where}, for {silent:.0f} s (train.monitoring.timeout_seconds: "
                    f"{self.timeout_seconds:g}). Its threads:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=sys.__stderr__)
                self._end()
                return


@contextmanager
def first_failure_named(rank: int, store: dist.Store) -> Iterator[None]:
    """When one process fails, the others fail as well, at the broken connection. They then raise InputError with the
    cause that the first one left in the store, instead of the connection's error."""
    try:
        yield
    except BaseException as error:
        own = f"rank {rank} failed: {type(error).__name__}: {error}"[:BRIEF]
        first = store.compare_set(FAILURE, "", own).decode()
        if first == own or isinstance(error, InputError | KeyboardInterrupt):
            raise
        raise InputError(f"rank {rank} stopped, because {first}") from error
