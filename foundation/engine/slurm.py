"""Slurm engine: the tasks of a map as an array job, whose elements run `gristmill work TASKS N`; for sites without Ray.

Resources, partition and account are sbatch's own variables (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT,
SBATCH_MEM_PER_CPU, ...), which the driver's shell sets. Answers are files on the file system that all nodes share."""

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from gristmill.foundation.engine.engine import Engine, Result, Task, name_of
from gristmill.foundation.engine.node import Place, versions_here
from gristmill.foundation.engine.task_folder import TaskFolder
from gristmill.foundation.engine.worker_pool import RemoteTraceback
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import scratch_folder
from gristmill.foundation.progress import Reporter

ATTEMPTS = 4  # of a task whose element ended without its answer
MAX_ELEMENTS = 1000  # Slurm's MaxArraySize is 1001 by default
POLL_SECONDS = 1.0
ANSWER_SECONDS = 60.0  # a file of another node may be seen so much later (NFS)
COMMAND_SECONDS = 25.0


class SlurmEngine(Engine):
    """workers: elements that run at once. work_folder: the same on every node.

    Raises RecipeError if sbatch is not there."""

    def __init__(self, workers: int, reporter: Reporter, work_folder: Path, poll_seconds: float = POLL_SECONDS):
        for program in ("sbatch", "squeue", "scancel"):
            if shutil.which(program) is None:
                raise RecipeError(
                    f"--engine slurm: the program {program} is not here; run the command on a login node of the cluster"
                )
        self.reporter, self.work_folder, self._workers = reporter, work_folder.absolute(), workers
        self.poll_seconds = poll_seconds
        self._place = Place(os.getcwd(), versions_here())

    @property
    def workers(self) -> int:
        return self._workers

    def close(self) -> None:
        """Nothing: each map's job has ended with it."""

    def _results(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], weights: Sequence[float], description: str
    ) -> Generator[tuple[int, Result], None, None]:
        if not tasks:
            return
        order = sorted(range(len(tasks)), key=lambda index: -weights[index])
        with scratch_folder(self.work_folder) as scratch:
            folder = TaskFolder(scratch)
            elements = min(len(tasks), MAX_ELEMENTS)
            folder.write(function, [tasks[index] for index in order], self._place, elements)
            job = _ArrayJob(scratch, elements, self._workers)
            try:
                for number, result in self._answers(folder, job, [tasks[index] for index in order], description):
                    yield order[number], result
            finally:
                job.cancel()

    def _answers(
        self, folder: TaskFolder, job: "_ArrayJob", tasks: Sequence[Any], description: str
    ) -> Generator[tuple[int, Any], None, None]:
        """(number, result) of the tasks as their answers appear; elements that end without them are given again."""
        missing = set(range(len(tasks)))
        lost: Counter[int] = Counter()
        job.submit(sorted({number % job.elements for number in missing}))
        ended = None
        while missing:
            for number in sorted(number for number in missing if folder.has_answer(number)):
                missing.remove(number)
                yield number, _value(folder.answer(number))
            if not missing:
                return
            if job.runs():
                ended = None
                time.sleep(self.poll_seconds)
                continue
            ended = ended or time.monotonic()
            if time.monotonic() - ended < min(ANSWER_SECONDS, 10 * self.poll_seconds):
                time.sleep(self.poll_seconds)
                continue
            firsts = {number % job.elements: number for number in sorted(missing, reverse=True)}
            for number in firsts.values():  # the first unanswered task of each element is the one that it was lost with
                lost[number] += 1
                if lost[number] >= ATTEMPTS:
                    raise InputError(
                        f"{description}: task {number + 1} of {len(tasks)}{name_of(tasks[number])} was lost "
                        f"{ATTEMPTS} times; {job.last_words()}; what is finished is kept: ask for more memory or time "
                        "(SBATCH_MEM_PER_CPU, SBATCH_TIMELIMIT) and run the same command again"
                    )
            job.submit(sorted(firsts))


def _value(answer: tuple[bool, Any]) -> Any:
    is_right, value = answer
    if is_right:
        return value
    exception, text = value
    raise exception from RemoteTraceback(text)


class _ArrayJob:
    """The array jobs of one map, one after the other. folder: takes the elements' output."""

    def __init__(self, folder: Path, elements: int, workers: int):
        self.folder, self.elements, self.workers = folder, elements, workers
        self.number = ""

    def submit(self, elements: Sequence[int]) -> None:
        program = Path(sys.executable).with_name("gristmill")
        script = f"#!/bin/sh\nexec '{program}' work '{self.folder}' \"$SLURM_ARRAY_TASK_ID\"\n"
        path = self.folder / "job.sh"
        path.write_text(script, "utf-8")
        array = f"--array={','.join(map(str, elements))}%{self.workers}"
        output = f"--output={self.folder / 'element-%a.log'}"
        said = _run(["sbatch", "--parsable", "--job-name=gristmill", "--export=ALL", array, output, str(path)])
        self.number = said.strip().split(";")[0]

    def runs(self) -> bool:
        """Whether Slurm still has an element of the job."""
        said = _run(["squeue", "--noheader", "--format=%i", f"--jobs={self.number}"], is_checked=False)
        return bool(said.strip())

    def cancel(self) -> None:
        if self.number:
            _run(["scancel", self.number], is_checked=False)

    def last_words(self) -> str:
        """The last line of the newest element's output, such as the kernel's or Slurm's reason."""
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
