"""Finds and hashes the raw files, compares them with the lock, and looks at the first records of each source."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from gristmill.data_pipeline.annotate.list_file import lock_lists
from gristmill.data_pipeline.annotate.tombstones import lock_tombstones
from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.files import RealPaths, local_path
from gristmill.data_pipeline.readers.read import locate
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError, nearest_name
from gristmill.foundation.files import is_address
from gristmill.foundation.lock import LOCK_NAME, Lock, LockedSource, lock_differences, read_lock, write_lock
from gristmill.foundation.manifest import CACHE_FOLDER, LOG_FOLDER, MANIFEST_NAME
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.startup import DeferredModule
from gristmill.pipelines.recipes.config import Recipe

MAX_NAMED = 5
LockUpdate = bool | Literal["added"]  # which differences from the lock are accepted: none, all, or files it has not


def lock_raw_files(
    recipe: Recipe, workdir: Path, engine: Engine, update: LockUpdate = False, write: bool = True
) -> Lock:
    """The lock of the recipe's sources, compared with the raw files as they are now.

    Raises InputError naming the files if one differs from the lock in the work folder and `update` is not set, or, with
    "added", one that the lock has is gone or changed.
    A source whose request changed in the recipe is locked again without an error."""
    path = workdir / LOCK_NAME
    before = read_lock(path)
    work, real_path = os.path.realpath(workdir), RealPaths()
    for source in recipe.sources:
        _check_outside(source, workdir, work, real_path)
    sources = [
        LockedSource(name=locked.name, request=locked.request | {"paths": list(source.paths)}, files=locked.files)
        for source, locked in zip(recipe.sources, resolve(recipe.sources, engine, workdir / CACHE_FOLDER), strict=True)
    ]
    lock = Lock(sources=(*sources, *lock_lists(recipe.curate.lists), *lock_tombstones(workdir)))
    if before is not None and update is not True:
        former_sources = {source.name: source for source in before.sources}
        for locked in lock.sources:
            former = former_sources.get(locked.name)
            if former is not None and former.request == locked.request:
                _check_unchanged(path, former, locked, update != "added")
    if write and lock != before:
        write_lock(path, lock)
    return lock


def local_bytes(recipe: Recipe) -> int:
    """Bytes of the recipe's raw files on this machine. Raises InputError for a path that matches nothing."""
    sources = [source for source in recipe.sources if source.format not in ("python_docs", "datasets")]
    locations = (location for source in sources for _, location in locate(source) if not is_address(location))
    return sum(os.path.getsize(location) for location in locations if os.path.exists(location))


def _check_outside(source: SourceConfig, workdir: Path, work: str, real_path: RealPaths) -> None:
    """Raises InputError if the source reads what stages write: it would find other files in every run. work: the real
    path of the work folder."""
    if source.format in ("python_docs", "datasets"):
        return
    folders = [os.path.realpath(local_path(path)) for path in source.paths if not is_address(path)]
    is_below = any(f"{work}/".startswith(f"{folder}/") for folder in folders if os.path.isdir(folder))
    files = (real_path(location) for _, location in locate(source) if not is_address(location))
    tops = {file.removeprefix(f"{work}/").partition("/")[0] for file in files if file.startswith(f"{work}/")}
    if is_below or any(top in (CACHE_FOLDER, LOG_FOLDER) or (workdir / top / MANIFEST_NAME).exists() for top in tops):
        raise InputError(
            f"source {source.name}: its paths hold files of the work folder {workdir}, which every run changes; name a "
            "--workdir outside them, or narrower paths"
        )


def _check_unchanged(path: Path, former: LockedSource, current: LockedSource, with_new: bool) -> None:
    differing = lock_differences(former, current, with_new)
    if differing:
        more = f"\n  and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
        raise InputError(
            f"source {current.name}: {len(differing)} raw files differ from {path}:\n  "
            + "\n  ".join(differing[:MAX_NAMED])
            + more
            + "\nrestore them, or accept them with --update-lock"
        )


