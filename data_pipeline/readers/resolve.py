"""Resolves the sources of a recipe to their raw files and digests, which the lock pins."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from gristmill.data_pipeline.readers.files import check_kinds, open_raw, raw_size, unreadable
from gristmill.data_pipeline.readers.python_records import dataset_digest
from gristmill.data_pipeline.readers.read import locate
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.checksums import file_state, is_settled, read_kept, write_kept
from gristmill.foundation.files import is_address
from gristmill.foundation.lock import LockedFiles, LockedSource, RawFile, SortedRecords, batches_of, numbered
from gristmill.foundation.runtime.tasks.engine import Engine

# Files are digested in groups of about this many bytes; workers are started for more than one group only.
GROUP_BYTES = 64_000_000
FILES_TOGETHER = 1 << 15  # of which the engine has the locations at a time
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
        self._kept: dict[str, dict] = {}

    def of(self, location: str, size: int) -> str | None:
        """The digest of the file as it is now; None if it is not known."""
        entry = self._known.get(location) if self._keeps(location, size) else None
        return entry["sha256"] if entry is not None and entry["state"] == file_state(Path(location)) else None

    def keep(self, location: str, size: int, digest: str) -> None:
        if self._keeps(location, size) and is_settled(state := file_state(Path(location))):
            self._kept[location] = {"state": state, "sha256": digest}

    def write(self) -> None:
        """Replaces what was known by what was kept."""
        if self._path is not None and self._kept != self._known:
            write_kept(self._path, self._kept)

    def _keeps(self, location: str, size: int) -> bool:
        return self._path is not None and size >= MIN_KEPT_BYTES and not is_address(location)


def resolve(sources: Sequence[SourceConfig], engine: Engine, cache: Path | None = None) -> list[LockedSource]:
    """The raw files of each source in canonical order, with sizes and SHA-256 digests, ready for the lock.

    Small files are digested together, also those of different sources. cache: keeps digests of large files while they
    stay as they are. Raises InputError naming the glob that matches nothing or the file that cannot be read."""
    kept = KeptDigests(cache)
    places = SortedRecords(_places(sources))
    digested = SortedRecords(
        (number, digest, name, size)
        for batch in batches_of(places, FILES_TOGETHER)
        for (number, name, _, size), digest in zip(batch, _known_digests(batch, kept, engine), strict=True)
    )
    kept.write()
    files = {number: numbered(row[1:] for row in rows) for number, rows in groupby(digested, key=itemgetter(0))}
    return [
        LockedSource(
            name=source.name,
            request=request(source),
            files=_dataset_file(source) if source.format == "datasets" else files.get(number, LockedFiles()),
        )
        for number, source in enumerate(sources)
    ]


def _places(sources: Sequence[SourceConfig]) -> Iterator[tuple[int, str, str, int]]:
    """(number of its source, name, location, bytes) of each file."""
    for number, source in enumerate(sources):
        if source.format != "datasets":
            located = locate(source)
            if source.format != "python_docs":
                check_kinds(source.name, source.format, (location for _, location in located))
            for name, location in located:
                yield number, name, location, raw_size(location)


def _known_digests(batch: Sequence[tuple[int, str, str, int]], kept: KeptDigests, engine: Engine) -> list[str]:
    files = [(location, size) for *_, location, size in batch]
    known = {location: digest for location, size in files if (digest := kept.of(location, size))}
    known |= _digests_of([(location, size) for location, size in files if location not in known], engine)
    for location, size in files:
        kept.keep(location, size, known[location])
    return [known[location] for location, _ in files]


def _digests_of(files: Sequence[tuple[str, int]], engine: Engine) -> dict[str, str]:
    """Location of each file -> its digest. files: locations and sizes."""
    groups = grouped(files, [size for _, size in files], GROUP_BYTES)
    tasks = [[location for location, _ in group] for group in groups]
    weights = [float(sum(size for _, size in group)) for group in groups]
    digested = engine.map(_digests, tasks, "digests of raw files", weights, "B")
    return {
        location: digest
        for task, digests in zip(tasks, digested, strict=True)
        for location, digest in zip(task, digests, strict=True)
    }


def _dataset_file(source: SourceConfig) -> LockedFiles:
    size, digest = dataset_digest(source)
    return LockedFiles([RawFile(name=source.paths[0], bytes=size, sha256=digest)])


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
