"""Files that are whole or absent: digests, atomic writes, durable renames."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def file_digest(path: Path) -> str:
    """SHA-256 of the file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each file, by name, that is gone, new, or has another SHA-256."""
    said = [f"{name}: gone" for name in sorted(before.keys() - now.keys())]
    said += [f"{name}: new" for name in sorted(now.keys() - before.keys())]
    said += [
        f"{name}: sha256 was {before[name][:16]}..., is {now[name][:16]}..."
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name]
    ]
    return said


def write_atomic(path: Path, content: bytes) -> None:
    """The file has the new content or the old one, whatever happens."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; renamed to `path` when the block ends well, removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Forces the file's (or the folder's) content to disk, so that a rename never overtakes the data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_temporary(path: Path) -> bool:
    """True for the rubble a killed `atomic_path` leaves behind."""
    return path.name.startswith(".") and path.name.endswith(".tmp")
