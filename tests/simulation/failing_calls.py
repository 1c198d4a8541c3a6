"""Runs a stage in which one file-system call fails, and the stage once more. As a program: FOLDER STAGE COUNT SEED
[small] tries COUNT calls of the stage, with twenty small sources instead of two if it says so, and prints one
JSON line for each fault and one with the numbers. COUNT 0: all calls of one worker (EveryCall; as root, and FOLDER best
in memory, /dev/shm)."""

import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any, TextIO

import xxhash

from gristmill.pipelines.workdir.remote import LEASE_NAME
from tests.support import kills
from tests.support.kills import Launcher, Run, files_of, orphans_of, write_corpus, write_small_sources

SOURCE = Path(__file__).with_name("failing_calls.c")
STAGES = ("curate", "tokenizer", "index", "train", "evaluate", "report")
STUCK_SECONDS = 120


def compile_library(folder: Path) -> Path | None:
    """The library that makes calls fail; None where no gcc is."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "failing_calls.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


@dataclass(frozen=True)
class Failure:
    """One failed call: its number, its kind, its path and the error it returned."""

    number: int
    name: str
    path: str
    errno: int


class FailingStages:
    """A recipe whose stages up to one are complete in `whole`, and runs of that stage from the stages before it."""

    def __init__(self, folder: Path, library: Path, last: str, corpus: Callable[[Path], Path] = write_corpus):
        self.modules = ("gristmill.pipelines.cli.stages",) if last == "curate" else ()
        self.folder, self.library, self.launcher = folder, library, Launcher(folder / "logs", library, self.modules)
        self.recipe, self.whole, self.work = corpus(folder / "raw"), folder / "whole", folder / "work"
        if last != STAGES[0]:
            self.launcher.run("run", self.recipe, "--to", last, "--workdir", self.whole, "--workers", 2, cwd=folder)
        kills.STUCK_SECONDS = STUCK_SECONDS  # kernels are compiled by now
        self.expected: dict[str, str] = {}
        self.counter = folder / "logs" / "counter"

    def close(self) -> None:
        self.launcher.close()

    def begin(self, stage: str) -> None:
        """The work folder as it is before the stage."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for earlier in STAGES[: STAGES.index(stage)]:
            shutil.copytree(self.whole / earlier, self.work / earlier)
            shutil.copy2(self.whole / "lock.json", self.work)

    def run(self, stage: str, fail_at: int, stays: bool = False, journal: Sequence[Path] = ()) -> tuple[int, str, int]:
        """(exit code, output, number of calls). journal: for a power cut, see power_cuts.py."""
        run = self.start(stage, fail_at, stays, journal=journal)
        code = run.finish()
        orphans = orphans_of(run.pid)
        return (
            code,
            run.output() + (f"\nTraceback: processes {orphans} are left" if orphans else ""),
            self.counted()[0],
        )

    def start(self, stage: str, fail_at: int, stays: bool = False, workers: int = 2, **calls: Sequence[Path]) -> Run:
        """calls: arguments of further functions of the library."""
        self.counter.unlink(missing_ok=True)
        arm = (str(self.work), str(self.counter), fail_at, int(stays))
        command = (stage, self.recipe, "--workdir", self.work, "--workers", workers)
        return self.launcher.start(*command, cwd=self.folder, arm=arm, **calls)

    def number_of_calls(self, stage: str, workers: int = 2) -> int:
        self.begin(stage)
        run = self.start(stage, 0, workers=workers)
        assert run.finish() == 0, run.output()
        self.expected = files_of(self.work)
        return self.counted()[0]

    def problems(self, stage: str, fail_at: int, stays: bool = False) -> tuple[Failure, list[str]]:
        """The failed call, and what was not as docs/reliability.md promises. stays: later writes fail too."""
        self.begin(stage)
        code, said, _ = self.run(stage, fail_at, stays)
        _, errno, name, path = self.counted()
        failure = Failure(fail_at, name, path.replace(str(self.folder), ""), errno)
        problems = problems_of(code, said)
        if code == 0 and (different := self.different(self.work)):
            problems.append(f"succeeded with other files: {different}")
        again, said, _ = self.run(stage, 0)
        if again:
            problems.append(f"did not go on: {said[-1500:]}")
        elif different := self.different(self.work):
            problems.append(f"other files after the same command: {different}")
        return failure, problems

    def different(self, work: Path) -> list[str]:
        """Names of the files that are not those of the undisturbed run; nothing hidden may be left either."""
        return sorted({name for name, _ in set(files_of(work).items()) ^ set(self.expected.items())})[:10]

    def counted(self) -> tuple[int, int, str, str]:
        content = self.counter.read_bytes()
        calls, errno = struct.unpack("qq", content[:16])
        return calls, errno, content[16:32].rstrip(b"\0").decode(), content[32:].partition(b"\0")[0].decode()


