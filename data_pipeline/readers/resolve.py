"""Resolves the sources of a recipe to their raw files and digests, which the lock pins."""

import hashlib
from collections.abc import Sequence

from gristmill.data_pipeline.readers.files import (
    RealPaths,
    check_kinds,
    matching,
    open_raw,
    raw_size,
    shown_path,
    unreadable,
)
from gristmill.data_pipeline.readers.hub import dataset_digest
from gristmill.data_pipeline.readers.python_docs import python_files
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.lock import LockedSource, RawFile, in_canonical_order
from gristmill.foundation.runtime.store.addresses import is_address
from gristmill.foundation.runtime.tasks.engine import Engine

# Files are digested in groups of about this many bytes; workers are started for more than one group only.
GROUP_BYTES = 64_000_000
BLOCK_BYTES = 1 << 20


def locate(source: SourceConfig) -> dict[str, str]:
    """Name -> location of every raw file, without reading any. Names hold no folders of this machine.

    If two globs find the same name in two places, the second is named by its complete location. A file that is found
    by two paths, or through a link, is counted once."""
    if source.format == "python_docs":
        return python_files(source)
    if source.format == "datasets":
        return {source.paths[0]: source.paths[0]}
    locations: dict[str, str] = {}
    seen: set[str] = set()
    real_path = RealPaths()
    for pattern in source.paths:
        for name, location in matching(pattern).items():
            same = location if is_address(location) else real_path(location)
            if same in seen:
                continue
            seen.add(same)
            if name in locations:
                name = shown_path(location)
            locations[name] = location
    return locations


def resolve(sources: Sequence[SourceConfig], engine: Engine) -> list[LockedSource]:
    """The raw files of each source in canonical order, with sizes and SHA-256 digests, ready for the lock.

    Small files are digested together, also those of different sources. Raises InputError naming the glob that matches
    nothing or the file that cannot be read."""
    places: list[tuple[int, str, str]] = []  # source, name, location
    for number, source in enumerate(sources):
        if source.format != "datasets":
            located = locate(source)
            if source.format != "python_docs":
                check_kinds(source.name, source.format, list(located.values()))
            places += [(number, name, located[name]) for name in sorted(located)]
    sizes = [raw_size(location) for *_, location in places]
    groups = grouped(list(zip(places, sizes, strict=True)), sizes, GROUP_BYTES)
    weights = [float(sum(size for _, size in group)) for group in groups]
    locations = [[place[-1] for place, _ in group] for group in groups]
    digests = [
        digest for group in engine.map(_digests, locations, "digests of raw files", weights, "B") for digest in group
    ]
    files: list[list[RawFile]] = [[] for _ in sources]
    for (number, name, _), size, digest in zip(places, sizes, digests, strict=True):
        files[number].append(RawFile(name=name, bytes=size, sha256=digest))
    return [
        LockedSource(name=source.name, request=request(source), files=_raw_files(source, files[number]))
        for number, source in enumerate(sources)
    ]


def _raw_files(source: SourceConfig, digested: Sequence[RawFile]) -> tuple[RawFile, ...]:
    if source.format == "datasets":
        size, digest = dataset_digest(source)
        return (RawFile(name=source.paths[0], bytes=size, sha256=digest),)
    return in_canonical_order(digested)


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
    open_bytes = group_bytes
    for item, size in zip(items, sizes, strict=True):
        if open_bytes >= group_bytes:
            groups.append([])
            open_bytes = 0
        groups[-1].append(item)
        open_bytes += size
    return groups


def _digests(locations: Sequence[str]) -> list[str]:
    return [_digest(location) for location in locations]


def _digest(location: str) -> str:
    with open_raw(location) as file:
        try:
            hasher = hashlib.sha256()
            while block := file.read(BLOCK_BYTES):
                hasher.update(block)
                if len(block) < BLOCK_BYTES and not is_address(location):
                    break  # at the end: a second read of a million files is felt
        except OSError as error:
            raise unreadable(location, error) from error
    return hasher.hexdigest()
