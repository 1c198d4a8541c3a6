"""Slurm engine: the tasks of a map as an array job, whose elements run `gristmill work TASKS N`; for sites without Ray.

Resources, partition and account are sbatch's own variables (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT,
SBATCH_MEM_PER_CPU, ...), which the driver's shell sets. Tasks and answers are files on the file system that all nodes
share, or objects in the store behind the work folder."""

import hmac
import os
import secrets
import shutil
import stat
import subprocess
import sys
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

import orjson

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import is_address, is_temporary, scratch_folder, write_atomic
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.store.store import Store
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence, Result, Stragglers, Task, task_name
from gristmill.foundation.runtime.tasks.local import RemoteTraceback
from gristmill.foundation.runtime.tasks.node import NodeRequirements, run_task, versions_here
from gristmill.foundation.runtime.tasks.task_files import TASKS_FOLDER, Listing, TaskObjects
from gristmill.foundation.runtime.tasks.transport import (
    DriverFiles,
    PickledValue,
    SharedFolder,
    TaskTransport,
    ThroughStore,
    is_transient,
)

# A folder of tasks that any process which sees it can run, such as the elements of a Slurm array job.
#
# `place.json`: what a node must have. `orders/N.task`: function and task N. `answers/N.task`: its answer, whole or
# absent. Element e of E runs the tasks e, e + E, e + 2 E, ..., which are ordered by size, and leaves out those with
# an answer. The folder is on a file system that all nodes share (`SharedFiles`) or in a store (`StoredFiles`).

PLACE_NAME = "place.json"
KEY_VARIABLE = "GRISTMILL_TASKS_KEY"
DIGEST, DIGEST_BYTES = "sha256", 32


class TaskFiles(Protocol):
    """The files of a folder of tasks, each whole or absent."""

    def put(self, name: str, content: bytes) -> None: ...

    def get(self, name: str) -> bytes:
        """Raises OSError or InputError."""
        ...

    def remove(self, name: str) -> None: ...

    def names(self, folder: str) -> Iterable[str]:
        """Names of the files in it, without the folder."""
        ...


@dataclass(frozen=True)
class SharedFiles:
    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    def put(self, name: str, content: bytes) -> None:
        write_atomic(self.folder / name, content)

    def get(self, name: str) -> bytes:
        """Raises InputError for a file that another user may have written: a task names the function that runs."""
        path = self.folder / name
        for place in (path, path.parent, self.folder):
            state = place.stat()
            if state.st_uid not in (os.geteuid(), 0) or state.st_mode & stat.S_IWOTH:
                raise InputError(
                    f"{place}: another user can write here, so its tasks are not run; "
                    f"use a folder of your own, or `chmod o-w {place}`"
                )
        return path.read_bytes()

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()

    def names(self, folder: str) -> Iterable[str]:
        directory = self.folder / folder
        return [path.name for path in directory.iterdir() if not is_temporary(path)] if directory.is_dir() else []


@dataclass(frozen=True)
class StoredFiles:
    """Below an address. Each object begins with its HMAC: orders and answers are pickles, which others who may write to
    the bucket could replace. key: drawn by the driver; it reaches the nodes by KEY_VARIABLE."""

    address: str
    key: bytes

    @classmethod
    def below(cls, objects: TaskObjects) -> "StoredFiles":
        """A new folder among the tasks' objects, with a new key; it is deleted with them."""
        return cls(f"{objects.address}/{TASKS_FOLDER}/map-{uuid.uuid4().hex[:16]}", secrets.token_bytes(DIGEST_BYTES))

    def __str__(self) -> str:
        return self.address

    @property
    def _store(self) -> Store:
        return Store(self.address)

    def put(self, name: str, content: bytes) -> None:
        content = zlib.compress(content, level=1)
        self._store.put_bytes(name, self._digest(name, content) + content)

    def get(self, name: str) -> bytes:
        signed = self._store.read(name)
        if signed is None:
            raise InputError(f"{self.address}/{name}: no such object")
        content = signed[DIGEST_BYTES:]
        if not hmac.compare_digest(signed[:DIGEST_BYTES], self._digest(name, content)):
            raise InputError(f"{self.address}/{name}: not written by this run, or {KEY_VARIABLE} is another run's")
        return zlib.decompress(content)

    def remove(self, name: str) -> None:
        self._store.delete(name)

    def names(self, folder: str) -> Iterable[str]:
        return [name.removeprefix(f"{folder}/") for name in self._store.list(folder)]

    def _digest(self, name: str, content: bytes) -> bytes:
        place = f"{self.address}/{name}\0".encode()
        return hmac.digest(self.key, place + content, DIGEST)


