"""Local execution engine: runs independent tasks on a pool of processes; results are in the order of the tasks.

A task is a picklable value; the function is a module-level function of one task. Results must not depend on the number
of workers; tests run every step with one and with two."""

import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from gristmill.foundation.engine.pandas_check import do_without_pandas
from gristmill.foundation.engine.worker_pool import WorkerDied, WorkerPool
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter

Task = TypeVar("Task")
Result = TypeVar("Result")

# Task attributes that name its input, in order of preference: raw or annotated files before output files.
NAMING_FIELDS = ("label", "annotated", "document_file", "path", "documents", "prefix", "folder")
CAUSES: dict[int, str] = {
    signal.SIGKILL: "killed; most often by the kernel, because memory ran out",
    signal.SIGBUS: "killed by SIGBUS; a mapped file was cut short or the disk is full",
    signal.SIGSEGV: "killed by SIGSEGV, a fault in a native library",
}


class LocalEngine:
    """Runs tasks on this machine. `workers=1` runs them in this process.

    The pool is started by the first map that needs it and reused, since starting it costs a second or two of imports.
    It ends with the engine, or at `close`."""

    def __init__(self, workers: int, reporter: Reporter):
        self.workers = workers
        self.reporter = reporter
        self._pool: WorkerPool | None = None

    def map(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        description: str,
        sizes: Sequence[float] | None = None,
        unit: str = "tasks",
    ) -> list[Result]:
        """The results in the order of the tasks. `sizes` are the tasks' weights on the progress bar, in `unit`.

        The first exception of a task is raised here and unfinished tasks are dropped; then, and on an interrupt, the
        workers are terminated. Raises InputError, which names the task, if a worker dies."""
        weights = list(sizes) if sizes is not None else [1.0] * len(tasks)
        with self.reporter.meter(description, sum(weights), unit) as meter:
            found: dict[int, Result] = {}
            with closing(self._results(function, tasks, description)) as results:
                for index, result in results:
                    found[index] = result
                    meter.advance(weights[index])
            return [found[index] for index in range(len(tasks))]

    def _results(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], description: str
    ) -> Generator[tuple[int, Result], None, None]:
        if self.workers <= 1 or len(tasks) <= 1:
            do_without_pandas()
            yield from ((index, function(task)) for index, task in enumerate(tasks))
            return
        try:
            pool = self._started()
            yield from pool.run(function, tasks)
        except BaseException as error:
            self._end()
            if isinstance(error, WorkerDied):
                raise InputError(
                    f"{description}: a worker process was {cause_of_death(error.exit_code)}, at task {error.task + 1} "
                    f"of {len(tasks)}{name_of(tasks[error.task])}; what is finished is kept: run the same command with "
                    f"fewer --workers than {self.workers}"
                ) from error
            raise

    def close(self) -> None:
        """Stop the workers and wait for them."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _started(self) -> WorkerPool:
        if self._pool is None:
            try:
                self._pool = WorkerPool(self.workers)
            except OSError as error:
                raise InputError(
                    f"{self.workers} worker processes cannot be started ({error.strerror}); give fewer --workers"
                ) from error
        return self._pool

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.end()
            self._pool = None


def cause_of_death(exit_code: int | None) -> str:
    """-9 -> 'killed; most often by the kernel, because memory ran out'."""
    if exit_code is None or exit_code >= 0:
        return f"lost (exit code {exit_code})"
    return CAUSES.get(-exit_code, f"killed by signal {-exit_code}")


def name_of(task: Any) -> str:
    """', FILE' for a task with a named input, else ''. A tuple uses its first member that has one."""
    if isinstance(task, str | Path):
        return f", {task}"
    if isinstance(task, tuple | list):
        return next((name for member in task if (name := name_of(member))), "")
    return next((name_of(value) for field in NAMING_FIELDS if (value := getattr(task, field, None)) is not None), "")
