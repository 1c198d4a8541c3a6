"""`gristmill doctor`: what this machine has, what is missing, and how to get it."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement

from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import print_rows
from gristmill.foundation.startup import host_bytes, usable_cores

PACKAGE = "gristmill"
MIN_FREE_BYTES = 2e9  # of the disk: the demo and its caches take 0.3 GB, a checkpoint of 100M parameters 1.2 GB
MIN_MEMORY_BYTES = 4e9  # curation with two workers and the training of the demo take about 2.5 GB
DEVELOPMENT = ("test", "bench", "docs")  # extras for work on gristmill itself, which nobody else misses


@dataclass(frozen=True)
class SystemCheck:
    """fix: what to do; "" where nothing is wrong. is_required: gristmill does not work without the fix."""

    what: str
    value: str
    fix: str = ""
    is_required: bool = False


def doctor(
    gpus: Annotated[int | None, typer.Option(min=1, help="Fail where torch sees fewer GPUs than this.")] = None,
) -> None:
    """Show what this machine has (versions, devices, cores, memory, disk), what is missing, and how to get it."""
    observations = [*machine(), *libraries(), *enough_devices(gpus)]
    print_rows([("what", "here", "to do"), *((seen.what, seen.value, seen.fix or "-") for seen in observations)])
    wrong = [seen for seen in observations if seen.is_required and seen.fix]
    if wrong:
        raise InputError("; ".join(f"{seen.what}: {seen.fix}" for seen in wrong))
    print(
        "gristmill can run here; `gristmill init FOLDER` writes a recipe of your files, `gristmill run demo` tries all"
    )


def machine() -> Iterator[SystemCheck]:
    """The interpreter, the devices, cores, memory and disk."""
    yield SystemCheck(PACKAGE, _version_of(PACKAGE) or "no version", "")
    yield SystemCheck("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield from devices()
    cores = usable_cores()
    yield SystemCheck("cores", f"{cores} of {os.cpu_count()}" if cores != os.cpu_count() else str(cores))
    memory = host_bytes()
    fix = f"use --workers 1; {MIN_MEMORY_BYTES / 1e9:.0f} GB are comfortable" if memory < MIN_MEMORY_BYTES else ""
    yield SystemCheck("memory", f"{memory / 1e9:.1f} GB", fix)
    yield from disks()


def devices() -> Iterator[SystemCheck]:
    """The accelerators that torch sees. No torch, no training."""
    try:
        import torch
    except ImportError as error:
        yield SystemCheck("devices", "torch cannot be imported", f"pip install torch ({error})", is_required=True)
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield SystemCheck(f"device {index}", f"{properties.name}, {properties.total_memory / 1e9:.0f} GB")
    if not count:
        has_card = shutil.which("nvidia-smi") is not None and torch.version.cuda is None
        fix = "this torch is for CPUs; install its CUDA build to train on the GPU" if has_card else ""
        yield SystemCheck("devices", "no GPU: training runs on the CPU", fix)


def enough_devices(wanted: int | None) -> Iterator[SystemCheck]:
    """Whether torch can compute on so many GPUs, each tried by a small product."""
    if wanted is None:
        return
    import torch

    working = 0
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            ones = torch.ones(64, 64, device=f"cuda:{index}")
            working += int((ones @ ones).sum().item() == 64**3)
        except RuntimeError as error:
            yield SystemCheck(
                f"device {index}", str(error).splitlines()[0], "restart the driver or leave the node out", True
            )
    if working < wanted:
        fix = f"{wanted} are wanted; use another node, or fewer processes a node"
        yield SystemCheck("GPUs that compute", str(working), fix, is_required=True)


def disks() -> Iterator[SystemCheck]:
    """Free space of the current folder, where work/ will be, and the folder of compiled kernels."""
    from gristmill.foundation.runtime.kernels.kernel_files import VARIABLE, kernel_folder

    here = Path.cwd()
    free, is_writable = shutil.disk_usage(here).free, os.access(here, os.W_OK)
    fix = f"free some space; {MIN_FREE_BYTES / 1e9:.0f} GB are enough for the demo" if free < MIN_FREE_BYTES else ""
    if not is_writable:
        fix = "this folder cannot be written; change to another, or give --workdir"
    yield SystemCheck("disk", f"{free / 1e9:.1f} GB free in {here}", fix, is_required=not is_writable)
    kernels = kernel_folder()
    fix = f"set {VARIABLE} to a folder that only you can write to" if kernels is None else ""
    yield SystemCheck("compiled kernels", str(kernels or "compiled anew by every process"), fix)


def libraries() -> Iterator[SystemCheck]:
    """Each required library that is missing or of another version; each extra, with what it lacks."""
    try:
        stated = [Requirement(line) for line in distribution(PACKAGE).requires or ()]
    except PackageNotFoundError:
        yield SystemCheck("libraries", "gristmill is not installed", "pip install gristmill", is_required=True)
        return
    required = [requirement for requirement in stated if extra_of(requirement) is None]
    wrong = [problem for requirement in required if (problem := problem_of(requirement))]
    yield SystemCheck(
        "libraries",
        f"{len(required) - len(wrong)} of {len(required)}; torch {_version_of('torch')}",
        f"pip install {' '.join(map(quoted, wrong))}" if wrong else "",
        is_required=True,
    )
    for extra in sorted(
        {name for requirement in stated if (name := extra_of(requirement)) and name not in DEVELOPMENT}
    ):
        of_extra = [requirement for requirement in stated if extra_of(requirement) == extra]
        missing = [requirement.name for requirement in of_extra if problem_of(requirement)]
        fix = f"for {', '.join(missing)}: pip install 'gristmill[{extra}]'" if missing else ""
        yield SystemCheck(f"extra {extra}", "incomplete" if missing else "complete", fix)


def extra_of(requirement: Requirement) -> str | None:
    """The extra that brings it: `ray; extra == "cluster"` -> "cluster"; None for one that is always needed."""
    match = re.search(r"""extra == ['"]([^'"]+)['"]""", str(requirement.marker or ""))
    return match[1] if match else None


def problem_of(requirement: Requirement) -> Requirement | None:
    """The requirement itself if it is absent or of another version here."""
    installed = _version_of(requirement.name)
    fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
    return None if fits else requirement


def quoted(requirement: Requirement) -> str:
    """torch>=2.11 as a shell takes it: 'torch>=2.11'."""
    text = f"{requirement.name}{requirement.specifier}"
    return f"'{text}'" if requirement.specifier else text


def show_version(asked: bool) -> None:
    """The option --version: one line with what decides how a run behaves."""
    if asked:
        print(f"gristmill {_version_of(PACKAGE)}, torch {_version_of('torch')}, Python {platform.python_version()}")
        sys.exit(0)


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
