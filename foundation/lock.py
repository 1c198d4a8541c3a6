"""Lock file: pins the raw inputs of a recipe by digest, so that a later run reads the same bytes or names the
change."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import digest_changes, write_atomic
from gristmill.foundation.fingerprint import digested_json, fingerprint, read_digested_json

LOCK_NAME = "lock.json"


class RawFile(Config):
    """One raw input. `name` is for messages (a path as in the recipe, a module of the interpreter); the digest
    is its identity. `copy_index` distinguishes files of one source with equal digests."""

    name: str
    bytes: int
    sha256: str
    copy_index: int = 0


class LockedSource(Config):
    """request: the part of the source's config that decides which files are read."""

    name: str
    request: dict[str, Any]
    files: tuple[RawFile, ...]


class Lock(Config):
    sources: tuple[LockedSource, ...]

    def source(self, name: str) -> LockedSource:
        """Raises InputError if the lock pins no such source."""
        if name in self._by_name:
            return self._by_name[name]
        raise InputError(
            f"{LOCK_NAME}: has no source {name!r}; run `gristmill run` to pin the recipe's raw files again"
        )

    @cached_property
    def _by_name(self) -> dict[str, LockedSource]:
        return {source.name: source for source in self.sources}

    def identity(self) -> dict[str, str]:
        """Source name -> fingerprint of its files' contents, without their names and paths."""
        return {
            source.name: fingerprint([[file.sha256, file.copy_index] for file in source.files])
            for source in self.sources
        }


def in_canonical_order(files: Sequence[RawFile]) -> tuple[RawFile, ...]:
    """Sort by digest, equal ones by name, and number those: the result does not depend on paths or the order on disk.

    [("b", d1), ("a", d1), ("c", d0)] -> [("c", d0, 0), ("a", d1, 0), ("b", d1, 1)]"""
    ordered = sorted(files, key=lambda file: (file.sha256, file.name))
    numbered: list[RawFile] = []
    for file in ordered:
        same = numbered and numbered[-1].sha256 == file.sha256
        index = numbered[-1].copy_index + 1 if same else 0
        is_numbered = file.copy_index == index  # a second value of each of a million files would be 0.6 GB
        copy = file if is_numbered else RawFile(name=file.name, bytes=file.bytes, sha256=file.sha256, copy_index=index)
        numbered.append(copy)
    return tuple(numbered)


def write_lock(path: Path, lock: Lock) -> None:
    write_atomic(path, digested_json(lock.model_dump(mode="json")))


def read_lock(path: Path) -> Lock | None:
    """None if there is no lock yet. Raises InputError if there is one that cannot be read."""
    if not path.exists():
        return None
    if not path.is_file():  # reading a named pipe would never return
        raise InputError(f"{path}: not a file; move it away")
    try:
        return Lock.model_validate(read_digested_json(path.read_bytes()))
    except ValueError as error:
        raise InputError(f"{path}: not a lock ({error}); remove it to pin the raw files again") from error


def lock_differences(pinned: LockedSource, current: LockedSource) -> list[str]:
    """One line for each raw file that was added, removed or changed since the lock was written."""
    return digest_changes(
        {file.name: file.sha256 for file in pinned.files}, {file.name: file.sha256 for file in current.files}
    )
