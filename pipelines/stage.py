"""What a stage is: a name, what decides its bytes, and a function that fills a folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.foundation.lock import Lock
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.config import Recipe


@dataclass(frozen=True)
class StageContext:
    """Everything a stage may know.

    folder: the half-done folder to fill; whole shards of an earlier, killed run may stand in it already.
    inputs: the whole folders of the earlier stages this one names, by stage name.
    cache: a folder beside the stages that outlives them, for work that is named by what it was made from (so it is
    right whenever it is found). It may be removed at any time; no manifest speaks of it.
    lock: the pinned raw files by source (used by `curate` alone)."""

    recipe: Recipe
    folder: Path
    inputs: Mapping[str, Path]
    cache: Path
    lock: Lock
    workers: int
    reporter: Reporter


@dataclass(frozen=True)
class Stage:
    """code_version is raised whenever a change of the code changes what the stage writes.

    config picks the part of the recipe that decides the bytes, as JSON; it and the inputs' fingerprints are the
    stage's identity. run fills the folder and returns facts for the manifest: counts, sizes, vocabulary.
    sections: the recipe's sections that the stage reads (one without a default must be written for it to run).
    reads_raw: its identity includes the locked raw files. parallel: under torchrun it runs on every rank."""

    name: str
    code_version: int
    inputs: tuple[str, ...]
    config: Callable[[Recipe], dict[str, Any]]
    run: Callable[[StageContext], dict[str, Any]]
    sections: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    reads_raw: bool = False
    parallel: bool = False
