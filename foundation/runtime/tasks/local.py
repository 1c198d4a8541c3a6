"""Pool of worker processes with one pipe each, so that the death of a worker is detected at once and blocks nothing.

`concurrent.futures` returns all results through one pipe: if a worker is killed while it sends a large result, the
reader waits forever, because the other workers keep the pipe open."""

import ctypes
import importlib
import multiprocessing
import multiprocessing.reduction
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.engine import Engine, Result, Task, task_name
from gristmill.foundation.startup import block_pandas_import, without_huge_pages

PR_SET_PDEATHSIG = 1  # Linux, prctl(2): the signal a process gets when its parent ends
SECONDS_TO_TIDY_UP = 2.0  # between SIGTERM and SIGKILL
ALLOCATOR_THREAD = "jemalloc_bg_thd"  # of pyarrow's allocator, which starts it again in a fork

_driver_ends: "weakref.WeakSet[Connection]" = weakref.WeakSet()  # of the pipes of all workers of this process


class WorkerDied(Exception):
    """A worker ended without a result. task: index of its task. exit_code: minus the signal number, if any."""

    def __init__(self, task: int, exit_code: int | None):
        super().__init__(task, exit_code)
        self.task, self.exit_code = task, exit_code


class RemoteTraceback(Exception):
    """The traceback of a worker's exception, as the cause of the exception raised in the driver."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def may_fork() -> bool:
    """Whether forks of this process are safe: on Linux (elsewhere, system libraries may not survive one), and while it
    has no threads, since a fork has none of them and waits for ever for the locks they hold."""
    if sys.platform != "linux":
        return False
    try:
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    except OSError:  # a thread that ended meanwhile
        return False
    return len([name for name in names if name != ALLOCATOR_THREAD]) == 1


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Hides the running script from the start of a process, which would import it: `gristmill.curate(...)` in a script
    without `if __name__ == "__main__"` would run again in every worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Worker:
    """One process and the driver's end of its pipe. modules: what it imports before its first task. task: index of its
    current task.

    forked: it is a fork of this process, which has its open files; see WorkerPool. imports_main: a process started anew
    imports this one's script, whose functions it then has."""

    def __init__(self, modules: Sequence[str] = (), forked: bool = False, imports_main: bool = False) -> None:
        context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        self.connection, remote = context.Pipe()
        _driver_ends.add(self.connection)
        from_main_thread = threading.current_thread() is threading.main_thread()
        self.process: BaseProcess = context.Process(
            target=_work, args=(remote, os.getpid(), from_main_thread, tuple(modules)), daemon=True
        )
        # Ctrl-C goes to the whole group. A worker that is still importing would print a traceback: it begins with the
        # signal blocked, which its own start-up inherits, until `_work` ignores it. The tracker that the first spawned
        # process starts would unblock it again (multiprocessing/resource_tracker.py, ensure_running).
        if not forked:
            resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with nullcontext() if imports_main else _no_main_module():
                self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        remote.close()  # the worker has the only copy, so its death closes the pipe
        self.task: int | None = None

    def give(self, task: int, function: Callable[[Any], Any], value: Any) -> None:
        """Send a task. Raises WorkerDied if the worker died while idle."""
        self.task = task
        try:
            self.connection.send((function, value))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error

    def answer(self) -> Any:
        """Receive the result of its task. Raises the task's exception, or WorkerDied."""
        assert self.task is not None
        try:
            ok, value = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        self.task = None
        if ok:
            return value
        exception, text = value
        raise exception from RemoteTraceback(text)

    def _died(self) -> WorkerDied:
        assert self.task is not None
        self.process.join(SECONDS_TO_TIDY_UP)
        return WorkerDied(self.task, self.process.exitcode)


