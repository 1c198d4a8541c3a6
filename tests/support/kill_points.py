"""A stage `train` that is killed after each file-system call in turn, and run again. As a program:
FOLDER in_step|asynchronous each|changes.

FOLDER/whole is the run that nobody kills. Prints {"calls": [names in order], "failures": [...]}. Forks from a process
that has done one run in its one thread, so that torch is loaded to the last module and a run costs little.

each: every call of three steps and the manifest. changes: every second one from the second step's save on, and the
first of each kind, without fsync, which changes nothing that a killed process's successor can see."""

import contextlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gristmill.foundation.manifest import differences, read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.provenance.verify import reproduce
from gristmill.pipelines.recipes.recipe_file import validate
from gristmill.pipelines.stages.runner import Runner
from gristmill.pipelines.stages.stage import Stage, StageContext
from gristmill.pipelines.workdir.raw_files import lock_raw_files
from tests.support.training_runs import BATCH, MODEL, digests, new_run

KILLED = 9
PATH_CALLS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")


class Calls:
    """Names every call that changes files below the folder, and ends the process before call number `kill_at`."""

    def __init__(self, folder: Path, kill_at: int):
        self.folder, self.kill_at, self.names = str(folder), kill_at, list[str]()

    def __enter__(self) -> "Calls":
        fsync = os.fsync

        def counted(descriptor: Any) -> None:
            self.note("os.fsync", "")
            fsync(descriptor)

        os.fsync = counted
        sys.addaudithook(self.audit)
        return self

    def __exit__(self, *_: object) -> None:
        self.folder = "no more"

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(self.folder):
                self.note(event, path)
        elif event in PATH_CALLS and (self.folder in str(arguments[0]) or "/" not in str(arguments[0])):
            changes = event != "os.mkdir" or not os.path.exists(arguments[0])
            if changes:  # shutil.rmtree names files relative to a descriptor of their folder
                self.note(event, arguments[0])

    def note(self, name: str, path: object) -> None:
        if self.folder != "no more":
            self.names.append(f"{name} {path}")
            if len(self.names) == self.kill_at:
                os._exit(KILLED)


def train_stage(asynchronous: bool, steps: int) -> Stage:
    """Each step is saved, and the last checkpoint kept."""

    def run(context: StageContext) -> dict[str, Any]:
        saving = {"every": 1, "keep_last": 1, "asynchronous": asynchronous}
        tokens = steps * BATCH * MODEL.sequence_length
        return new_run(context.folder, tokens=tokens, checkpoint=saving, monitoring={"trackers": []}).train()

    return Stage("train", 1, (), lambda recipe: {}, run, libraries=("torch",), reads_raw=True)


def run_stage(base: Path, workdir: Path, stage: Stage, kill_at: int) -> list[str]:
    """The names of its calls."""
    recipe = validate(
        {
            "name": "points",
            "sources": [{"name": "raw", "format": "text", "paths": [str(base / "raw.txt")]}],
            "model": {"layers": 1, "width": 8, "heads": 2, "sequence_length": 8},
            "train": {"tokens": 64, "batch_tokens": 16},
        },
        "points",
    )
    with Calls(workdir, kill_at) as calls:
        lock = lock_raw_files(recipe, workdir, LocalEngine(1, Reporter.silent()))
        Runner(recipe, workdir, [stage], lock, Reporter.silent()).run()
    return calls.names


def forked(work: Callable[[], object]) -> tuple[int, str]:
    """(exit code, what it printed) of a fork that does the work."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        try:
            print(json.dumps(work()), flush=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def wrong_after(base: Path, stage: Stage, kill_at: int, whole: dict[str, str]) -> str | None:
    """What is not as in the run that nobody killed, when one is killed before call kill_at and started again."""
    workdir = base / "killed"
    shutil.rmtree(workdir, ignore_errors=True)
    code, said = forked(lambda: run_stage(base, workdir, stage, kill_at))
    if code != KILLED:
        return f"ended with {code} instead of the kill: {said[-500:]}"
    code, said = forked(lambda: run_stage(base, workdir, stage, 0))
    if code:
        return f"did not go on: {said[-800:]}"
    if digests(workdir / "train") != whole:
        return f"other bytes: {sorted(set(digests(workdir / 'train').items()) ^ set(whole.items()))}"
    found = differences(workdir / "train", read_manifest(workdir / "train"))
    hidden = [path.name for path in workdir.glob(".train*")]
    hidden += [path.name for path in (workdir / "train").rglob(".*") if path.name != ".metadata"]
    return f"verify: {found}, left over: {hidden}" if found or hidden else None


def main() -> None:
    base, asynchronous, each = Path(sys.argv[1]).resolve(), sys.argv[2] == "asynchronous", sys.argv[3] == "each"
    base.mkdir(parents=True)
    (base / "raw.txt").write_text("any text\n")
    stage = train_stage(asynchronous, 3 if each else 2)
    run_stage(base, base / "first", train_stage(False, 1), 0)
    code, said = forked(lambda: run_stage(base, base / "whole", stage, 0))
    assert code == 0, said
    names = json.loads(said.splitlines()[-1])
    whole = digests(base / "whole" / "train")
    failures = []
    first = 0 if each else next(index for index, name in enumerate(names) if "step-00000002" in name)
    points = [index + 1 for index in range(first, len(names)) if each or "fsync" not in names[index]]
    if not each:
        kinds = [names[point - 1].partition(" ")[0] for point in points]
        points = [point for place, point in enumerate(points) if place % 2 == 0 or kinds.index(kinds[place]) == place]
    for kill_at in points:
        if wrong := wrong_after(base, stage, kill_at, whole):
            failures.append(f"killed before call {kill_at} ({names[kill_at - 1]}): {wrong}")
    verdict = reproduce(base / "killed" / "train", base / "again", [stage], LocalEngine(1, Reporter.silent()))
    calls = [names[kill_at - 1] for kill_at in points]
    print(json.dumps({"calls": calls, "failures": failures, "differences": verdict.differences}))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
