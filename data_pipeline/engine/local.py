"""The local engine: pure tasks on a pool of processes, results in the order of the tasks.

A task is a picklable value; the function is a module-level function of one task. The engine knows nothing of what
they do, and no result may depend on the number of workers: tests run every step with one and with two."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from gristmill.data_pipeline.engine.progress import Reporter

Task = TypeVar("Task")
Result = TypeVar("Result")


class LocalEngine:
    """Runs tasks on this machine. `workers=1` runs them in this process.

    The pool starts with the first map that needs it and serves all later ones: starting it anew for each step of
    curation costs a second or two of imports every time. It ends with the engine, or at `close`."""

    def __init__(self, workers: int, reporter: Reporter):
        self.workers = workers
        self.reporter = reporter
        self._pool: ProcessPoolExecutor | None = None

    def map(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        description: str,
        sizes: Sequence[float] | None = None,
        unit: str = "tasks",
    ) -> list[Result]:
        """The results in the order of the tasks. `sizes` are the tasks' weights on the progress bar, in `unit`.

        The first exception of a task is raised here; tasks not yet started are dropped."""
        weights = list(sizes) if sizes is not None else [1.0] * len(tasks)
        with self.reporter.meter(description, sum(weights), unit) as meter:
            if self.workers <= 1 or len(tasks) <= 1:
                results = []
                for task, weight in zip(tasks, weights, strict=True):
                    results.append(function(task))
                    meter.advance(weight)
                return results
            pool = self._started()
            futures = {pool.submit(function, task): index for index, task in enumerate(tasks)}
            found: dict[int, Result] = {}
            try:
                for future in as_completed(futures):
                    index = futures[future]
                    found[index] = future.result()
                    meter.advance(weights[index])
            except BaseException:
                self._pool = None
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [found[index] for index in range(len(tasks))]

    def close(self) -> None:
        """Ends the workers and waits until they are gone."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_leave_with_parent,
                initargs=(os.getpid(),),
            )
        return self._pool


def _leave_with_parent(parent: int) -> None:
    """A worker whose parent was killed ends too: orphans must not hold memory or go on writing."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