@dataclass(frozen=True)
class TaskFolder:
    files: TaskFiles

    @classmethod
    def at(cls, location: str) -> "TaskFolder":
        """For a node. Raises RecipeError if it needs a key that the environment does not have."""
        if not is_address(location):
            return cls(SharedFiles(Path(location)))
        try:
            return cls(StoredFiles(location.rstrip("/"), bytes.fromhex(os.environ[KEY_VARIABLE])))
        except (KeyError, ValueError) as error:
            raise RecipeError(
                f"{location}: {KEY_VARIABLE} is not set to the key of this folder; `gristmill run --engine slurm` "
                "gives it to its jobs"
            ) from error

    def write(
        self, orders: Iterable[PickledValue], place: NodeRequirements, elements: int, scratch: Path | Listing
    ) -> None:
        """The tasks, numbered in this order, for so many elements. scratch: see `run_task`."""
        count = 0
        for number, order in enumerate(orders):
            self.files.put(f"orders/{_name(number)}", order.to_bytes())
            count = number + 1
        listing = asdict(scratch) if isinstance(scratch, Listing) else None
        content = {"place": asdict(place), "tasks": count, "elements": elements, "listing": listing}
        self.files.put(PLACE_NAME, orjson.dumps(content))

    def run(self, element: int) -> None:
        """The tasks of one element. A task that fails leaves its exception as its answer.

        Raises InputError if the folder holds no tasks, RecipeError for an element that is not one of its."""
        try:
            content = orjson.loads(self.files.get(PLACE_NAME))
            place = replace(NodeRequirements(**content["place"]), probe=None)
            tasks, elements = content["tasks"], content["elements"]
            scratch = _scratch(self.files, content["listing"])
        except (OSError, InputError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.files}: no folder of tasks ({error}); `gristmill run --engine slurm` writes it and names it"
            ) from error
        if not 0 <= element < elements:
            raise RecipeError(f"element {element}: the tasks of {self.files} have the elements 0 to {elements - 1}")
        if isinstance(scratch, Listing):
            place = replace(place, objects=scratch.objects)
        answered = self.answered()
        for number in range(element, tasks, elements):
            if number not in answered:
                answer = run_task(self._get(f"orders/{_name(number)}"), place, scratch)
                self.files.put(f"answers/{_name(number)}", answer.to_bytes())

    def answered(self) -> set[int]:
        """The numbers of the tasks that have an answer."""
        return {int(name.removesuffix(".task")) for name in self.files.names("answers")}

    def answer(self, number: int) -> PickledValue:
        """Answer of `run_task`."""
        return self._get(f"answers/{_name(number)}")

    def forget(self, number: int) -> None:
        """The answer, so that the task runs again."""
        self.files.remove(f"answers/{_name(number)}")

    def _get(self, name: str) -> PickledValue:
        try:
            return PickledValue.from_bytes(self.files.get(name))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.files}/{name}: a task's file cannot be read ({error}); run the command again"
            ) from error


def _name(number: int) -> str:
    return f"{number:07d}.task"


def _scratch(files: TaskFiles, listing: dict | None) -> Path | Listing:
    if isinstance(files, SharedFiles):
        return files.folder
    assert listing is not None
    return Listing(TaskObjects(**listing["objects"]), listing["digest"], listing["root"])


ATTEMPTS = 4  # of a task whose element ended without its answer
MAX_ELEMENTS = 1000  # Slurm's MaxArraySize is 1001 by default
POLL_SECONDS = 1.0
ANSWER_SECONDS = 60.0  # a file of another node may be seen so much later (NFS)
COMMAND_SECONDS = 25.0
NODE_OUTPUT = "/tmp/gristmill-%A-%a.log"  # of an element on a node that shares no folder; removed if it ends well


