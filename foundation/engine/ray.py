"""Ray engine: runs independent tasks as core tasks of a Ray cluster that is already running.

Only tasks are used: no Ray Data, no actors, no Ray Client, and Ray's object store holds no data: files do, on a file
system that the nodes share or in an object store such as S3, and messages carry their addresses (`carriers.py`). The
cluster is never shut down from here."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from gristmill.foundation.deferred_module import DeferredModule
from gristmill.foundation.engine.carriers import Carrier, SharedFolder, ThroughStore, is_transient
from gristmill.foundation.engine.driver_files import DriverFiles
from gristmill.foundation.engine.engine import Engine, Result, Task, name_of
from gristmill.foundation.engine.node import load_modules, run_task
from gristmill.foundation.engine.ray_cluster import checked_place, connect, last_line, nodes_with_processors
from gristmill.foundation.engine.worker_pool import RemoteTraceback
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import scratch_folder
from gristmill.foundation.progress import Reporter

ray = DeferredModule("ray")
ray_exceptions = DeferredModule("ray.exceptions")

ATTEMPTS = 4  # of a task whose process, node or result is lost; Ray's default is 4 too (max_retries=3)
# Tasks that the cluster has at a time, per processor; each costs the driver 3 kB (Ray's
# CALLER_MEMORY_USAGE_PER_OBJECT_REF).
WINDOW = 4
TASK_MEMORY = 2 << 30  # bytes that the scheduler reserves for a task
POLL_SECONDS = 5.0
NODE_WAIT_SECONDS = 120.0  # without any node that could run a task
CANCEL_SECONDS = 5.0
LOST = ("WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "OutOfMemoryError", "ObjectLostError")


class RayEngine(Engine):
    """Runs tasks on the cluster at `address` (HOST:PORT, or auto: the one of this machine).

    A task whose process or node is lost is run again, `attempts` times in all; Ray itself retries nothing, since it
    would retry a task that was killed for lack of memory for ever. store: the address behind the work folder, through
    which files travel (`task_files.py`); "": the work folder must be the same on every node.
    Raises RecipeError or InputError within about 30 s if Ray is not installed, the address does not answer, or a node
    has other versions than this process."""

    def __init__(self, address: str, reporter: Reporter, work_folder: Path, attempts: int = ATTEMPTS, store: str = ""):
        self.reporter, self.work_folder, self.attempts = reporter, work_folder.absolute(), attempts
        self._files = DriverFiles(self.work_folder, store) if store else None
        self._loading: list[Any] = []
        self._connected_here = connect(address)
        try:
            self._place = checked_place(address, work_folder, self._files.objects if self._files else None)
        except BaseException:
            self.disconnect()
            raise
        nodes = nodes_with_processors()
        hosts = len({node["NodeManagerAddress"] for node in nodes})
        reporter.say(f"engine: ray, {len(nodes)} nodes on {hosts} machines, {self.workers} tasks at once")

    @property
    def workers(self) -> int:
        return max(int(ray.cluster_resources().get("CPU", 1)), 1)

    def start(self, modules: Sequence[str]) -> None:
        """Each processor's worker imports the modules while the driver prepares its tasks; nobody waits for it."""
        load = ray.remote(load_modules).options(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")
        self._loading = [load.remote(self._place, tuple(modules)) for _ in range(self.workers)]

    def close(self) -> None:
        """Remove the tasks' files from the store. Ray ends idle workers by itself."""
        if self._files is not None:
            self._files.clear()

    def disconnect(self) -> None:
        """Leave the cluster, which goes on, if this engine connected to it."""
        if self._connected_here:
            self._connected_here = False
            ray.shutdown()

    def _results(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], weights: Sequence[float], description: str
    ) -> Generator[tuple[int, Result], None, None]:
        order = sorted(range(len(tasks)), key=lambda index: -weights[index])
        if not tasks:
            return
        with scratch_folder(self.work_folder) as scratch:
            carrier: Carrier = SharedFolder(scratch, function)
            if self._files is not None:
                carrier = ThroughStore(self._files, scratch, function, tasks)
            run = _Run(self, carrier, tasks, description)
            try:
                yield from run.results(order)
                carrier.finish()
            finally:
                run.cancel()

    def submitter(self) -> Any:
        """Ray's function that runs one task; `.remote(order, place, scratch)` gives a reference to its answer."""
        largest = max((node["Resources"].get("memory", 0) for node in nodes_with_processors()), default=0)
        memory = int(min(TASK_MEMORY, largest)) or None
        return ray.remote(run_task).options(num_cpus=1, memory=memory, max_retries=0, scheduling_strategy="SPREAD")

    @property
    def place(self) -> Any:
        return self._place


