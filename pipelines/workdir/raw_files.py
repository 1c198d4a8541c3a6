"""Finds and hashes the raw files and compares them with the lock."""

import os
from pathlib import Path
from typing import Literal

from gristmill.data_pipeline.annotate.list_file import lock_lists
from gristmill.data_pipeline.annotate.tombstones import lock_tombstones
from gristmill.data_pipeline.readers.files import RealPaths, local_path
from gristmill.data_pipeline.readers.read import locate, resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.checksums import LOCK_NAME, Lock, LockedSource, lock_differences, read_lock, write_lock
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import is_address
from gristmill.foundation.manifest import CACHE_FOLDER, LOG_FOLDER, MANIFEST_NAME
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.recipes.config import Recipe

MAX_NAMED = 5
LockUpdate = bool | Literal["added"]  # which differences from the lock are accepted: none, all, or files it has not


def pin(recipe: Recipe, workdir: Path, engine: Engine, update: LockUpdate = False, write: bool = True) -> Lock:
    """The lock of the recipe's sources, compared with the raw files as they are now.

    Raises InputError naming the files if one differs from the lock in the work folder and `update` is not set, or, with
    "added", one that the lock has is gone or changed.
    A source whose request changed in the recipe is locked again without an error."""
    path = workdir / LOCK_NAME
    before = read_lock(path)
    for source in recipe.sources:
        _check_outside(source, workdir)
    sources = [
        LockedSource(name=locked.name, request=locked.request | {"paths": list(source.paths)}, files=locked.files)
        for source, locked in zip(recipe.sources, resolve(recipe.sources, engine, workdir / CACHE_FOLDER), strict=True)
    ]
    lock = Lock(sources=(*sources, *lock_lists(recipe.curate.lists), *lock_tombstones(workdir)))
    if before is not None and update is not True:
        pinned_sources = {source.name: source for source in before.sources}
        for locked in lock.sources:
            pinned = pinned_sources.get(locked.name)
            if pinned is not None and pinned.request == locked.request:
                _check_unchanged(path, pinned, _pinned_files(pinned, locked) if update == "added" else locked)
    if write and lock != before:
        write_lock(path, lock)
    return lock


def local_bytes(recipe: Recipe) -> int:
    """Bytes of the recipe's raw files on this machine. Raises InputError for a path that matches nothing."""
    sources = [source for source in recipe.sources if source.format not in ("python_docs", "datasets")]
    locations = [location for source in sources for location in locate(source).values() if not is_address(location)]
    return sum(os.path.getsize(location) for location in locations if os.path.exists(location))


def _check_outside(source: SourceConfig, workdir: Path) -> None:
    """Raises InputError if the source reads what stages write: it would find other files in every run."""
    if source.format in ("python_docs", "datasets"):
        return
    work = os.path.realpath(workdir)
    folders = [os.path.realpath(local_path(path)) for path in source.paths if not is_address(path)]
    is_below = any(f"{work}/".startswith(f"{folder}/") for folder in folders if os.path.isdir(folder))
    real_path = RealPaths()
    files = (real_path(location) for location in locate(source).values() if not is_address(location))
    tops = {file.removeprefix(f"{work}/").partition("/")[0] for file in files if file.startswith(f"{work}/")}
    if is_below or any(top in (CACHE_FOLDER, LOG_FOLDER) or (workdir / top / MANIFEST_NAME).exists() for top in tops):
        raise InputError(
            f"source {source.name}: its paths hold files of the work folder {workdir}, which every run changes; name a "
            "--workdir outside them, or narrower paths"
        )


def _pinned_files(pinned: LockedSource, current: LockedSource) -> LockedSource:
    """The current source with the files alone whose names are pinned."""
    names = {file.name for file in pinned.files}
    files = tuple(file for file in current.files if file.name in names)
    return LockedSource(name=current.name, request=current.request, files=files)


def _check_unchanged(path: Path, pinned: LockedSource, current: LockedSource) -> None:
    differing = lock_differences(pinned, current)
    if differing:
        more = f"\n  and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
        raise InputError(
            f"source {current.name}: {len(differing)} raw files differ from {path}:\n  "
            + "\n  ".join(differing[:MAX_NAMED])
            + more
            + "\nrestore them, or accept them with --update-lock"
        )
