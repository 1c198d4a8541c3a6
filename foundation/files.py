"""File digests, atomic writes and durable renames, and files whose content is in an object store."""

import fcntl
import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import orjson

from gristmill.foundation.errors import InputError

PROGRESS_BYTES = 2**24  # of a file that is hashed, between two calls of on_progress
REMOVED_SUFFIX = ".removed"  # of a folder that is being removed
HELD_SUFFIX = ".held"  # of the locked file beside a folder of `locked_temp_dir`
SCRATCH_SUFFIX = ".scratch"  # of a folder that is removed when its process ends


def file_digest(path: Path, on_progress: Callable[[], None] | None = None) -> str:
    """SHA-256 of the file's bytes, 64 hex digits; of a stub, of what it stands for. on_progress is called after every
    16 MB."""
    with path.open("rb") as file:
        if (stub := _stub_of(file.fileno())) is not None:
            return stub.sha256
        if on_progress is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while part := file.read(PROGRESS_BYTES):
            digest.update(part)
            on_progress()
        return digest.hexdigest()


def digest_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line for each file, by name, that is missing, new, or has a different SHA-256."""
    changes = [f"{name}: gone" for name in sorted(before.keys() - now.keys())]
    changes += [f"{name}: new" for name in sorted(now.keys() - before.keys())]
    changes += [
        f"{name}: sha256 was {before[name][:16]}..., is {now[name][:16]}..."
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name]
    ]
    return changes


def write_atomic(path: Path, *content: bytes | memoryview) -> None:
    """Write the file atomically: after a crash it has either the old or the new content, which is these bytes, joined.

    Opens one file, once: `atomic_path`, whose file is opened again by its writer and to be synced, takes three."""
    with _temporary_of(path) as (temporary, descriptor), open(descriptor, "wb", closefd=False) as file:
        for part in content:
            file.write(part)
        file.flush()
        os.fsync(descriptor)
        temporary.replace(path)


def write_unsynced(path: Path, content: bytes | memoryview) -> None:
    """As `write_atomic`, but after a power cut the file may be empty: for many small files of which a list is written
    last, with their digests."""
    temporary = temporary_name(path)
    try:
        with open(_created(temporary), "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def temporary_name(path: Path) -> str:
    """A new path beside `path`, which `sweep` removes."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{uuid.uuid4().hex[:16]}.tmp")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; renamed to `path` if the block succeeds, removed if it raises.

    Its name is drawn anew each time: two processes, also of two machines that share the folder, may write the same file
    at once. The temporary file exists, empty and locked while its writer runs, so `sweep` does not remove it."""
    with _temporary_of(path) as (temporary, _):
        yield temporary
        sync(temporary)
        temporary.replace(path)


@contextmanager
def _temporary_of(path: Path) -> Iterator[tuple[Path, int]]:
    """A new, locked file beside `path`, and its descriptor; removed if the block raises."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        with _locked(temporary) as descriptor:
            yield temporary, descriptor
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _locked(temporary: Path) -> Iterator[int]:
    """Create and lock the file, and yield its descriptor. The kernel releases the lock when the process ends."""
    while True:
        descriptor = _created(temporary)
        try:
            with suppress(OSError):  # a file system without locks: `sweep` removes nothing there
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_at(descriptor, temporary):  # swept between the two calls
                continue
            yield descriptor
            return
        finally:
            os.close(descriptor)


