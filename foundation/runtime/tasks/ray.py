"""Ray engine: runs independent tasks as core tasks of a Ray cluster that is already running.

Only tasks are used: no Ray Data, no actors, no Ray Client, and Ray's object store holds no data: files do, on a file
system that the nodes share or in an object store such as S3, and messages carry their addresses (`tasks/transport.py`).
The cluster is never shut down from here."""

import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import scratch_folder
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.engine import Engine, Result, Stragglers, Task, task_name
from gristmill.foundation.runtime.tasks.local import RemoteTraceback
from gristmill.foundation.runtime.tasks.node import (
    NodeReport,
    NodeRequirements,
    load_modules,
    report,
    run_task,
    versions_here,
)
from gristmill.foundation.runtime.tasks.task_files import TaskObjects
from gristmill.foundation.runtime.tasks.transport import (
    DriverFiles,
    SharedFolder,
    TaskTransport,
    ThroughStore,
    is_transient,
)
from gristmill.foundation.startup import DeferredModule

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
        reporter.info(f"engine: ray, {len(nodes)} nodes on {hosts} machines, {self.workers} tasks at once")

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
            carrier: TaskTransport = SharedFolder(scratch, function)
            if self._files is not None:
                carrier = ThroughStore(self._files, scratch, function, tasks)
            run = _Run(self, carrier, tasks, weights, description)
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

    def __init__(
        self,
        engine: RayEngine,
        carrier: TaskTransport,
        tasks: Sequence[Any],
        weights: Sequence[float],
        description: str,
    ):
        self.engine, self.carrier, self.tasks, self.description = engine, carrier, tasks, description
        self.submitter = engine.submitter()
        self.pending: dict[Any, int] = {}
        self.beaten: list[Any] = []  # of tasks whose other copy answered first
        self.stragglers = Stragglers(weights)
        self.lost: Counter[int] = Counter()
        self.last_node = monotonic()

    def results(self, order: Sequence[int]) -> Generator[tuple[int, Any], None, None]:
        """order: indices of the tasks, the largest first."""
        waiting = deque(order)
        while waiting or self.pending:
            limit = WINDOW * self.engine.workers
            while waiting and len(self.pending) < limit:
                self._submit(waiting.popleft())
            if not waiting and len(self.pending) < self.engine.workers:
                for index in self.stragglers.overdue():
                    self._submit(index)
            for reference in self._ready():
                if reference not in self.pending:  # beaten since it became ready
                    continue
                index = self.pending.pop(reference)
                is_lost, value = self._answer(reference, index)
                if is_lost and index not in self.pending.values():
                    waiting.appendleft(index)
                elif not is_lost:
                    self.stragglers.end(index)
                    self._end_copies(index)
                    yield index, value

    def _submit(self, index: int) -> None:
        order = self.carrier.order(self.tasks[index])
        self.pending[self.submitter.remote(order, self.engine.place, self.carrier.scratch)] = index
        self.stragglers.begin(index)

    def _end_copies(self, index: int) -> None:
        for reference in [reference for reference, task in self.pending.items() if task == index]:
            del self.pending[reference]
            self.beaten.append(reference)
            _cancel(reference)

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
            raise InputError(f"{self._named(index)} failed in Ray: {error_summary(error)}") from error
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
        return f"{self.description}: task {index + 1} of {len(self.tasks)}{task_name(self.tasks[index])}"

    def cancel(self) -> None:
        """Ends the tasks that the cluster still has, so that none writes after the map and none waits for a node."""
        references = list(self.pending)
        self.pending = {}
        for reference in references:
            _cancel(reference)
        references += self.beaten
        if references and ray.is_initialized():
            ray.wait(references, num_returns=len(references), timeout=CANCEL_SECONDS, fetch_local=False)


def _cancel(reference: Any) -> None:
    try:
        ray.cancel(reference, force=True)
    except Exception as error:  # it ended in the meantime, or the cluster is gone
        logging.getLogger(__name__).debug("cancel: %s", error)


# Connects to a Ray cluster that is already running, and refuses one whose nodes differ from the driver.
#
# Every trouble is an error within about 30 seconds. `ray.init` by itself waits two minutes for an address without a
# cluster and then ends the process (Ray 2.60), so the address is tried first.

ray_strategies = DeferredModule("ray.util.scheduling_strategies")
ray_worker = DeferredModule("ray._private.worker")
ray_services = DeferredModule("ray._private.services")
ray_raylet = DeferredModule("ray._raylet")

PROBE_SECONDS = 15.0
TCP_SECONDS = 5.0
HANDSHAKE_SECONDS = 25.0
HANDSHAKES = 3
MAX_CLOCK_SKEW_SECONDS = 60.0
HOW_TO_START = "start a cluster with `ray start --head` and give --address HOST:6379, or auto on one of its nodes"


def require_ray() -> None:
    """Raises RecipeError if Ray is not installed."""
    try:
        ray.__version__  # noqa: B018 (imports it)
    except ImportError as error:
        raise RecipeError(
            f"--engine ray needs the package ray ({error}); install it with: pip install 'gristmill[cluster]' -c "
            "constraints.txt"
        ) from error


def connect(address: str) -> bool:
    """Connects this process to the cluster, unless it is connected; returns whether it did.

    Raises RecipeError for an address of another kind, InputError for one that does not answer."""
    require_ray()
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _be_quiet()
    host_and_port = _found_address(address)
    try:
        ray.init(address=host_and_port, log_to_driver=False, logging_level=logging.CRITICAL)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"--address {address}: {error_summary(error)}; {HOW_TO_START}") from error
    return True


