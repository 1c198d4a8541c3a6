"""Runs a stage in which one file-system call fails, and the stage once more. As a program: FOLDER STAGE COUNT SEED
[small] tries COUNT calls of the stage (0: all), with twenty small sources instead of two if it says so, and prints one
JSON line for each fault and one with the numbers."""

import json
import random
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import kills
from tests.support.kills import Launcher, files_of, orphans_of, write_corpus, write_small_sources

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
        modules = ("gristmill.pipelines.cli.stages",) if last == "curate" else ()
        self.folder, self.launcher = folder, Launcher(folder / "logs", library, modules)
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
        self.counter.unlink(missing_ok=True)
        arm = (str(self.work), str(self.counter), fail_at, int(stays))
        command = (stage, self.recipe, "--workdir", self.work, "--workers", 2)
        run = self.launcher.start(*command, cwd=self.folder, arm=arm, journal=journal)
        code = run.finish()
        orphans = orphans_of(run.pid)
        return (
            code,
            run.output() + (f"\nTraceback: processes {orphans} are left" if orphans else ""),
            self._counted()[0],
        )

    def number_of_calls(self, stage: str) -> int:
        self.begin(stage)
        code, said, calls = self.run(stage, 0)
        assert code == 0, said
        self.expected = files_of(self.work)
        return calls

    def problems(self, stage: str, fail_at: int, stays: bool = False) -> tuple[Failure, list[str]]:
        """The failed call, and what was not as docs/reliability.md promises. stays: later writes fail too."""
        self.begin(stage)
        code, said, _ = self.run(stage, fail_at, stays)
        _, errno, name, path = self._counted()
        failure = Failure(fail_at, name, path.replace(str(self.folder), ""), errno)
        problems = [] if code in (0, 1) else [f"exit code {code}: {said[-1500:]}"]
        if "Traceback" in said or (code and not said.strip()):
            problems.append(f"not one message: {said[-1500:]}")
        if code == 0 and (different := self._different()):
            problems.append(f"succeeded with other files: {different}")
        again, said, _ = self.run(stage, 0)
        if again:
            problems.append(f"did not go on: {said[-1500:]}")
        elif different := self._different():
            problems.append(f"other files after the same command: {different}")
        return failure, problems

    def _different(self) -> list[str]:
        """Names of the files that are not those of the undisturbed run; nothing hidden may be left either."""
        return sorted({name for name, _ in set(files_of(self.work).items()) ^ set(self.expected.items())})[:10]

    def _counted(self) -> tuple[int, int, str, str]:
        content = self.counter.read_bytes()
        calls, errno = struct.unpack("qq", content[:16])
        return calls, errno, content[16:32].rstrip(b"\0").decode(), content[32:].partition(b"\0")[0].decode()


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
    kinds: Counter[str] = Counter()
    numbers: dict[str, Any] = {"stage": stage, "calls": stages.number_of_calls(stage), "tried": 0, "faults": 0}
    try:
        for failure, problems in tried(stages, stage, count, seed):
            kinds[failure.name] += 1
            numbers["tried"] += 1
            if problems:
                numbers["faults"] += 1
                print(json.dumps({"call": str(failure), "problems": problems}), flush=True)
    finally:
        stages.close()
    print(json.dumps(numbers | {"kinds": dict(kinds)}), flush=True)


if __name__ == "__main__":
    report(FailingStages)