def _created(temporary: str | Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(temporary, flags, 0o666)
    except FileNotFoundError:
        Path(temporary).parent.mkdir(parents=True, exist_ok=True)
        return os.open(temporary, flags, 0o666)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def remove_tree(folder: Path) -> None:
    """Remove a folder, if it exists. A kill leaves all of it under its name or nothing, so that no later run takes half
    of it for finished work; `sweep` removes the rest."""
    removed = folder.with_name(f".{folder.name.lstrip('.')}.{os.getpid()}{REMOVED_SUFFIX}")
    if removed.exists():  # of a killed process with this one's id
        shutil.rmtree(removed)
    with suppress(FileNotFoundError):
        folder.rename(removed)
        shutil.rmtree(removed)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder below `parent` that is removed after the block; `sweep` removes one that a kill left."""
    folder = parent / f".{uuid.uuid4().hex[:16]}{SCRATCH_SUFFIX}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked_temp_dir(parent: Path) -> Iterator[Path]:
    """A new folder below `parent` that is removed after the block; `remove_abandoned` removes one that a kill left."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / uuid.uuid4().hex
    with _locked(parent / f"{folder.name}{HELD_SUFFIX}"):
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            (parent / f"{folder.name}{HELD_SUFFIX}").unlink(missing_ok=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of `locked_temp_dir` whose processes have ended."""
    for mark in parent.glob(f"*{HELD_SUFFIX}"):
        _removed_if_abandoned(mark)
    for folder in parent.glob("*"):
        if folder.is_dir() and not folder.with_suffix(HELD_SUFFIX).exists():
            shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path) -> list[Path]:
    """Remove the temporary files of killed writers below the folder, never those of running ones, and what killed
    processes left of folders that they removed, and scratch folders; returns the paths."""
    swept = []
    for path in sorted(folder.rglob(".*")):
        if path.name.endswith((REMOVED_SUFFIX, SCRATCH_SUFFIX)) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
        elif is_temporary(path) and path.is_file() and _removed_if_abandoned(path):
            swept.append(path)
    return swept


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


def sync(path: str | Path) -> None:
    """fsync a file or folder, so that a rename is not persisted before the data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below the folder, and itself: files that were synced before cost nothing again."""
    synced: set[int] = set()
    for entry in entries_below(folder):
        if (entry.is_file() or entry.is_dir()) and (inode := entry.stat().st_ino) not in synced:
            sync(entry.path)
            synced.add(inode)  # of a file with several names one is enough
    sync(folder)


def entries_below(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Everything below the folder, by name, a folder before what is in it. In a third of the time of `rglob`."""
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from entries_below(entry.path)


def is_temporary(path: Path | os.DirEntry[str]) -> bool:
    """True for temporary files of `atomic_path`."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


# SHA-256 digests of files, each computed once until its file changes.


class DigestCache:
    """Digests of files that this process hashed, or that `add` told it. A file keeps its digest when it is renamed, and
    loses it when its size or time of modification changes. on_progress is called after every 16 MB."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, ...], str] = {}
        self.on_progress: Callable[[], None] = lambda: None

    def __call__(self, path: Path) -> str:
        state = _state(path)
        if state not in self._digests:
            self._digests[state] = file_digest(path, self.on_progress)
        return self._digests[state]

    def add(self, path: Path, digest: str) -> None:
        """digest: of the file as it is now, computed by another process."""
        self._digests[_state(path)] = digest


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


# A stub stands in a work folder for a file whose bytes are in an object store: a sparse file of the same size that
# begins with what it stands for, so it keeps its meaning when it or its folder is renamed, linked or copied.

STUB_MAGIC = b"gristmill stub 1\n"
STUB_BYTES = 4096  # of its description; a file up to this has no stub


@dataclass(frozen=True)
class Stub:
    """object: name in the store of the work folder. sha256, xxh3: digests of the content."""

    object: str
    sha256: str
    xxh3: str

    def _described(self) -> bytes:
        described = STUB_MAGIC + orjson.dumps(asdict(self))
        if len(described) > STUB_BYTES:
            raise ValueError(f"{self.object}: too long a name for a stub")
        return described.ljust(STUB_BYTES, b"\0")

    def write(self, path: Path, num_bytes: int) -> None:
        """A new stub of a file of more than STUB_BYTES."""
        with _temporary_of(path) as (temporary, descriptor):
            os.truncate(descriptor, num_bytes)
            os.pwrite(descriptor, self._described(), 0)
            os.fsync(descriptor)
            temporary.replace(path)

    def rewrite(self, path: Path) -> None:
        """Changes what a stub says, under all its names."""
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, self._described(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def stub_at(path: Path) -> Stub | None:
    """The description in a stub; None if the file is none, or not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return _stub_of(descriptor)
    finally:
        os.close(descriptor)


def refuse_stub(path: Path) -> None:
    """Raises InputError for a stub: before a file is read whose format would not tell it from content."""
    if (stub := stub_at(path)) is not None:
        raise InputError(
            f"{path}: stands for {stub.object} in the store of its work folder, and has no content; read that by the "
            "store's address"
        )


def stubs_below(folder: Path) -> Iterator[tuple[Path, Stub]]:
    """The stubs below the folder, hidden folders included."""
    for entry in entries_below(folder):
        if entry.is_file(follow_symlinks=False) and entry.stat().st_size > STUB_BYTES:
            path = Path(entry.path)
            if (stub := stub_at(path)) is not None:
                yield path, stub


def _stub_of(descriptor: int) -> Stub | None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode) or os.pread(descriptor, len(STUB_MAGIC), 0) != STUB_MAGIC:
        return None
    try:
        return Stub(**orjson.loads(os.pread(descriptor, STUB_BYTES, 0)[len(STUB_MAGIC) :].rstrip(b"\0")))
    except (ValueError, TypeError):
        return None


def is_address(location: str) -> bool:
    """True for `s3://bucket/key` and its like, False for a path of this machine, `file:///path` too."""
    return "://" in location and not location.startswith("file:")


# Credentials that an address must not hold: a recipe and its manifest are published.
# Words of a parameter's name that say its value is a secret, and words that do before `key`.
_SECRET_WORDS = frozenset(
    (
        "token", "secret", "password", "passwd", "passphrase", "pwd", "pass", "signature", "sig", "credential",
        "credentials", "auth", "authorization", "apikey", "accesskey", "session", "sessionid", "sas", "jwt",
    )
)  # fmt: skip
_BEFORE_KEY = frozenset(["api", "access", "secret", "account", "private", "auth"])
_PARAMETER = re.compile(r"[?&#;]([^=&#;?]+)=")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def without_credentials(address: str) -> str:
    """The address itself. Raises ValueError, which does not repeat them, if a link of it holds credentials: before the
    host (`https://user:SECRET@host`), or as a parameter of the query or the fragment (`?api_key=SECRET`).

    A chained address (`simplecache::https://host/file`, `zip://member::s3://bucket/key`) is looked at link by link; an
    address inside a parameter is looked at too."""
    links = address.split("::")
    for number, link in enumerate(links):
        scheme, separator, rest = link.partition("://")
        if not separator:
            if not (number == 0 and link.startswith("//")):
                continue
            scheme, rest = "", link[2:]
        if number + 1 < len(links) and "://" not in links[number + 1] and "@" in links[number + 1]:
            raise _refusal(scheme, "", "a user before its host")  # https://user::SECRET@host
        host = re.split("[/?#]", rest, maxsplit=1)[0]
        user = host.rpartition("@")[0]
        port = re.sub(r"^\[.*\]", "", host.rpartition("@")[2]).partition(":")[2]
        if (user and (scheme != "hf" or ":" in user)) or (port and not port.isdigit() and "@" in rest):
            bare_host = host.rpartition("@")[2].partition(":")[0] if user else ""
            raise _refusal(scheme, bare_host, "a user before its host")
        for name, value in _parameters(rest):
            if _is_secret(name):
                raise _refusal(scheme, host, f"the parameter {name!r}")
            without_credentials(value)
    return address


def _refusal(scheme: str, host: str, what: str) -> ValueError:
    return ValueError(
        f"the address {scheme}://...{host} holds credentials ({what}), and recipes are published in manifests; remove "
        "them and give access by the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, HF_TOKEN, "
        "GOOGLE_APPLICATION_CREDENTIALS) or a role"
    )


def _parameters(rest: str) -> Iterator[tuple[str, str]]:
    """(name, value) of the query and the fragment, with percent signs decoded until nothing changes."""
    for match in _PARAMETER.finditer(rest):
        name, value = match[1], re.split("[&#;]", rest[match.end() :], maxsplit=1)[0]
        for _ in range(4):
            name, value = unquote(name), unquote(value)
        yield name, value


def _is_secret(name: str) -> bool:
    """Whether a word of the name says so: api_key, accessToken, X-Amz-Signature; not tokenizer, max_tokens, author."""
    words = [word.lower() for word in _WORD.findall(name)]
    if words == ["key"] or any(word in _SECRET_WORDS for word in words):
        return True
    return any(word == "key" and before in _BEFORE_KEY for before, word in pairwise(words))