class _Run:
    """One map: which tasks wait, which the cluster has, and how often each was lost."""

    def __init__(self, engine: RayEngine, carrier: Carrier, tasks: Sequence[Any], description: str):
        self.engine, self.carrier, self.tasks, self.description = engine, carrier, tasks, description
        self.submitter = engine.submitter()
        self.pending: dict[Any, int] = {}
        self.lost: Counter[int] = Counter()
        self.last_node = monotonic()

    def results(self, order: Sequence[int]) -> Generator[tuple[int, Any], None, None]:
        """order: indices of the tasks, the largest first."""
        waiting = deque(order)
        while waiting or self.pending:
            limit = WINDOW * self.engine.workers
            while waiting and len(self.pending) < limit:
                self._submit(waiting.popleft())
            for reference in self._ready():
                index = self.pending.pop(reference)
                again, value = self._answer(reference, index)
                if again:
                    waiting.appendleft(index)
                else:
                    yield index, value

    def _submit(self, index: int) -> None:
        order = self.carrier.order(self.tasks[index])
        self.pending[self.submitter.remote(order, self.engine.place, self.carrier.scratch)] = index

    def _ready(self) -> list[Any]:
        references = list(self.pending)
        first, _ = ray.wait(references, num_returns=1, timeout=POLL_SECONDS, fetch_local=False)
        if not first:
            self._check_nodes()
            return []
        self.last_node = monotonic()
        return ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)[0] or first

    def _check_nodes(self) -> None:
        """Raises InputError if the cluster has had no node for a while: the tasks would wait for ever."""
        if nodes_with_processors():
            self.last_node = monotonic()
        elif monotonic() - self.last_node > NODE_WAIT_SECONDS:
            raise InputError(
                f"{self.description}: the cluster has had no node with a CPU for {NODE_WAIT_SECONDS:.0f} s; what is "
                "finished is kept: start a node (ray start --address HOST:6379) and run the same command again"
            )

    def _answer(self, reference: Any, index: int) -> tuple[bool, Any]:
        """(whether the task must run again, its result). Raises the task's exception, or InputError if it was lost too
        often."""
        try:
            parcel = ray.get(reference)
        except tuple(getattr(ray_exceptions, name) for name in LOST) as error:
            self._count_loss(index, error)
            return True, None
        except ray_exceptions.RayError as error:
            raise InputError(f"{self._named(index)} failed in Ray: {last_line(error)}") from error
        is_right, value = self.carrier.answer(parcel)
        if is_right:
            return False, value
        exception, text = value
        if is_transient(exception) and self._may_run_again(index):
            return True, None
        raise exception from RemoteTraceback(text)

    def _may_run_again(self, index: int) -> bool:
        self.lost[index] += 1
        return self.lost[index] < self.engine.attempts

    def _count_loss(self, index: int, error: Exception) -> None:
        if self._may_run_again(index):
            return
        cause = {
            "OutOfMemoryError": "its node ran out of memory",
            "WorkerCrashedError": "its process died, most often because memory ran out or in a native library",
        }.get(type(error).__name__, "its node was lost")
        raise InputError(
            f"{self._named(index)} was lost {self.lost[index]} times, last because {cause}; what is finished is kept: "
            "start nodes with more memory or fewer --num-cpus and run the same command again"
        ) from error

    def _named(self, index: int) -> str:
        return f"{self.description}: task {index + 1} of {len(self.tasks)}{name_of(self.tasks[index])}"

    def cancel(self) -> None:
        """Ends the tasks that the cluster still has, so that none writes after the map and none waits for a node."""
        references = list(self.pending)
        self.pending = {}
        for reference in references:
            try:
                ray.cancel(reference, force=True)
            except Exception as error:  # it ended in the meantime, or the cluster is gone
                logging.getLogger(__name__).debug("cancel: %s", error)
        if references and ray.is_initialized():
            ray.wait(references, num_returns=len(references), timeout=CANCEL_SECONDS, fetch_local=False)
