"""Functions that run on a node of a cluster: the report of its versions, and one task."""

import hashlib
import importlib
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import locked_temp_dir
from gristmill.foundation.runtime.tasks.local import answer_of, failure
from gristmill.foundation.runtime.tasks.task_files import Listing, TaskObjects, node_scratch
from gristmill.foundation.runtime.tasks.transport import PickledValue, packed, run_in_view, unpacked
from gristmill.foundation.startup import block_pandas_import

PACKAGE = Path(__file__).parents[3]
FOLDERS = ("data_pipeline", "evaluation", "foundation", "pipelines", "tokenizers", "training")
CODE_SUFFIXES = (".py", ".npz", ".txt", ".yaml")
# Libraries whose version may change a result, or what a task's pickle means.
LIBRARIES = ("numpy", "numba", "pyarrow")


@dataclass(frozen=True)
class NodeRequirements:
    """Versions, packages and folders that a node must have as the driver has them.

    folder: the driver's current folder, from which relative paths start. versions: see `versions_here`. probe: a file
    below the work folder that the driver wrote, with its content; None: not checked. objects: the store through which
    files travel, None if the work folder is on a disk that all nodes share. object_probe: an object there that every
    node must read."""

    folder: str
    versions: Mapping[str, str]
    probe: tuple[str, str] | None = None
    objects: TaskObjects | None = None
    object_probe: str = ""


@dataclass(frozen=True)
class NodeReport:
    """host: the node's name. time: its clock, seconds since 1970. problem: why it cannot take part, or ""."""

    host: str
    time: float
    problem: str


def versions_here() -> dict[str, str]:
    """The digest of gristmill's files and the versions of Python and LIBRARIES in this process."""
    return {"gristmill": package_digest(), "Python": platform.python_version()} | {
        name: _version(name) for name in LIBRARIES
    }


@cache
def package_digest() -> str:
    """The first 16 hex digits of the SHA-256 of gristmill's code and tables, with their names."""
    hasher = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((PACKAGE / folder).rglob("*")):
            if path.suffix in CODE_SUFFIXES:
                content = path.read_bytes()
                hasher.update(f"{path.relative_to(PACKAGE).as_posix()}\0{len(content)}\0".encode() + content)
    return hasher.hexdigest()[:16]


@cache
def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def report(place: NodeRequirements) -> NodeReport:
    """Whether tasks that the driver starts from `place` can run on this node."""
    return NodeReport(socket.gethostname(), time.time(), _problem(place))


def run_task(order: PickledValue, place: NodeRequirements, scratch: Path | Listing) -> PickledValue:
    """`answer_of` the order, which is (function, task), in the driver's folder. scratch: a folder that takes large
    results, or the files that travel through a store.

    A node that differs from the driver, such as one that joined late, answers with an InputError that names it."""
    try:
        if problem := _problem(place):
            raise InputError(f"node {socket.gethostname()}: {problem}")
        _enter(place)
        if isinstance(scratch, Listing):
            return run_in_view(order, scratch)
        answer = answer_of(*unpacked(order))
        return packed(answer, scratch)
    except Exception as error:
        if isinstance(scratch, Listing):
            return packed((failure(error), []), Path(tempfile.gettempdir()))
        return packed(failure(error), scratch)


def load_modules(place: NodeRequirements, modules: Sequence[str]) -> None:
    """Import what later tasks need. Errors are left to the tasks."""
    with suppress(Exception):
        _enter(place)
        block_pandas_import()
        for name in modules:
            importlib.import_module(name)


def _enter(place: NodeRequirements) -> None:
    if place.objects is not None and not os.path.isdir(place.folder):
        return  # nothing is shared
    os.chdir(place.folder)
    if place.folder not in sys.path:
        sys.path.append(place.folder)


def _problem(place: NodeRequirements) -> str:
    here = versions_here()
    differing = [
        f"{name} {here.get(name)}, the driver has {wanted}"
        for name, wanted in place.versions.items()
        if here.get(name) != wanted
    ]
    if differing:
        return f"{'; '.join(differing)}; install the same versions on every node (constraints.txt)"
    if place.objects is not None:
        return _store_problem(place.objects, place.object_probe) if place.object_probe else ""
    if not os.path.isdir(place.folder):
        return f"the folder {place.folder}, where the command was started, is not here; share it under this path"
    if place.probe is not None and not _holds(*place.probe):
        return (
            f"the work folder {os.path.dirname(place.probe[0])} is not the driver's; it must be on a file system that "
            "all nodes share under the same path"
        )
    return ""


def _store_problem(objects: TaskObjects, probe: str) -> str:
    folder = node_scratch(objects.address)
    try:
        objects.get_bytes(probe)
        folder.mkdir(parents=True, exist_ok=True)
        with locked_temp_dir(folder):
            return ""
    except (InputError, RecipeError) as error:
        return str(error)
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror}); set GRISTMILL_SCRATCH to a folder of each node"


def _holds(path: str, content: str) -> bool:
    try:
        return Path(path).read_text("utf-8") == content
    except OSError:
        return False
