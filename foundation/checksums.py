"""Digests of files that are in no manifest: the lock file of raw inputs, and checksum files of cached files, to detect
changed, damaged or incomplete ones.

The checksum file of X is `.X.seal`: the XXH3-128 of its bytes and, unless the writer was killed in between, the file
state. While the state is the same the bytes are not read again; in a copied or touched folder they are, once."""

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import pyarrow as pa
import xxhash

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path, file_digest, stub_at, write_atomic
from gristmill.foundation.fingerprint import (
    canonical_json,
    digested_json,
    read_digested_json,
)
from gristmill.foundation.manifest import CACHE_FOLDER, MANIFEST_NAME, Manifest, Output, read_manifest

READ_BYTES = 1 << 20
SMALL_BYTES = 1 << 15
NO_NOTE: Mapping[str, Any] = MappingProxyType({})


@contextmanager
def checksummed_path(path: Path) -> Iterator[Path]:
    """As `atomic_path`, with a checksum file. It is written first, so a file without one was not written by us."""
    with atomic_path(path) as temporary:
        yield temporary
        digest = _digest(temporary)
        _write_checksum_file(path, {"xxh3": digest})
    _write_state(path, digest)


def write_with_checksum(path: Path, *content: bytes | memoryview) -> None:
    """As `write_atomic`, with a checksum file: for files that fit in memory."""
    hasher = xxhash.xxh3_128()
    for part in content:
        hasher.update(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hasher.hexdigest()
    _write_checksum_file(path, {"xxh3": digest})
    write_atomic(path, *content)
    _write_state(path, digest)


def write_checksum(path: Path) -> None:
    """Write the checksum file of an existing file."""
    _write_checksum_file(path, {"xxh3": _digest(path), "state": file_state(path)})


def write_known_checksum(path: Path, digest: str) -> None:
    """Write the checksum file of a file whose XXH3-128 is known. What else it says of the same bytes stays."""
    known = read_cached(checksum_path(path))
    same = known if isinstance(known, dict) and known.get("xxh3") == digest else {}
    _write_checksum_file(path, same | {"xxh3": digest, "state": file_state(path)})


def _write_state(path: Path, digest: str) -> None:
    """Write the checksum file again, with the file's state; not for a small file, which is read as fast."""
    state = file_state(path)
    if state["bytes"] > SMALL_BYTES:
        _write_checksum_file(path, {"xxh3": digest, "state": state})


def link_with_checksum(path: Path, target: Path, may_copy: bool = True, note: Mapping[str, Any] = NO_NOTE) -> None:
    """Make target a hard link of a file with a checksum, and write its checksum file with the same digests. may_copy: a
    copy where the file system has no links, else OSError. note: further fields, of what the file was made from."""
    known = read_cached(checksum_path(path))
    link_file(path, target, may_copy)
    digests = known if isinstance(known, dict) and "xxh3" in known else {"xxh3": _digest(target)}
    _write_checksum_file(target, digests | dict(note) | {"state": file_state(target)})


def cached_sha256(path: Path) -> str:
    """SHA-256 of a file that matches its checksum, computed once: its checksum file keeps it, and so do those of links
    to the file. The caller has asked `matches_checksum`."""
    known = read_cached(checksum_path(path))
    if not isinstance(known, dict) or "xxh3" not in known:
        return file_digest(path)
    if "sha256" not in known:
        known |= {"sha256": file_digest(path)}
        _write_checksum_file(path, known)
    return str(known["sha256"])


def content_digest(path: Path) -> str:
    """XXH3-128 from the file's checksum file; of a file without one, of its bytes."""
    state = read_cached(checksum_path(path))
    if isinstance(state, dict) and isinstance(state.get("xxh3"), str):
        return str(state["xxh3"])
    return _digest(path)


def link_file(path: Path, target: Path, may_copy: bool = True) -> None:
    """As `link_with_checksum`, without a checksum file: for a file that is linked again rather than trusted."""
    with suppress(OSError):  # as in nearly all cases: nothing is there
        os.link(path, target)
        return
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


def matches_checksum(path: Path) -> bool:
    """Whether the file exists, is complete and unchanged. In a copied or touched folder it is read once."""
    checksum = read_cached(checksum_path(path))
    if not isinstance(checksum, dict) or not path.is_file():
        return False
    state = file_state(path)  # before the bytes are read: a file that changes meanwhile is read again
    if checksum.get("state") == state:
        return True
    if _digest(path) != checksum.get("xxh3"):
        return False
    with suppress(OSError):  # a read-only folder is read each time
        if state["bytes"] > SMALL_BYTES:
            _write_checksum_file(path, checksum | {"state": state})
    return True


def drop_damaged(folder: Path, info: Callable[[str], None], without_checksum: tuple[str, ...] = ()) -> None:
    """Remove every file below the folder that is damaged or has no checksum file, and report it; it is written again.

    without_checksum: names of files without checksum files, which are kept."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        if path.name not in without_checksum and not matches_checksum(path):
            info(f"{path}: damaged; it is written again")
            path.unlink()
            checksum_path(path).unlink(missing_ok=True)


def remove_checksums(folder: Path) -> None:
    """Remove all checksum files before the manifest is written, which then has the digests of the files."""
    for path in sorted(folder.rglob(".*.seal")):
        path.unlink()


def checksum_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.seal")


def _write_checksum_file(path: Path, content: dict[str, Any]) -> None:
    """Not atomic: an incomplete checksum file matches no file, which is then written again."""
    checksum_path(path).write_bytes(orjson.dumps(content))


def _digest(path: Path) -> str:
    if (stub := stub_at(path)) is not None:
        return stub.xxh3
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
MUTEX_NAME = ".lock"


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


def read_kept(path: Path) -> dict[str, Any]:
    """The fields that write_kept wrote; none if the file is missing or damaged."""
    try:
        return read_digested_json(path.read_bytes())
    except (OSError, ValueError):
        return {}


def write_kept(path: Path, fields: dict[str, Any]) -> None:
    """As write_cached, with a digest: for values that cannot be told from damaged ones otherwise."""
    write_cached_bytes(path, digested_json(fields))


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock the folder: processes enter the block one at a time, or all at once if no lock can be created.

    The kernel frees the lock of a process that dies."""
    try:
        (folder / CACHE_FOLDER).mkdir(exist_ok=True)
        file = (folder / CACHE_FOLDER / MUTEX_NAME).open("a")
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
