"""sbatch, squeue and scancel for tests: an array's elements are processes of this machine.

Called as `fake_slurm.py FOLDER PROGRAM ARGUMENTS...`; the folder holds a file with the process ids of each job."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

NODES = "FAKE_SLURM_NODES"  # a folder: each element runs on one of two nodes, whose own disks are below it


def install(folder: Path) -> Path:
    """A folder with the three programs, for the front of PATH."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in ("sbatch", "squeue", "scancel"):
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{folder}" {name} "$@"\n')
        path.chmod(0o755)
    return programs


def sbatch(folder: Path, arguments: list[str]) -> None:
    options = dict(one.removeprefix("--").partition("=")[::2] for one in arguments[:-1])
    number = str(100 + len(list(folder.glob("job-*"))))
    elements, _, _ = options["array"].partition("%")
    pids = []
    for element in elements.split(","):
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": element, "SLURM_ARRAY_JOB_ID": number}
        if scratch := os.environ.get(NODES):
            environment["GRISTMILL_SCRATCH"] = f"{scratch}/{int(element) % 2}"
        with Path(options["output"].replace("%a", element).replace("%A", number)).open("wb") as log:
            process = subprocess.Popen(
                ["/bin/sh", arguments[-1]], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
                cwd="/" if scratch else None,
            )  # fmt: skip
        pids.append(str(process.pid))
    (folder / f"job-{number}").write_text(" ".join(pids))
    print(number)


def squeue(folder: Path, arguments: list[str]) -> None:
    for pid in _pids(folder, arguments[-1].partition("=")[2]):
        if runs(pid):
            print(pid)


def scancel(folder: Path, arguments: list[str]) -> None:
    for pid in _pids(folder, arguments[0]):
        if runs(pid):
            os.killpg(pid, signal.SIGKILL)


def _pids(folder: Path, number: str) -> list[int]:
    return [int(pid) for pid in (folder / f"job-{number}").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return not re.search(r"\) Z", Path(f"/proc/{pid}/stat").read_text())
    except OSError:
        return False


if __name__ == "__main__":
    {"sbatch": sbatch, "squeue": squeue, "scancel": scancel}[sys.argv[2]](Path(sys.argv[1]), sys.argv[3:])
