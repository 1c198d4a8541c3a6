"""Slurm engine: the tasks of a map as an array job, whose elements run `gristmill work TASKS N`; for sites without Ray.

Resources, partition and account are sbatch's own variables (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT,
SBATCH_MEM_PER_CPU, ...), which the driver's shell sets. Tasks and answers are files on the file system that all nodes
share, or objects in the store behind the work folder."""

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from gristmill.foundation.engine.carriers import Carrier, SharedFolder, ThroughStore, is_transient
from gristmill.foundation.engine.driver_files import DriverFiles
from gristmill.foundation.engine.engine import Engine, Result, Task, name_of
from gristmill.foundation.engine.node import Place, versions_here
from gristmill.foundation.engine.task_folder import KEY_VARIABLE, SharedFiles, StoredFiles, TaskFolder
from gristmill.foundation.engine.worker_pool import RemoteTraceback
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import scratch_folder
from gristmill.foundation.progress import Reporter

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
        self._place = Place(os.getcwd(), versions_here())

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
        ordered = [tasks[index] for index in order]
        with scratch_folder(self.work_folder) as scratch:
            carrier: Carrier = SharedFolder(scratch, function)
            files: SharedFiles | StoredFiles = SharedFiles(scratch)
            if self._files is not None:
                carrier = ThroughStore(self._files, scratch, function, ordered)
                files = StoredFiles.below(self._files.objects)
            elements = min(len(tasks), MAX_ELEMENTS)
            folder = TaskFolder(files)
            folder.write(map(carrier.order, ordered), self._place, elements, carrier.scratch)
            job = _ArrayJob(scratch, files, elements, self._workers)
            run = _Run(folder, carrier, job, ordered, description)
            try:
                for number, result in run.results(self.poll_seconds):
                    yield order[number], result
                carrier.finish()
            finally:
                if run.missing:  # else the elements end by themselves
                    job.cancel()


class _Run:
    """One map: which tasks have no answer yet, and how often each was lost."""

    def __init__(self, folder: TaskFolder, carrier: Carrier, job: "_ArrayJob", tasks: Sequence[Any], description: str):
        self.folder, self.carrier, self.job, self.tasks, self.description = folder, carrier, job, tasks, description
        self.missing = set(range(len(tasks)))
        self.lost: Counter[int] = Counter()
        self.failures: dict[int, Exception] = {}  # number -> its last error, which another attempt may not meet

    def results(self, poll_seconds: float) -> Generator[tuple[int, Any], None, None]:
        """(number, result) of the tasks as their answers appear; elements that end without them are given again."""
        self.job.submit(sorted({number % self.job.elements for number in self.missing}))
        ended = None
        while True:
            yield from self._answers()
            if not self.missing:
                return
            if self.job.runs():
                ended = None
            elif time.monotonic() - (ended := ended or time.monotonic()) >= min(ANSWER_SECONDS, 10 * poll_seconds):
                self.job.submit(self._lost_elements())
                continue
            time.sleep(poll_seconds)

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
                    f"{self.description}: task {number + 1} of {len(self.tasks)}{name_of(self.tasks[number])} was lost "
                    f"{ATTEMPTS} times; {self.job.last_words()}; what is finished is kept: ask for more memory or time "
                    "(SBATCH_MEM_PER_CPU, SBATCH_TIMELIMIT) and run the same command again"
                )
        return sorted(firsts)


class _ArrayJob:
    """The array jobs of one map, one after the other. folder: of this machine, temporary. files: the tasks, which the
    elements read; in a shared folder their output is beside them."""

    def __init__(self, folder: Path, files: SharedFiles | StoredFiles, elements: int, workers: int):
        self.folder, self.files, self.elements, self.workers = folder, files, elements, workers
        self.number = ""

    def submit(self, elements: Sequence[int]) -> None:
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
        self.number = _run(command).strip().split(";")[0]

    def runs(self) -> bool:
        """Whether Slurm still has an element of the job."""
        said = _run(["squeue", "--noheader", "--format=%i", f"--jobs={self.number}"], is_checked=False)
        return bool(said.strip())

    def cancel(self) -> None:
        if self.number:
            _run(["scancel", self.number], is_checked=False)

    def last_words(self) -> str:
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
