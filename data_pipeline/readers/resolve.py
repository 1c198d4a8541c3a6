"""Resolves the sources of a recipe to their raw files and digests, which the lock pins."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from gristmill.data_pipeline.readers.files import check_kinds, open_raw, raw_size, unreadable
from gristmill.data_pipeline.readers.python_records import dataset_digest
from gristmill.data_pipeline.readers.read import locate
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.checksums import (
    LockedSource,
    RawFile,
    file_state,
    in_canonical_order,
    is_settled,
    read_kept,
    write_kept,
)
from gristmill.foundation.files import is_address
from gristmill.foundation.runtime.tasks.engine import Engine

# Files are digested in groups of about this many bytes; workers are started for more than one group only.
GROUP_BYTES = 64_000_000
BLOCK_BYTES = 1 << 20
# Digests of larger files are kept from run to run; of a million tiny files the list would be as large as they are.
MIN_KEPT_BYTES = 1 << 18
KEPT_DIGESTS = ".raw_digests.json"  # in the cache of a work folder


class KeptDigests:
    """SHA-256 of large raw files by location, from the last run; each is valid while the file's size, times and inode
    are the same, and is not kept if the file changed in the last two seconds (as git treats files of its index)."""

    def __init__(self, cache: Path | None):
        self._path = None if cache is None else cache / KEPT_DIGESTS
        self._known = {} if self._path is None else read_kept(self._path)

    def of(self, location: str, size: int) -> str | None:
        """The digest of the file as it is now; None if it is not known."""
        entry = self._known.get(location) if self._keeps(location, size) else None
        return entry["sha256"] if entry is not None and entry["state"] == file_state(Path(location)) else None

    def write(self, digests: Sequence[tuple[str, int, str]]) -> None:
        """Keeps (location, size, digest) of all files in the place of what was kept before."""
        if self._path is None:
            return
        known = {}
        for location, size, digest in digests:
            if self._keeps(location, size) and is_settled(state := file_state(Path(location))):
                known[location] = {"state": state, "sha256": digest}
        if known != self._known:
            write_kept(self._path, known)

    def _keeps(self, location: str, size: int) -> bool:
        return self._path is not None and size >= MIN_KEPT_BYTES and not is_address(location)


def resolve(sources: Sequence[SourceConfig], engine: Engine, cache: Path | None = None) -> list[LockedSource]:
    """The raw files of each source in canonical order, with sizes and SHA-256 digests, ready for the lock.

    Small files are digested together, also those of different sources. cache: keeps digests of large files while they
    stay as they are. Raises InputError naming the glob that matches nothing or the file that cannot be read."""
    places: list[tuple[int, str, str]] = []  # source, name, location
    for number, source in enumerate(sources):
        if source.format != "datasets":
            located = locate(source)
            if source.format != "python_docs":
                check_kinds(source.name, source.format, list(located.values()))
            places += [(number, name, located[name]) for name in sorted(located)]
    locations = [location for *_, location in places]
    sizes = [raw_size(location) for location in locations]
    kept = KeptDigests(cache)
    known = {number: digest for number in range(len(places)) if (digest := kept.of(locations[number], sizes[number]))}
    known |= _digests_of([number for number in range(len(places)) if number not in known], locations, sizes, engine)
    digests = [known[number] for number in range(len(places))]
    kept.write(list(zip(locations, sizes, digests, strict=True)))
    files: list[list[RawFile]] = [[] for _ in sources]
    for (number, name, _), size, digest in zip(places, sizes, digests, strict=True):
        files[number].append(RawFile(name=name, bytes=size, sha256=digest))
    return [
        LockedSource(name=source.name, request=request(source), files=_raw_files(source, files[number]))
        for number, source in enumerate(sources)
    ]


def _digests_of(
    chosen: Sequence[int], locations: Sequence[str], sizes: Sequence[int], engine: Engine
) -> dict[int, str]:
    """Number of each chosen file -> its digest."""
    groups = grouped(chosen, [sizes[number] for number in chosen], GROUP_BYTES)
    weights = [float(sum(sizes[number] for number in group)) for group in groups]
    tasks = [[locations[number] for number in group] for group in groups]
    digested = engine.map(_digests, tasks, "digests of raw files", weights, "B")
    return {
        number: digest
        for group, digests in zip(groups, digested, strict=True)
        for number, digest in zip(group, digests, strict=True)
    }


def _raw_files(source: SourceConfig, digested: Sequence[RawFile]) -> tuple[RawFile, ...]:
    if source.format == "datasets":
        size, digest = dataset_digest(source)
        return (RawFile(name=source.paths[0], bytes=size, sha256=digest),)
    return in_canonical_order(digested)


def request(source: SourceConfig) -> dict:
    """The part of the source's config that decides which files are read."""
    return source.model_dump(mode="json", include={"format", "part", "packages", "revision", "split"})


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