# A look at the first records of a recipe's sources, so that `check` and `run` tell in seconds what curation would tell
# at its end: a field that no record has, an encoding, empty files, languages that the recipe excludes.

read = DeferredModule("gristmill.data_pipeline.readers.read")  # numba and pyarrow, for recipes with local files
language = DeferredModule("gristmill.data_pipeline.signals.language")

FILES, RECORDS = 3, 8  # of a source, where a file holds that many records; records of each file
MAX_FILES = 24  # of files that hold one record
MAX_FILE_BYTES = 64_000_000  # of a Parquet file or a compressed one, which may be read whole
MAX_LANGUAGE_CHARS = 2000


@dataclass(frozen=True)
class SourceSample:
    """files: how many the source has. empty_files: of the looked-at files, those without a byte."""

    source: SourceConfig
    files: int
    looked_at: int
    empty_files: int
    texts: tuple[str, ...]
    unreadable: tuple[Unreadable, ...]


def look_at(source: SourceConfig) -> SourceSample | None:
    """The first records of a few files spread over the source; None for addresses and what is not in files. Raises
    InputError for a glob without files."""
    if source.format in ("python_docs", "datasets") or any(map(is_address, source.paths)):
        return None
    located = locate(source)
    files = sum(1 for _ in located)
    step = max(1, files // MAX_FILES)
    texts: list[str] = []
    unreadable: list[Unreadable] = []
    spread = [location for _, location in islice(located, 0, MAX_FILES * step, step)]
    chosen = spread[:: max(1, len(spread) // FILES)][:FILES]
    chosen += [location for location in spread if location not in chosen]
    looked_at = empty = 0
    for location in chosen:
        if looked_at >= FILES and len(texts) + len(unreadable) >= FILES * RECORDS:
            break
        looked_at += 1
        empty += Path(location).stat().st_size == 0
        if Path(location).stat().st_size <= MAX_FILE_BYTES or source.format in ("jsonl", "warc", "wet", "arc", "mbox"):
            for record in _records(location, source):
                if isinstance(record, Record):
                    texts.append(record.text)
                else:
                    unreadable.append(record)
    return SourceSample(source, files, looked_at, empty, tuple(texts), tuple(unreadable))


def _records(location: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    try:
        yield from islice(read.records_of(location, source), RECORDS)
    except (InputError, OSError) as error:
        yield Unreadable(0, "unreadable_file", str(error))


def problem(sample: SourceSample) -> str | None:
    """Why no sampled record can be used; None if one can, or if nothing was looked at."""
    name = sample.source.name
    if sample.looked_at and sample.empty_files == sample.looked_at:
        return f"source {name}: the files looked at are empty ({sample.looked_at} of {sample.files}); check its paths"
    if sample.texts or not sample.unreadable:
        return None
    first = sample.unreadable[0]
    reason = first.reason
    if first.kind == "no_text_field" and "fields are " in reason:
        fields = reason.partition("fields are ")[2].partition(";")[0].split(", ")
        by_name = {field.rpartition(".")[2]: field for field in fields} | dict(zip(fields, fields, strict=True))
        near = nearest_name(sample.source.html_field or sample.source.text_field, by_name)
        reason += f" to {by_name[near]!r}" if near is not None else ""
    return f"source {name}: none of the first {len(sample.unreadable)} records can be read; the first: {reason}"


def excluded_languages(sample: SourceSample, wanted: tuple[str, ...], threshold: float) -> str | None:
    """Names the languages of the sample if the recipe wants none of them; None without a detected language."""
    if not wanted or not sample.texts:
        return None
    heads = [text[:MAX_LANGUAGE_CHARS] for text in sample.texts]
    rows = language.detect(heads, language.LanguageConfig()).to_pylist()
    detected = [row["detected_language"] for row in rows if row["language_score"] >= threshold]
    if not detected or set(detected) & set(wanted):
        return None
    names = ", ".join(sorted(set(detected)))
    return (
        f"source {sample.source.name}: the first {len(detected)} texts are {names}, and curate.languages keeps "
        f"{', '.join(wanted)} alone; add {names}, or drop the source"
    )
