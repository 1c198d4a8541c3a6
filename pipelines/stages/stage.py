"""Definition of a pipeline stage: name, identity (config, inputs, code version) and run function."""

import hashlib
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import DigestCache
from gristmill.foundation.lock import Lock
from gristmill.foundation.manifest import MANIFEST_NAME
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.user_code import is_reference, read_source
from gristmill.pipelines.recipes.config import Recipe


@dataclass(frozen=True)
class StageContext:
    """Arguments of a stage's run function.

    folder: the output folder; it may hold finished files of an earlier run that was stopped.
    inputs: the complete folders of the stages named in Stage.inputs, by stage name.
    cache: a folder shared by all stages and runs, keyed by content; in no manifest, and may be removed.
    lock: the pinned raw files by source (used by `curate` only).
    digests: of output files that the stage hashed, which are not hashed again for the manifest."""

    recipe: Recipe
    folder: Path
    inputs: Mapping[str, Path]
    cache: Path
    lock: Lock
    engine: Engine
    reporter: Reporter
    digests: DigestCache = field(default_factory=DigestCache)


@dataclass(frozen=True)
class Stage:
    """code_version: raised whenever a code change alters the stage's output.

    config: the recipe fields that determine the output, as JSON; with the inputs' fingerprints they identify the
    stage. run: writes the folder and returns metadata for the manifest (counts, sizes, vocabulary).
    sections: the recipe sections the stage reads; those without defaults are required to run it.
    reads_raw: the identity includes the locked raw files. parallel: under torchrun the stage runs on every rank.
    worker_modules: what workers import for its tasks. by_tasks: its tasks read its inputs; the driver needs few
    of their bytes."""

    name: str
    code_version: int
    inputs: tuple[str, ...]
    config: Callable[[Recipe], dict[str, Any]]
    run: Callable[[StageContext], dict[str, Any]]
    sections: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    reads_raw: bool = False
    parallel: bool = False
    worker_modules: tuple[str, ...] = ()
    by_tasks: bool = False


def check_stage_folder(stage: Stage, workdir: Path) -> None:
    """Raises InputError where a folder or file that no stage wrote has the stage's name."""
    folder = workdir / stage.name
    if os.path.lexists(folder) and not (folder / MANIFEST_NAME).is_file():
        raise InputError(
            f"{folder}: folder exists without a manifest, and {stage.name} writes its output there; move it away"
        )


# How evaluation tasks enter the fingerprint of a stage: by name, and task files by content.


def task_identity(tasks: Sequence[str], evaluate: EvaluateConfig) -> list[Any]:
    """["piqa", "my/rivers.yaml"] -> ["piqa", {"task_file": digest}]: a path decides nothing, what the file says does.

    Raises InputError if a task file is absent, RecipeError if it is not a task file, or a Python file is absent."""
    return [_task_identity(name, evaluate) for name in tasks]


def _task_identity(name: str, evaluate: EvaluateConfig) -> Any:
    if is_reference(name):
        path, _, function = name.rpartition(":")
        source = read_source(Path(path), "evaluate.tasks")
        return {"function": function, "sha256": hashlib.sha256(source.encode()).hexdigest()}
    return {"task_file": _digest(name, evaluate)} if name.endswith((".yaml", ".yml")) else name


def _digest(name: str, evaluate: EvaluateConfig) -> str:
    # Imported here: lm-eval takes seconds to load, and few recipes name task files.
    from gristmill.evaluation.tasks.task_index import task_file_digest

    return task_file_digest(Path(name), None if evaluate.data is None else Path(evaluate.data))


def run_as_script(name: str) -> None:
    """Runs `gristmill NAME` with the arguments of `python -m gristmill.pipelines.stages.NAME`."""
    sys.argv.insert(1, name)
    runpy.run_module("gristmill.pipelines.cli.main", run_name="__main__")
