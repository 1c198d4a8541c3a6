"""Local execution engine: runs independent tasks on a pool of processes of this machine."""

import signal
from collections.abc import Callable, Generator, Sequence

from gristmill.foundation.engine.engine import Engine, Result, Task, name_of
from gristmill.foundation.engine.pandas_check import do_without_pandas
from gristmill.foundation.engine.worker_pool import WorkerDied, WorkerPool, may_fork
from gristmill.foundation.errors import InputError
from gristmill.foundation.huge_pages import without_huge_pages
from gristmill.foundation.progress import Reporter

CAUSES: dict[int, str] = {
    signal.SIGKILL: "killed; most often by the kernel, because memory ran out",
    signal.SIGBUS: "killed by SIGBUS; a mapped file was cut short or the disk is full",
    signal.SIGSEGV: "killed by SIGSEGV, a fault in a native library",
}


class LocalEngine(Engine):
    """Runs tasks on this machine. `workers=1` runs them in this process.

    The pool is started by `start`, where its workers may be forks, or by the first map that needs it, and reused. It
    ends with the engine, or at `close`. Workers take the tasks of the largest weights first."""

    def __init__(self, workers: int, reporter: Reporter):
        self._workers = workers
        self.reporter = reporter
        self._pool: WorkerPool | None = None

    @property
    def workers(self) -> int:
        return self._workers

    def _results(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], weights: Sequence[float], description: str
    ) -> Generator[tuple[int, Result], None, None]:
        if self.workers <= 1 or len(tasks) <= 1:
            do_without_pandas()
            with without_huge_pages():
                yield from ((index, function(task)) for index, task in enumerate(tasks))
            return
        try:
            pool = self._started()
            order = sorted(range(len(tasks)), key=lambda index: -weights[index])
            yield from pool.run(function, tasks, order)
        except BaseException as error:
            self._end()
            if isinstance(error, WorkerDied):
                raise InputError(
                    f"{description}: a worker process was {cause_of_death(error.exit_code)}, at task {error.task + 1} "
                    f"of {len(tasks)}{name_of(tasks[error.task])}; what is finished is kept: run the same command with "
                    f"fewer --workers than {self.workers}"
                ) from error
            raise

    def start(self, modules: Sequence[str]) -> None:
        if self.workers > 1:
            self._started(modules, forked=may_fork())

    def close(self) -> None:
        """Stop the workers and wait for them."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _started(self, modules: Sequence[str] = (), forked: bool = False) -> WorkerPool:
        if self._pool is None:
            try:
                self._pool = WorkerPool(self.workers, modules, forked)
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
