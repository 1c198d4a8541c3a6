"""Checksum files ("seals") for cached files that are in no manifest, to detect damaged or incomplete files.

The seal of X is `.X.seal`: the XXH3-128 of its bytes and, unless the writer was killed in between, the file state.
While the state is the same the bytes are not read again; in a copied or touched folder they are."""

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import xxhash

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path, file_digest, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.manifest import CACHE_FOLDER, MANIFEST_NAME, Manifest, Output, read_manifest

READ_BYTES = 1 << 20
SMALL_BYTES = 1 << 15


@contextmanager
def sealed_path(path: Path) -> Iterator[Path]:
    """As `atomic_path`, with a seal. The seal is written first, so a file without one was not written by us."""
    with atomic_path(path) as temporary:
        yield temporary
        digest = _digest(temporary)
        _write_seal(path, {"xxh3": digest})
    _write_state(path, digest)


def write_sealed(path: Path, *content: bytes | memoryview) -> None:
    """As `write_atomic`, with a seal: for files that fit in memory."""
    hasher = xxhash.xxh3_128()
    for part in content:
        hasher.update(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hasher.hexdigest()
    _write_seal(path, {"xxh3": digest})
    write_atomic(path, *content)
    _write_state(path, digest)


def seal(path: Path) -> None:
    """Write the seal of an existing file."""
    _write_seal(path, {"xxh3": _digest(path), "state": file_state(path)})


def seal_with(path: Path, digest: str) -> None:
    """Write the seal of an existing file whose XXH3-128 is known."""
    _write_seal(path, {"xxh3": digest, "state": file_state(path)})


def _write_state(path: Path, digest: str) -> None:
    """Write the seal once more with the file's state, unless the file is read as fast as its seal is written."""
    state = file_state(path)
    if state["bytes"] > SMALL_BYTES:
        _write_seal(path, {"xxh3": digest, "state": state})


def link_sealed(path: Path, target: Path, may_copy: bool = True) -> None:
    """Make target a hard link of a sealed file, and seal it with the same digest; may_copy: a copy where the file
    system has no links, else OSError."""
    known = read_cached(seal_of(path))
    link_file(path, target, may_copy)
    seal_with(target, known["xxh3"]) if isinstance(known, dict) and "xxh3" in known else seal(target)


def link_file(path: Path, target: Path, may_copy: bool = True) -> None:
    """As `link_sealed`, without a seal: for a file that is linked again rather than trusted."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or not target.samefile(path):  # a rename over a link to the same file would do nothing
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:16]}.tmp")
        try:
            os.link(path, temporary)
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            if not may_copy:
                raise
            with atomic_path(target) as copy:
                shutil.copyfile(path, copy)


def is_sealed(path: Path) -> bool:
    """Whether the file exists, is complete and unchanged."""
    seal = read_cached(seal_of(path))
    if not isinstance(seal, dict) or not path.is_file():
        return False
    return seal.get("state") == file_state(path) or seal.get("xxh3") == _digest(path)


def drop_damaged(folder: Path, say: Callable[[str], None], unsealed: tuple[str, ...] = ()) -> None:
    """Remove every file below the folder that is damaged or has no seal, and report it; it will be written again.

    unsealed: names of files without seals, which are kept."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        if path.name not in unsealed and not is_sealed(path):
            say(f"{path}: damaged; it is written again")
            path.unlink()
            seal_of(path).unlink(missing_ok=True)


def remove_seals(folder: Path) -> None:
    """Remove all seals before the manifest is written, which then has the digests of the files."""
    for path in sorted(folder.rglob(".*.seal")):
        path.unlink()


def seal_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.seal")


def _write_seal(path: Path, content: dict[str, Any]) -> None:
    """Not atomic: an incomplete seal matches no file, which is then written again."""
    seal_of(path).write_bytes(orjson.dumps(content))


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()


# Cache of facts about large files, valid while the file is unchanged, so that restarts need not read it again.
#
# A file counts as unchanged while its size, times and inode are the same. The cache is in the folder `cache`, in no
# manifest, and may be deleted at any time.

# A file may be written twice within one tick of the file system's clock (4 ms on ext4, 2 s on FAT, the coarsest), so a
# recently written file is not cached; git treats files in its index the same way.
SETTLED_SECONDS = 2.0
LOCK_NAME = ".lock"


def file_state(path: Path) -> dict[str, int]:
    """Size, inode, mtime and ctime; programs cannot set the ctime back.

    Raises OSError if there is no such file."""
    status = path.stat()
    return {
        "bytes": status.st_size,
        "inode": status.st_ino,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def is_settled(state: dict[str, int]) -> bool:
    """False if the file changed so recently that another change might not alter its state."""
    return max(state["mtime_ns"], state["ctime_ns"]) < time.time_ns() - int(SETTLED_SECONDS * 1e9)


def read_cached(path: Path) -> Any:
    """The cached JSON value; None if it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_cached(path: Path, value: Any) -> None:
    """Write the JSON value atomically; errors of a read-only or full disk are ignored."""
    write_cached_bytes(path, canonical_json(value) + b"\n")


def write_cached_bytes(path: Path, content: bytes) -> None:
    try:
        write_atomic(path, content)
    except OSError:
        return  # a read-only or full disk: the next run computes the value again


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock the folder: processes enter the block one at a time, or all at once if no lock can be created.

    The kernel frees the lock of a process that dies."""
    try:
        (folder / CACHE_FOLDER).mkdir(exist_ok=True)
        file = (folder / CACHE_FOLDER / LOCK_NAME).open("a")
    except OSError:
        yield
        return
    with file:
        with suppress(OSError):  # a file system without locks: work is done twice with equal results
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Verification of stage outputs against the manifest before they are read; results are cached by file state.

RECORD = Path(CACHE_FOLDER) / "checked" / "outputs.json"


def check_outputs(folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Verify the outputs with a wanted path against the folder's manifest, if it has one.

    Raises InputError that names a differing file. Unchanged files (size, times, inode) are not read again."""
    if (folder / MANIFEST_NAME).is_file():
        check_against(folder, read_manifest(folder), wanted)


def check_against(folder: Path, manifest: Manifest, wanted: Callable[[str], bool] = lambda _: True) -> None:
    """As check_outputs, with a manifest that was read before."""
    before = read_cached(folder / RECORD)
    known: dict[str, Any] = dict(before) if isinstance(before, dict) else {}
    for output in manifest.outputs:
        if wanted(output.path):
            known[output.path] = _checked(folder, output, known.get(output.path))
    known = {name: entry for name, entry in known.items() if entry is not None}
    if known != before:
        write_cached(folder / RECORD, known)


def _checked(folder: Path, output: Output, known: Any) -> dict[str, Any] | None:
    """The cache entry of the file; None if it changed too recently to be cached."""
    path = folder / output.path
    try:
        state = file_state(path)
        entry = {"state": state, "sha256": output.sha256}
        if entry == known:
            return entry
        right = state["bytes"] == output.bytes and file_digest(path) == output.sha256
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {_remedy(folder)}") from error
    if not right:
        raise InputError(f"{path}: altered since it was written: its sha256 differs; {_remedy(folder)}")
    return entry if is_settled(state) else None


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Convert errors from reading files of the folder to an InputError that names the folder."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, pa.ArrowException, OSError) as error:
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{folder}: a file in it is damaged ({message}); {_remedy(folder)}") from error


def _remedy(folder: Path) -> str:
    return f"`gristmill verify {folder}` lists such files: restore them, or remove that folder and run its stage again"
