"""Connects to a Ray cluster that is already running, and refuses one whose nodes differ from the driver.

Every trouble is an error within about 30 seconds. `ray.init` by itself waits two minutes for an address without a
cluster and then ends the process (Ray 2.60), so the address is tried first."""

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill.foundation.deferred_module import DeferredModule
from gristmill.foundation.engine.node import NodeReport, Place, report, versions_here
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.task_files import TaskObjects

ray = DeferredModule("ray")
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
    found = _found_address(address)
    try:
        ray.init(address=found, log_to_driver=False, logging_level=logging.CRITICAL)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"--address {address}: {last_line(error)}; {HOW_TO_START}") from error
    return True


def _found_address(address: str) -> str:
    """HOST:PORT of a cluster that answers. Raises RecipeError or InputError."""
    if address.startswith("ray://"):
        raise RecipeError(
            f"--address {address}: the Ray Client is not supported; run the command on a node of the cluster with "
            "--address auto"
        )
    found = _address_of_this_machine() if address == "auto" else address
    host, colon, port = found.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise RecipeError(f"--address {address}: not an address; write auto, or HOST:PORT such as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TCP_SECONDS).close()
    except OSError as error:
        raise InputError(
            f"--address {address}: no answer ({error.strerror or error or type(error).__name__}); {HOW_TO_START}"
        ) from error
    if not _is_ray(found):
        raise InputError(f"--address {address}: what answers there is not a Ray cluster; {HOW_TO_START}")
    return found


def _address_of_this_machine() -> str:
    found = None
    with suppress(ConnectionError):  # which Ray raises, or it returns None, by the traces that ended clusters left
        found = ray_services.canonicalize_bootstrap_address("auto")
    if not found:
        raise InputError(f"--address auto: no Ray cluster runs on this machine; {HOW_TO_START}")
    return found


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


def last_line(error: Exception) -> str:
    """Of the error's message; of a remote traceback that is the exception."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return said[-1] if said else type(error).__name__


def nodes_with_processors() -> list[dict[str, Any]]:
    """The living nodes that can run a task, as `ray.nodes` describes them, in the order of their ids."""
    living = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    return sorted(living, key=lambda node: node["NodeID"])


def checked_place(address: str, work_folder: Path | None, objects: TaskObjects | None = None) -> Place:
    """What every task needs of its node, after all present nodes reported that they have it. objects: the store that
    the nodes share instead of the work folder.

    Raises InputError that names every node that differs, does not see the work folder, does not answer or whose clock
    is wrong; and if there is no node with a processor."""
    nodes = nodes_with_processors()
    if not nodes:
        raise InputError(
            f"--address {address}: no node of the cluster has a CPU; start one: ray start --address HOST:6379"
        )
    if objects is not None:
        place = Place(os.getcwd(), versions_here(), objects=objects, object_probe=objects.put_bytes(b"probe"))
        _shake_hands(nodes, place)
        return replace(place, object_probe="")
    with _probe_file(work_folder) as probe:
        place = Place(os.getcwd(), versions_here(), probe)
        _shake_hands(nodes, place)
    return Place(place.folder, place.versions)


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


def _shake_hands(nodes: Sequence[dict[str, Any]], place: Place) -> None:
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


def _answers(nodes: Sequence[dict[str, Any]], place: Place) -> tuple[list[str], dict[str, str]]:
    """(what is wrong with the nodes that answered or are silent, id -> reason of those whose answer was lost)."""
    asked = time.time()
    waiting = {}
    for node in nodes:
        on_node = ray_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(report).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
        waiting[task.remote(place)] = node
    answered, silent = ray.wait(list(waiting), num_returns=len(waiting), timeout=HANDSHAKE_SECONDS)
    problems, lost = [], {}
    for one in silent:
        ray.cancel(one, force=True)
        problems.append(f"node {waiting[one]['NodeManagerAddress']}: no answer within {HANDSHAKE_SECONDS:.0f} s")
    for one in answered:
        node = waiting[one]
        try:
            problems += _problems(node["NodeManagerAddress"], ray.get(one), asked)
        except ray.exceptions.RayError as error:
            lost[node["NodeID"]] = (
                f"gristmill cannot run ({last_line(error)}); install it there with the extra `cluster`"
            )
    return problems, lost


def _problems(address: str, found: NodeReport, asked: float) -> list[str]:
    now = time.time()
    problems = [f"node {address} ({found.host}): {found.problem}"] if found.problem else []
    if not asked - MAX_CLOCK_SKEW_SECONDS <= found.time <= now + MAX_CLOCK_SKEW_SECONDS:
        problems.append(
            f"node {address} ({found.host}): its clock differs from the driver's by "
            f"{max(asked - found.time, found.time - now):.0f} s; set it (NTP)"
        )
    return problems