class SlurmEngine(Engine):
    """workers: elements that run at once. store: the address behind the work folder, through which files travel; "":
    the work folder must be the same on every node.

    Raises RecipeError if sbatch is not there."""

    def __init__(
        self,
        workers: int,
        reporter: Reporter,
        work_folder: Path,
        poll_seconds: float = POLL_SECONDS,
        store: str = "",
    ):
        for program in ("sbatch", "squeue", "scancel"):
            if shutil.which(program) is None:
                raise RecipeError(
                    f"--engine slurm: the program {program} is not here; run the command on a login node of the cluster"
                )
        self.reporter, self.work_folder, self._workers = reporter, work_folder.absolute(), workers
        self.poll_seconds = poll_seconds
        self._files = DriverFiles(self.work_folder, store) if store else None
        self._place = NodeRequirements(os.getcwd(), versions_here())

    @property
    def workers(self) -> int:
        return self._workers

    def close(self) -> None:
        """Remove the tasks' files from the store. Each map's job has ended with it."""
        if self._files is not None:
            self._files.clear()

    def _results(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], weights: Sequence[float], description: str
    ) -> Generator[tuple[int, Result], None, None]:
        if not tasks:
            return
        order = sorted(range(len(tasks)), key=lambda index: -weights[index])
        ordered = LazySequence(tasks.__getitem__, order)
        with scratch_folder(self.work_folder) as scratch:
            carrier: TaskTransport = SharedFolder(scratch, function)
            files: SharedFiles | StoredFiles = SharedFiles(scratch)
            if self._files is not None:
                carrier = ThroughStore(self._files, scratch, function, ordered)
                files = StoredFiles.below(self._files.objects)
            elements = min(len(tasks), MAX_ELEMENTS)
            folder = TaskFolder(files)
            folder.write(map(carrier.order, ordered), self._place, elements, carrier.scratch)
            job = _ArrayJob(scratch, files, elements, self._workers)
            run = _Run(folder, carrier, job, ordered, Stragglers([weights[index] for index in order]), description)
            try:
                for number, result in run.results(self.poll_seconds):
                    yield order[number], result
                carrier.finish()
            finally:
                if run.missing or len(job.numbers) > 1:  # else the elements end by themselves
                    job.cancel()


class _Run:
    """One map: which tasks have no answer yet, and how often each was lost."""

    def __init__(
        self,
        folder: TaskFolder,
        carrier: TaskTransport,
        job: "_ArrayJob",
        tasks: Sequence[Any],
        stragglers: Stragglers,
        description: str,
    ):
        self.folder, self.carrier, self.job, self.tasks, self.description = folder, carrier, job, tasks, description
        self.stragglers = stragglers
        self.missing = set(range(len(tasks)))
        self.lost: Counter[int] = Counter()
        self.failures: dict[int, Exception] = {}  # number -> its last error, which another attempt may not meet

    def results(self, poll_seconds: float) -> Generator[tuple[int, Any], None, None]:
        """(number, result) of the tasks as their answers appear; elements that end without them are given again."""
        self.job.submit(self._elements(self.missing))
        for number in self.missing:
            self.stragglers.begin(number)
        ended = None
        while True:
            yield from self._answers()
            if not self.missing:
                return
            if self.job.runs():
                ended = None
                self._run_stragglers()
            elif time.monotonic() - (ended := ended or time.monotonic()) >= min(ANSWER_SECONDS, 10 * poll_seconds):
                self.job.submit(self._lost_elements())
                continue
            time.sleep(poll_seconds)

    def _elements(self, numbers: Iterable[int]) -> list[int]:
        return sorted({number % self.job.elements for number in numbers})

    def _run_stragglers(self) -> None:
        """Elements that stand still are given a second time, beside the first, once there are nodes for them."""
        if len(self._elements(self.missing)) < self.job.workers and (overdue := self.stragglers.overdue()):
            self.job.submit(self._elements(overdue), is_beside=True)

    def _answers(self) -> Generator[tuple[int, Any], None, None]:
        for number in sorted(self.missing & self.folder.answered()):
            is_right, value = self.carrier.answer(self.folder.answer(number))
            if not is_right:
                exception, text = value
                if not is_transient(exception):
                    raise exception from RemoteTraceback(text)
                self.failures[number] = exception
                self.folder.forget(number)
                continue
            self.missing.remove(number)
            self.stragglers.end(number)
            yield number, value

    def _lost_elements(self) -> list[int]:
        """Raises InputError if one of their tasks was lost too often."""
        firsts = {number % self.job.elements: number for number in sorted(self.missing, reverse=True)}
        for number in firsts.values():  # the first unanswered task of each element is the one that it was lost with
            self.lost[number] += 1
            if self.lost[number] >= ATTEMPTS:
                if number in self.failures:
                    raise self.failures[number]
                raise InputError(
                    f"{self.description}: task {number + 1} of {len(self.tasks)}{task_name(self.tasks[number])} was "
                    f"lost {ATTEMPTS} times; {self.job.log_tail()}; what is finished is kept: ask for more memory or "
                    "time (SBATCH_MEM_PER_CPU, SBATCH_TIMELIMIT) and run the same command again"
                )
        return sorted(firsts)


