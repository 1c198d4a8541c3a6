"""Files that are whole or absent: digests, atomic writes, durable renames."""

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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
    """A temporary path beside `path`; renamed to `path` when the block ends well, removed when it does not.

    An empty file stands there already, locked as long as its writer lives: `sweep` leaves it alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _locked(temporary):
            yield temporary
            sync(temporary)
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _locked(temporary: Path) -> Iterator[None]:
    """A new file, locked. The kernel frees the lock when the process ends, however it ends."""
    while True:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            with suppress(OSError):  # a file system without locks: nothing is swept there either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_at(descriptor, temporary):  # swept between the two calls
                continue
            yield
            return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def sweep(folder: Path) -> list[Path]:
    """Removes the temporary files that killed writers left anywhere below the folder, never one of a living writer.

    Returns what was removed."""
    return [path for path in sorted(folder.rglob(".*.tmp")) if path.is_file() and _removed_if_abandoned(path)]


def _removed_if_abandoned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except OSError:  # its writer holds the lock, or the file system has none
        return False
    finally:
        os.close(descriptor)


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
