"""Word and URL lists that a recipe names as files: read, checked and pinned by digest like raw files.

UTF-8 text with one entry per line; blank lines and lines that begin with `#` are ignored, white space at both ends of a
line is stripped. A compressed file is read by its suffix (.gz .zst .bz2 .xz)."""

import hashlib
from collections.abc import Sequence
from io import BytesIO

from pydantic import Field

from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.files import matching, open_raw
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.lock import LockedSource, RawFile, in_canonical_order


class ListsConfig(Config):
    """Files or globs of each list. badwords: words and phrases; blocked_urls: hosts and URL prefixes.

    Paths are not part of the fingerprint: the lock holds the files' digests, under the names `lists.badwords` and
    `lists.blocked_urls`."""

    badwords: tuple[str, ...] = Field(default=(), json_schema_extra={"execution": True})
    blocked_urls: tuple[str, ...] = Field(default=(), json_schema_extra={"execution": True})


class PinnedList(Config):
    """digests: of the files, sorted; they identify the list. paths: of the files, not part of the fingerprint."""

    digests: tuple[str, ...]
    paths: tuple[str, ...] = Field(exclude=True)


def lock_lists(lists: ListsConfig) -> tuple[LockedSource, ...]:
    """Pin each list of the recipe as a source of the lock.

    Raises InputError for a glob that matches nothing, a file that cannot be read or has no entries."""
    locked_lists = []
    for name, patterns in lists:
        if patterns:
            files = [_raw_file(base, location) for base, location in _located(patterns)]
            request = {"format": "list", "paths": list(patterns)}
            locked_lists.append(LockedSource(name=f"lists.{name}", request=request, files=in_canonical_order(files)))
    return tuple(locked_lists)


def pinned_list(patterns: Sequence[str]) -> PinnedList | None:
    """Pin the list by its files' current digests, without parsing them; None if the recipe names no file."""
    if not patterns:
        return None
    paths = tuple(location for _, location in _located(patterns))
    return PinnedList(digests=tuple(sorted(_digest(_raw(path)) for path in paths)), paths=paths)


def entries(pinned: PinnedList) -> tuple[str, ...]:
    """The sorted unique entries of the list's files. Raises InputError if a file is not the one in the lock."""
    values: set[str] = set()
    for path in pinned.paths:
        digest, listed = read_list(path)
        if digest not in pinned.digests:
            raise InputError(f"{path}: the list changed during the run; run again")
        values.update(listed)
    return tuple(sorted(values))


def read_list(path: str) -> tuple[str, tuple[str, ...]]:
    """Return (SHA-256 of the stored file, its entries in order).

    Raises InputError that names file and line for invalid UTF-8, and for a file without entries."""
    raw = _raw(path)
    try:
        lines = b"".join(blocks(BytesIO(raw), path)).split(b"\n")
    except Damaged as damage:
        raise InputError(f"{path}: {damage}; get the list again") from damage
    listed = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: line {number} is not UTF-8; a list is plain text, one entry per line") from error
        if entry and not entry.startswith("#"):
            listed.append(entry)
    if not listed:
        raise InputError(f"{path}: the list is empty; write one entry per line, or remove the file from curate.lists")
    return _digest(raw), tuple(listed)


def _located(patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, location) of every file, each location once."""
    locations = {location: name for pattern in patterns for name, location in matching(pattern).items()}
    return [(name, location) for location, name in locations.items()]


def _raw_file(name: str, location: str) -> RawFile:
    return RawFile(name=name, bytes=len(_raw(location)), sha256=read_list(location)[0])


def _raw(path: str) -> bytes:
    with open_raw(path) as file:
        return file.read()


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
