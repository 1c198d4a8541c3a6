"""Resolves a source of the recipe to its raw files and their digests, which the lock pins."""

import hashlib
import os
from collections.abc import Sequence

from gristmill.data_pipeline.readers.files import check_kinds, matching, open_raw, raw_size, shown_path, unreadable
from gristmill.data_pipeline.readers.hub import dataset_digest
from gristmill.data_pipeline.readers.python_docs import python_files
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.lock import LockedSource, RawFile, in_canonical_order
from gristmill.foundation.runtime.store.addresses import is_address
from gristmill.foundation.runtime.tasks.engine import Engine

# Files are digested in groups of about this many bytes; workers are started for more than one group only.
GROUP_BYTES = 64_000_000


def locate(source: SourceConfig) -> dict[str, str]:
    """Name -> location of every raw file, without reading any. Names hold no folders of this machine.

    If two globs find the same name in two places, the second is named by its complete location. A file that is found
    by two paths, or through a link, is counted once."""
    if source.format == "python_docs":
        return python_files(source)
    if source.format == "datasets":
        return {source.paths[0]: source.paths[0]}
    found: dict[str, str] = {}
    seen: set[str] = set()
    for pattern in source.paths:
        for name, location in matching(pattern).items():
            same = location if is_address(location) else os.path.realpath(location)
            if same in seen:
                continue
            seen.add(same)
            if name in found:
                name = shown_path(location)
            found[name] = location
    return found


def resolve(source: SourceConfig, engine: Engine) -> LockedSource:
    """The source's raw files in canonical order, with sizes and SHA-256 digests, ready for the lock.

    Raises InputError naming the glob that matches nothing or the file that cannot be read."""
    if source.format == "datasets":
        size, digest = dataset_digest(source)
        files = [RawFile(name=source.paths[0], bytes=size, sha256=digest)]
        return LockedSource(name=source.name, request=request(source), files=tuple(files))
    located = locate(source)
    if source.format != "python_docs":
        check_kinds(source.name, source.format, list(located.values()))
    sizes = {name: raw_size(location) for name, location in located.items()}
    groups = grouped(sorted(located.items()), [sizes[name] for name in sorted(located)], GROUP_BYTES)
    weights = [float(sum(sizes[name] for name, _ in group)) for group in groups]
    digested = engine.map(_digests, groups, f"digests of {source.name}", weights, "B")
    files = [RawFile(name=name, bytes=sizes[name], sha256=digest) for group in digested for name, digest in group]
    return LockedSource(name=source.name, request=request(source), files=in_canonical_order(files))


def request(source: SourceConfig) -> dict:
    """The part of the source's config that decides which files are read."""
    return source.model_dump(mode="json", include={"format", "part", "packages", "revision", "split"})


def located_files(source: SourceConfig, locked: LockedSource) -> list[tuple[RawFile, str]]:
    """The locked files with their locations, in the lock's order. Raises InputError for a missing file."""
    located = locate(source)
    for file in locked.files:
        if file.name not in located:
            raise InputError(
                f"source {source.name}: {file.name} is in the lock but missing; restore it, or run again with "
                "--update-lock"
            )
    return [(file, located[file.name]) for file in locked.files]


def grouped(items: Sequence, sizes: Sequence[int], group_bytes: int) -> list[list]:
    """Split items into consecutive groups of about `group_bytes`: sizes [3, 3, 9, 1], group_bytes 5 -> [[a, b], [c],
    [d]]."""
    groups: list[list] = []
    held = group_bytes
    for item, size in zip(items, sizes, strict=True):
        if held >= group_bytes:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += size
    return groups


def _digests(group: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, _digest(location)) for name, location in group]


def _digest(location: str) -> str:
    with open_raw(location) as file:
        try:
            hasher = hashlib.sha256()
            while block := file.read(1 << 20):
                hasher.update(block)
        except OSError as error:
            raise unreadable(location, error) from error
    return hasher.hexdigest()