class EveryCall:
    """A run of a stage by one worker in which each call fails: in a fork, which goes on to the end in a copy of the
    work folder. What a fork leaves is continued by the same command, once for each content of the folder, however many
    forks leave it (only inodes and times differ between them)."""

    def __init__(self, stages: FailingStages, stage: str):
        self.stages, self.stage = stages, stage
        self.copy, self.log = stages.folder / "copy", stages.folder / "logs" / "fork.log"
        self.continued: dict[str, list[str]] = {}  # digest of a folder -> problems of the same command in it
        self.calls, self.elsewhere = stages.number_of_calls(stage, workers=1), 0
        self.kinds: dict[tuple[str, str], list[int]] = {}  # call, path without its numbers and digests -> its numbers
        self._launcher = Launcher(stages.folder / "continued", stages.library, stages.modules)

    def close(self) -> None:
        self._launcher.close()

    def tried(self, numbers: Container[int]) -> Iterator[tuple[Failure, list[str]]]:
        """These calls; of every three failures one stays. `elsewhere` are calls of other threads and processes."""
        stages, pipes = self.stages, [self.stages.folder / name for name in ("asks", "is_told")]
        for pipe in pipes:
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe)
        stages.begin(self.stage)
        run = stages.start(self.stage, 0, workers=1, explore=(*pipes, self.copy, self.log))
        with pipes[0].open(errors="surrogateescape") as questions, pipes[1].open("wb", buffering=0) as answers:
            asked = 0
            for line in questions:
                number, errno, name, path = line.rstrip("\n").split("\t")
                asked += 1
                self.kinds.setdefault((name, re.sub(r"[0-9a-f]{16,}|\d+", "N", path)), []).append(int(number))
                if int(number) not in numbers:
                    answers.write(b"n")
                    continue
                failure = Failure(int(number), name, path.replace(str(stages.folder), ""), int(errno))
                self._copy()
                answers.write(b"a" if failure.number // 3 % 3 == 2 else b"o")
                yield failure, self._problems(int(next(questions)), questions)
                answers.write(b".")
        assert run.finish() == 0 and not stages.different(stages.work), run.output()
        self.elsewhere = stages.counted()[0] - asked

    def tried_by_kind(self) -> Iterator[tuple[Failure, list[str]]]:
        """All calls: first one of each kind, then the others, so that what is cut off has tried what differs."""
        assert list(self.tried(())) == []
        first = {numbers[len(numbers) // 2] for numbers in self.kinds.values()}
        yield from self.tried(first)
        yield from self.tried(set(range(1, self.calls + 1)) - first)

    def _copy(self) -> None:
        shutil.rmtree(self.copy, ignore_errors=True)
        subprocess.run(["cp", "-a", self.stages.work, self.copy], check=True)

    def _problems(self, fork: int, questions: TextIO) -> list[str]:
        watchdog = Timer(STUCK_SECONDS, os.kill, (fork, signal.SIGKILL))
        watchdog.start()
        code = os.waitstatus_to_exitcode(int(next(questions)))
        watchdog.cancel()
        said = self.log.read_text("utf-8", "replace")
        problems = problems_of(code, said)
        digest = digest_of(self.copy)
        if digest not in self.continued:
            self.continued[digest] = self._continue(code)
        return problems + self.continued[digest]

    def _continue(self, code: int) -> list[str]:
        """Problems of the same command in the copy."""
        stages = self.stages
        different = [] if code else self._different()
        problems = [f"succeeded with other files: {different}"] if different else []
        command = (self.stage, stages.recipe, "--workdir", stages.work, "--workers", 1)
        run = self._launcher.start(*command, cwd=stages.folder, enter=(self.copy, stages.work))
        if run.finish():
            return [*problems, f"did not go on: {run.output()[-1500:]}"]
        different = self._different() if code == 0 else stages.different(self.copy)
        return problems + ([f"other files after the same command: {different}"] if different else [])

    def _different(self) -> list[str]:
        """Of a run that succeeded, which may leave out what it keeps for other runs (where a disk has no links)."""
        names = self.stages.different(self.copy)
        return [name for name in names if not name.startswith("cache/") or (self.copy / name).exists()]


def problems_of(code: int, said: str) -> list[str]:
    problems = [] if code in (0, 1) else [f"exit code {code}: {said[-1500:]}"]
    if "Traceback" in said or (code and not said.strip()):
        problems.append(f"not one message: {said[-1500:]}")
    return problems


def digest_of(folder: Path) -> str:
    """Of all names and contents, but for logs and for the lease, which name processes and moments."""
    digest = xxhash.xxh3_128()
    for name, folders, files in os.walk(folder):
        folders[:] = sorted(child for child in folders if name != str(folder) or child != "logs")
        digest.update(f"{name}\0{folders}\0".encode())
        for file in sorted(set(files) - {LEASE_NAME}):
            content = Path(name, file).read_bytes()
            digest.update(b"%s\0%d\0" % (os.fsencode(file), len(content)) + content)
    return digest.hexdigest()


def sample(calls: int, count: int, seed: int) -> Sequence[int]:
    """`count` numbers of calls, evenly spread, from a start drawn by the seed; all for 0."""
    if not 0 < count < calls:
        return range(1, calls + 1)
    step = calls / count
    first = random.Random(seed).random() * step
    return [1 + int(first + k * step) for k in range(count)]


def tried(stages: FailingStages, stage: str, count: int, seed: int) -> Iterator[tuple[Failure, list[str]]]:
    """Each third failure stays: of a disk that is full from then on."""
    for number, call in enumerate(sample(stages.number_of_calls(stage), count, seed)):
        yield stages.problems(stage, call, stays=number % 3 == 2)


def report(kind: type[FailingStages]) -> None:
    """The program: tries calls, and prints what was found."""
    folder, stage, count, seed = Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    folder.mkdir(parents=True)
    library = compile_library(folder)
    assert library is not None, "no gcc"
    stages = kind(folder, library, stage, write_small_sources if sys.argv[5:] == ["small"] else write_corpus)
    every = EveryCall(stages, stage) if kind is FailingStages and not count else None
    kinds: Counter[str] = Counter()
    numbers: dict[str, Any] = {"stage": stage, "tried": 0, "faults": 0}
    try:
        for failure, problems in every.tried_by_kind() if every else tried(stages, stage, count, seed):
            kinds[failure.name] += 1
            numbers["tried"] += 1
            if problems:
                numbers["faults"] += 1
                print(json.dumps({"call": str(failure), "problems": problems}), flush=True)
    finally:
        stages.close()
        every and every.close()
    numbers |= {"continued": len(every.continued), "elsewhere": every.elsewhere} if every else {}
    print(json.dumps(numbers | {"kinds": dict(kinds)}), flush=True)


if __name__ == "__main__":
    report(FailingStages)