def _found_address(address: str) -> str:
    """HOST:PORT of a cluster that answers. Raises RecipeError or InputError."""
    if address.startswith("ray://"):
        raise RecipeError(
            f"--address {address}: the Ray Client is not supported; run the command on a node of the cluster with "
            "--address auto"
        )
    host_and_port = _address_of_this_machine() if address == "auto" else address
    host, colon, port = host_and_port.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise RecipeError(f"--address {address}: not an address; write auto, or HOST:PORT such as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TCP_SECONDS).close()
    except OSError as error:
        raise InputError(
            f"--address {address}: no answer ({error.strerror or error or type(error).__name__}); {HOW_TO_START}"
        ) from error
    if not _is_ray(host_and_port):
        raise InputError(f"--address {address}: what answers there is not a Ray cluster; {HOW_TO_START}")
    return host_and_port


def _address_of_this_machine() -> str:
    local_address = None
    with suppress(ConnectionError):  # which Ray raises, or it returns None, by the traces that ended clusters left
        local_address = ray_services.canonicalize_bootstrap_address("auto")
    if not local_address:
        raise InputError(f"--address auto: no Ray cluster runs on this machine; {HOW_TO_START}")
    return local_address


def _is_ray(address: str) -> bool:
    """Whether the head of a cluster answers at the address within PROBE_SECONDS."""
    heads: list[Any] = []

    def ask() -> None:
        with suppress(Exception):
            heads.append(ray_raylet.GcsClient(address=address))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(heads)


def _be_quiet() -> None:
    """Ray prints the logs of a node that dies to the driver's standard output, log_to_driver or not."""
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    worker: Any = ray_worker._loaded()
    worker.print_to_stdstream = lambda *_, **__: None


def error_summary(error: Exception) -> str:
    """Last line of the error's message; of a remote traceback that is the exception."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return said[-1] if said else type(error).__name__


def nodes_with_processors() -> list[dict[str, Any]]:
    """The living nodes that can run a task, as `ray.nodes` describes them, in the order of their ids."""
    living = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    return sorted(living, key=lambda node: node["NodeID"])


def checked_place(address: str, work_folder: Path | None, objects: TaskObjects | None = None) -> NodeRequirements:
    """Requirements of a task on its node, after all present nodes reported that they have it. objects: the store that
    the nodes share instead of the work folder.

    Raises InputError that names every node that differs, does not see the work folder, does not answer or whose clock
    is wrong; and if there is no node with a processor."""
    nodes = nodes_with_processors()
    if not nodes:
        raise InputError(
            f"--address {address}: no node of the cluster has a CPU; start one: ray start --address HOST:6379"
        )
    if objects is not None:
        place = NodeRequirements(
            os.getcwd(), versions_here(), objects=objects, object_probe=objects.put_bytes(b"probe")
        )
        _shake_hands(nodes, place)
        return replace(place, object_probe="")
    with _probe_file(work_folder) as probe:
        place = NodeRequirements(os.getcwd(), versions_here(), probe)
        _shake_hands(nodes, place)
    return NodeRequirements(place.folder, place.versions)


@contextmanager
def _probe_file(work_folder: Path | None) -> Iterator[tuple[str, str] | None]:
    if work_folder is None:
        yield None
        return
    work_folder.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex
    path = work_folder.absolute() / f".engine.{token}.tmp"
    path.write_text(token, "utf-8")
    try:
        yield str(path), token
    finally:
        path.unlink(missing_ok=True)


def _shake_hands(nodes: Sequence[dict[str, Any]], place: NodeRequirements) -> None:
    """A node that is lost meanwhile is left out; one whose answer is lost is asked again, HANDSHAKES times in all."""
    problems: list[str] = []
    for attempt in range(HANDSHAKES):
        problems, lost = _answers(nodes, place)
        living = {node["NodeID"] for node in nodes_with_processors()}
        nodes = [node for node in nodes if node["NodeID"] in lost and node["NodeID"] in living]
        if problems or not nodes:
            break
        if attempt == HANDSHAKES - 1:
            problems = [f"node {node['NodeManagerAddress']}: {lost[node['NodeID']]}" for node in nodes]
    if problems:
        raise InputError("the nodes of the cluster do not fit the driver:\n  " + "\n  ".join(sorted(problems)))


def _answers(nodes: Sequence[dict[str, Any]], place: NodeRequirements) -> tuple[list[str], dict[str, str]]:
    """(what is wrong with the nodes that answered or are silent, id -> reason of those whose answer was lost)."""
    asked = time.time()
    waiting = {}
    for node in nodes:
        on_node = ray_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(report).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
        waiting[task.remote(place)] = node
    answered, silent = ray.wait(list(waiting), num_returns=len(waiting), timeout=HANDSHAKE_SECONDS)
    problems, lost = [], {}
    for reference in silent:
        ray.cancel(reference, force=True)
        problems.append(f"node {waiting[reference]['NodeManagerAddress']}: no answer within {HANDSHAKE_SECONDS:.0f} s")
    for reference in answered:
        node = waiting[reference]
        try:
            problems += _problems(node["NodeManagerAddress"], ray.get(reference), asked)
        except ray.exceptions.RayError as error:
            lost[node["NodeID"]] = (
                f"gristmill cannot run ({error_summary(error)}); install it there with the extra `cluster`"
            )
    return problems, lost


def _problems(address: str, node_report: NodeReport, asked: float) -> list[str]:
    now = time.time()
    problems = [f"node {address} ({node_report.host}): {node_report.problem}"] if node_report.problem else []
    if not asked - MAX_CLOCK_SKEW_SECONDS <= node_report.time <= now + MAX_CLOCK_SKEW_SECONDS:
        problems.append(
            f"node {address} ({node_report.host}): its clock differs from the driver's by "
            f"{max(asked - node_report.time, node_report.time - now):.0f} s; set it (NTP)"
        )
    return problems