class WorkerPool:
    """A fixed number of workers, started at construction, for successive calls of `run`.

    forked: they are forks of this process, which start in 10 ms with all that it has imported, instead of in 0.6 s of
    CPU time each. For a process whose libraries have run no threads yet, since a fork has none of them."""

    def __init__(self, workers: int, modules: Sequence[str] = (), forked: bool = False, imports_main: bool = False):
        self.has_main = forked or imports_main
        self._workers: list[Worker] = []
        if forked:
            _import(modules)
        try:
            for _ in range(workers):
                self._workers.append(Worker(modules, forked, imports_main))
        except BaseException:
            self.end()
            raise

    def run(
        self, function: Callable[[Any], Any], tasks: Sequence[Any], order: Sequence[int]
    ) -> Iterator[tuple[int, Any]]:
        """Yield (index, result) of every task as they finish. order: the indices of the tasks, as they are begun.
        Raises a task's exception, or WorkerDied."""
        waiting = deque(order)
        while True:
            for worker in self._workers:
                if worker.task is None and waiting:
                    index = waiting.popleft()
                    worker.give(index, function, tasks[index])
            busy = [worker for worker in self._workers if worker.task is not None]
            if not busy:
                return
            ready = set(wait([handle for worker in busy for handle in (worker.connection, worker.process.sentinel)]))
            for worker in busy:
                if worker.connection in ready or worker.process.sentinel in ready:
                    task = worker.task
                    assert task is not None
                    yield task, worker.answer()

    def close(self) -> None:
        """Close the pipes, at which the workers exit, and wait for them."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join()

    def end(self) -> None:
        """Terminate all workers; they have SECONDS_TO_TIDY_UP to remove their temporary files."""
        try:
            for worker in self._workers:
                worker.process.terminate()
            deadline = time.monotonic() + SECONDS_TO_TIDY_UP
            for worker in self._workers:
                worker.process.join(max(deadline - time.monotonic(), 0))
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.join()
                worker.connection.close()


def _work(connection: Connection, parent: int, from_main_thread: bool, modules: Sequence[str]) -> None:
    """Main loop of a worker: import the modules, receive tasks and send results until the driver closes the pipe. Only
    the driver handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, _exit_on_signal)
    for inherited in list(_driver_ends):  # a fork has them too; open ones would hide the driver's end from others
        inherited.close()
    leave_with_parent(parent, from_main_thread)
    _import(modules)
    while True:
        try:
            order = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            answer = _answer(order)
        except KeyboardInterrupt:  # training's own, when it has saved after SIGTERM: the driver says what happened
            sys.exit(1)
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:  # the result cannot be pickled
            connection.send((False, (TypeError(f"a result cannot be pickled: {error}"), traceback.format_exc())))


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        with suppress(ImportError):  # a task that needs the module reports it
            importlib.import_module(name)


def _exit_on_signal(*_: object) -> None:
    """Exit, and remove temporary files on the way. In a callback of a library (llvmlite's) Python ignores the exit and
    reports that with a traceback, which is not wanted: the driver kills the worker soon after."""
    sys.unraisablehook = lambda _: None
    sys.exit(1)


def _answer(order: bytes) -> tuple[bool, Any]:
    """`answer_of` a pickled function and its task."""
    try:
        function, value = multiprocessing.reduction.ForkingPickler.loads(order)
    except Exception as error:
        return failure(error)
    return answer_of(function, value)


def answer_of(function: Callable[[Any], Any], value: Any) -> tuple[bool, Any]:
    """(True, the result) or (False, (exception, its traceback))."""
    try:
        block_pandas_import()
        with without_huge_pages():
            return True, function(value)
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> tuple[bool, Any]:
    """(False, (the exception as it can be pickled, its traceback)), for use in an except block."""
    return False, (_portable(error), traceback.format_exc())


def _portable(error: Exception) -> Exception:
    """The exception, or a RuntimeError with its message if it cannot be pickled."""
    try:
        multiprocessing.reduction.ForkingPickler.loads(multiprocessing.reduction.ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def leave_with_parent(parent: int, from_main_thread: bool) -> None:
    """End this worker when its parent is killed, so that it neither holds memory nor continues to write.

    On Linux the kernel sees to it at once (it goes by the thread that started the worker, so only a main thread's
    death counts); elsewhere, and for other threads, a look every half second."""
    if sys.platform == "linux" and from_main_thread:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# Local execution engine: runs independent tasks on a pool of processes of this machine.

CAUSES: dict[int, str] = {
    signal.SIGKILL: "killed; most often by the kernel, because memory ran out",
    signal.SIGBUS: "killed by SIGBUS; a mapped file was cut short or the disk is full",
    signal.SIGSEGV: "killed by SIGSEGV, a fault in a native library",
}


class LocalEngine(Engine):
    """Runs tasks on this machine. `workers=1` runs them in this process, and so does a single task before there is a
    pool.

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
        if self.workers <= 1 or (len(tasks) <= 1 and self._pool is None):
            block_pandas_import()
            with without_huge_pages():
                yield from ((index, function(task)) for index, task in enumerate(tasks))
            return
        try:
            is_of_script = getattr(function, "__module__", None) == "__main__"
            if is_of_script and self._pool is not None and not self._pool.has_main:
                self.close()
            pool = self._started(imports_main=is_of_script)
            order = sorted(range(len(tasks)), key=lambda index: -weights[index])
            yield from pool.run(function, tasks, order)
        except BaseException as error:
            self._end()
            if isinstance(error, WorkerDied):
                raise InputError(
                    f"{description}: a worker process was {cause_of_death(error.exit_code)}, at task {error.task + 1} "
                    f"of {len(tasks)}{task_name(tasks[error.task])}; what is finished is kept: run the same command "
                    f"with fewer --workers than {self.workers}"
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

    def _started(self, modules: Sequence[str] = (), forked: bool = False, imports_main: bool = False) -> WorkerPool:
        if self._pool is None:
            try:
                self._pool = WorkerPool(self.workers, modules, forked, imports_main)
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