class _ArrayJob:
    """The array jobs of one map, one after the other. folder: of this machine, temporary. files: the tasks, which the
    elements read; in a shared folder their output is beside them."""

    def __init__(self, folder: Path, files: SharedFiles | StoredFiles, elements: int, workers: int):
        self.folder, self.files, self.elements, self.workers = folder, files, elements, workers
        self.numbers: list[str] = []

    @property
    def number(self) -> str:
        """Number of the last one."""
        return self.numbers[-1]

    def submit(self, elements: Sequence[int], is_beside: bool = False) -> None:
        """is_beside: those submitted before still run."""
        program = Path(sys.executable).with_name("gristmill")
        work = f'{quote(str(program))} work {quote(str(self.files))} "$SLURM_ARRAY_TASK_ID"'
        output = f"{self.folder / 'element-%a.log'}"
        if isinstance(self.files, StoredFiles):
            output = NODE_OUTPUT
            log = output.replace("%A", "$SLURM_ARRAY_JOB_ID").replace("%a", "$SLURM_ARRAY_TASK_ID")
            work = f'{KEY_VARIABLE}={self.files.key.hex()} {work} && rm -f "{log}"'
        path = self.folder / "job.sh"
        path.touch(0o600)  # it may hold the key
        path.write_text(f"#!/bin/sh\n{work}\n", "utf-8")
        array = f"--array={','.join(map(str, elements))}%{self.workers}"
        command = [
            "sbatch",
            "--parsable",
            "--job-name=gristmill",
            "--export=ALL",
            array,
            f"--output={output}",
            str(path),
        ]
        number = _run(command).strip().split(";")[0]
        self.numbers = [*self.numbers, number] if is_beside else [number]

    def runs(self) -> bool:
        """Whether Slurm still has an element of the jobs."""
        ask = ["squeue", "--noheader", "--format=%i"]
        return any(_run([*ask, f"--jobs={number}"], is_checked=False).strip() for number in self.numbers)

    def cancel(self) -> None:
        for number in self.numbers:
            _run(["scancel", number], is_checked=False)

    def log_tail(self) -> str:
        """The last line of the newest element's output, such as the kernel's or Slurm's reason, or where it is."""
        if isinstance(self.files, StoredFiles):
            return f"see `sacct -j {self.number}` and, on its node, {NODE_OUTPUT.replace('%A', self.number)}"
        logs = sorted(self.folder.glob("element-*.log"), key=lambda path: path.stat().st_mtime)
        lines = logs[-1].read_text("utf-8", "replace").strip().splitlines() if logs else []
        return f"last it said: {lines[-1]}" if lines else "it said nothing"


def _run(command: Sequence[str], is_checked: bool = True) -> str:
    """Its output. Raises InputError if it fails or does not answer; not checked: "" if it fails, such as squeue for a
    job that Slurm has forgotten."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{command[0]} gave no answer within {COMMAND_SECONDS:.0f} s; is slurmctld up?") from error
    if done.returncode and is_checked:
        raise InputError(f"{command[0]} failed: {(done.stderr or done.stdout).strip()}")
    return "" if done.returncode else done.stdout
