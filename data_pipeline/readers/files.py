"""Raw files on this machine or behind an fsspec URL: globs, sizes and opening."""

import errno
import fnmatch
import glob
import hashlib
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import BinaryIO, Literal, cast
from urllib.parse import unquote, urlsplit

import numpy as np
import xxhash

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import is_address
from gristmill.foundation.lock import RawFile
from gristmill.foundation.runtime.store.store import address_size, matching_addresses, open_address


def shown_path(location: str) -> str:
    r"""The path as printable text: bytes of a file name that are not UTF-8 are escaped.

    caf\xe9.txt in Latin-1, which Python holds as caf\udce9.txt -> caf\\xe9.txt"""
    return os.fsencode(location).decode("utf-8", "backslashreplace")


def open_raw(location: str) -> BinaryIO:
    """Open a file for reading bytes. Raises InputError that names the file if it cannot be opened."""
    try:
        if is_address(location):
            return cast(BinaryIO, open_address(location))
        return open(location, "rb")
    except ImportError as error:
        raise InputError(f"{location}: {error}; install the package it names") from error
    except (OSError, ValueError) as error:
        raise InputError(
            f"{shown_path(location)}: cannot be opened ({_reason(error)}); check the path and its permissions"
        ) from error


def raw_size(location: str) -> int:
    """Size of the stored file in bytes."""
    try:
        if is_address(location):
            return address_size(location)
        return os.stat(location).st_size
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            f"{shown_path(location)}: cannot be read ({_reason(error)}); check the path and its permissions"
        ) from error


def matching(pattern: str) -> Iterator[tuple[str, str]]:
    """(name, location) of every file that matches the glob; a name is the path below the folder before the first
    wildcard.

    data/*/a.txt -> ("x/a.txt", "data/x/a.txt"), ... A folder stands for all files below it. Hidden files are left
    out. `~` and file:/// are expanded. A name is always text: shown_path says how.
    Raises InputError if nothing matches."""
    pattern = local_path(pattern)
    locations = iter(_remote(pattern)) if is_address(pattern) else local_files(pattern)
    if (first := next(locations, None)) is None:
        raise _no_match(pattern)
    fixed = _fixed_folder(pattern)
    for location in chain([first], locations):
        yield shown_path(location[len(fixed) :].lstrip("/")), location


def _no_match(pattern: str) -> InputError:
    if is_address(pattern):
        return InputError(f"{pattern}: no file matches; check the address, the bucket and your access to it")
    if os.path.exists(pattern) and not os.path.isdir(pattern):
        return InputError(
            f"{pattern}: a pipe or device, which cannot be pinned and read again; write it to a file first"
        )
    return InputError(f"{pattern}: no file matches; check the path, or quote the glob so that your shell leaves it")


def _remote(pattern: str) -> list[str]:
    try:
        return matching_addresses(pattern)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            f"{pattern}: cannot be listed ({_reason(error)}); check the address and your access"
        ) from error


def _fixed_folder(pattern: str) -> str:
    """The folder before the first wildcard: data/x*/b.txt -> data, data/a.txt -> data, data (a folder) -> data."""
    exists = not is_address(pattern) and os.path.exists(pattern)
    if exists or not glob.has_magic(pattern):
        return pattern if exists and Path(pattern).is_dir() else pattern.rpartition("/")[0]
    parts = pattern.split("/")
    first = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    return "/".join(parts[:first])


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class RealPaths:
    """`os.path.realpath` of many files, which asks once for each folder."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}

    def __call__(self, path: str) -> str:
        folder, _, name = path.rpartition("/")
        if not folder or name in ("", ".", "..") or os.path.islink(path):
            return os.path.realpath(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        real = self._folders[folder]
        return path if real == folder else f"{real.rstrip('/')}/{name}"


# Local files by glob; each is found once, since `**` enters no folder twice even where links form loops.


def local_path(pattern: str) -> str:
    """Expand `~/data` and `file:///data` to local paths; other patterns stay unchanged.

    Raises InputError for a file URL of another host or without an absolute path."""
    if not pattern.startswith("file:"):
        return os.path.expanduser(pattern)
    parts = urlsplit(pattern)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InputError(f"{pattern}: a file URL is file:/// and an absolute path; write the path alone")
    return unquote(parts.path)


def local_files(pattern: str) -> Iterator[str]:
    """Paths of the files that match a glob or lie below a folder. Hidden files are excluded.

    The path of an existing file or folder is no glob, also if it contains brackets: "data [2024]". A link to a folder
    that was already visited is not followed, so loops of links end."""
    if os.path.isfile(pattern):
        yield pattern
        return
    if os.path.isdir(pattern):
        yield from ("/".join([pattern.rstrip("/"), *below]) for below in _files_below(pattern))
        return
    parts = pattern.split("/")
    if "**" not in parts:
        yield from _by_parts("", parts, "is_file")
        return
    first = parts.index("**")
    start, rest = "/".join(parts[:first]), [part for part, _ in groupby(parts[first:])]
    folders = _by_parts("", parts[:first], "is_dir") if start else ["." if first == 0 else "/"]
    for folder in folders:
        prefix = [] if first == 0 else [folder.rstrip("/")]
        yield from ("/".join([*prefix, *below]) for below in _files_below(folder) if _matches(below, rest))


def _by_parts(folder: str, parts: Sequence[str], kind: Literal["is_file", "is_dir"]) -> Iterator[str]:
    """As glob.iglob, which holds all names of a folder, and leaves out a folder that cannot be listed."""
    part, *rest = parts
    if not glob.has_magic(part):
        path = f"{folder}{part}"
        if rest:
            yield from _by_parts(f"{path}/", rest, kind)
        elif _is_kind(kind, path):
            yield path
        return
    is_match, with_hidden = re.compile(fnmatch.translate(part)).match, part.startswith(".")
    for entry in _entries(folder):
        if is_match(entry.name) and (with_hidden or not entry.name.startswith(".")):
            path = f"{folder}{entry.name}"
            if rest and _is_kind("is_dir", path, entry):
                yield from _by_parts(f"{path}/", rest, kind)
            elif not rest and _is_kind(kind, path, entry):
                yield path


def _files_below(folder: str) -> Iterator[list[str]]:
    """Path components of every file below a folder, relative to it: data -> ["a.txt"], ["x", "b.txt"]."""
    entered, waiting = {_identity(folder)}, [list[str]()]
    while waiting:
        parts = waiting.pop()
        inside = []
        for entry in _entries("/".join([folder, *parts])):
            if not entry.name.startswith("."):
                if _is_kind("is_file", entry.path, entry):
                    yield [*parts, entry.name]
                elif _is_kind("is_dir", entry.path, entry):
                    inside.append((entry.is_symlink(), entry.name, entry.path))
        below = []
        for _, name, path in sorted(inside):  # a folder before a link to it
            if (identity := _identity(path)) not in entered:
                entered.add(identity)
                below.append([*parts, name])
        waiting += reversed(below)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """None of what is no folder. Raises InputError for a folder that cannot be listed: its files would be missing."""
    try:
        with os.scandir(folder or ".") as entries:
            yield from entries
    except (OSError, ValueError) as error:  # ValueError: a null byte
        _raise_unless_gone(folder, error)


def _is_kind(kind: Literal["is_file", "is_dir"], path: str, entry: os.DirEntry[str] | None = None) -> bool:
    """Links are followed."""
    try:
        if entry is not None:
            return entry.is_file() if kind == "is_file" else entry.is_dir()
        mode = os.stat(path).st_mode
        return stat.S_ISREG(mode) if kind == "is_file" else stat.S_ISDIR(mode)
    except (OSError, ValueError) as error:
        _raise_unless_gone(path, error)
        return False


def _raise_unless_gone(path: str, error: OSError | ValueError) -> None:
    """For what is gone, below a file or a link in circles, or has a name that no file has there is nothing to find."""
    nowhere = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
    if isinstance(error, OSError) and error.errno not in nowhere:
        raise InputError(
            f"{path}: cannot be listed ({_reason(error)}); give yourself access to it, or name the files by a glob "
            "that leaves it out"
        ) from error


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError as error:
        _raise_unless_gone(folder, error)
        return (-1, -1)
    return status.st_dev, status.st_ino


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """["x", "a.txt"] matches ["**", "*.txt"]: `**` stands for any number of folders, and at the end for everything."""
    if not pattern or not parts:
        return not parts and not pattern
    if pattern[0] == "**":
        return len(pattern) == 1 or any(_matches(parts[skip:], pattern[1:]) for skip in range(len(parts)))
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


# Detection of binary files by their signatures, such as a picture in a folder that is read as JSONL.

# File signatures, from the formats' own documents (PNG: W3C; JPEG: ITU-T T.81; ZIP: PKWARE APPNOTE; ...).
SIGNATURES = (
    (0, b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (0, b"\xff\xd8\xff", "a JPEG picture"),
    (0, b"GIF8", "a GIF picture"),
    (0, b"II*\x00", "a TIFF picture"),
    (0, b"MM\x00*", "a TIFF picture"),
    (0, b"RIFF", "a RIFF file (WebP, WAV or AVI)"),
    (0, b"OggS", "an Ogg file"),
    (0, b"ID3", "an MP3 file"),
    (4, b"ftyp", "an MP4 or HEIC file"),
    (0, b"%PDF-", "a PDF document"),
    (0, b"%!PS", "a PostScript file"),
    (0, b"{\\rtf", "an RTF document"),
    (0, b"\xd0\xcf\x11\xe0", "an Office document of before 2007"),
    (0, b"PK\x03\x04", "a ZIP archive (or an Office document)"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"\x7fELF", "a program"),
    (0, b"SQLite format 3\x00", "an SQLite database"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"ARROW1", "an Arrow file"),
    (0, b"PAR1", "a Parquet file"),
)
LOOKED_AT_BYTES = 16
KIND_FORMATS = {b"PAR1": ("parquet",), b"%PDF-": ("pdf",), b"PK\x03\x04": ("epub", "docx")}  # that read such files
SUFFIXES = {"text": "txt", "markdown": "md"}  # where the suffix is not the format's name


def foreign_kind(head: bytes, format_: str) -> str | None:
    """The kind of a binary file by its first bytes; None if the format can read it or the signature is unknown."""
    for offset, signature, kind in SIGNATURES:
        if head[offset : offset + len(signature)] == signature:
            return None if format_ in KIND_FORMATS.get(signature, ()) or format_ == "own" else kind
    return None


def check_kinds(source: str, format_: str, locations: Iterable[str]) -> None:
    """Raises InputError that names the first local file of another kind and the number of such files."""
    first, count = None, 0
    for location in locations:
        if not is_address(location):
            with open_raw(location) as file:
                kind = foreign_kind(file.read(LOOKED_AT_BYTES), format_)
            if kind is not None:
                first, count = first or (location, kind), count + 1
    if first is not None:
        location, kind = first
        others = f" (and {count - 1} files more are of such kinds)" if count > 1 else ""
        raise InputError(
            f"source {source}: {location} is {kind}, which format {format_} does not read{others}; name the files by a "
            f"glob such as **/*.{SUFFIXES.get(format_, format_)}, or move it away"
        )


# Raw files that are verified against the lock while they are read: a file that changes during the run stops it.
#
# A file read from start to end is hashed as it is read and compared at its end (HashedFile). A file read by ranges,
# by several workers, is first read once: its SHA-256 is compared with the lock, and each block of 1 MiB gets an XXH3
# digest, which is compared before the block is used (VerifiedFile). The XXH3 digests are a small part of the cost of
# SHA-256.

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class BlockDigests:
    """digests: uint64[ceil(num_bytes / BLOCK_BYTES)], XXH3 of each block of the file."""

    num_bytes: int
    digests: np.ndarray


class HashedFile(io.RawIOBase):
    """A file read from start to end; `finish` reads the rest and compares the digest with the lock.

    A seek to the start first finishes and compares the pass so far, then starts another."""

    def __init__(self, raw: BinaryIO, file: RawFile, location: str):
        super().__init__()
        self._raw, self._file, self._location = raw, file, location
        self._hasher = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        try:
            block = self._raw.read(size)
        except OSError as error:
            raise unreadable(self._location, error) from error
        self._hasher.update(block)
        return block

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if offset or whence != io.SEEK_SET:
            raise io.UnsupportedOperation("a file that is hashed must be read from its start")
        self.finish()
        self._hasher = hashlib.sha256()
        return self._raw.seek(0)

    def finish(self) -> None:
        """Raises InputError if the file is not the one in the lock."""
        while self.read(BLOCK_BYTES):
            pass
        check_digest(self._hasher.hexdigest(), self._file, self._location)


class VerifiedFile(io.RawIOBase):
    """A file with random access. Raises InputError instead of returning a byte that differs from the locked file.

    error: the InputError raised, since libraries that read through this object may raise another in its place."""

    def __init__(self, raw: BinaryIO, blocks: BlockDigests, location: str):
        super().__init__()
        self._raw, self._blocks, self._location = raw, blocks, location
        self._at = 0
        self._index, self._block = -1, b""
        self.error: InputError | None = None

    def read(self, size: int = -1) -> bytes:
        end = self._blocks.num_bytes if size < 0 else min(self._at + size, self._blocks.num_bytes)
        pieces = []
        while self._at < end:
            index, start = divmod(self._at, BLOCK_BYTES)
            pieces.append(self._verified(index)[start : start + end - self._at])
            self._at += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._blocks.num_bytes}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def finish(self) -> None:
        """Raise the InputError that a library may have caught."""
        if self.error is not None:
            raise self.error

    def _verified(self, index: int) -> bytes:
        if index == self._index:
            return self._block
        try:
            self._raw.seek(index * BLOCK_BYTES)
            block = self._raw.read(BLOCK_BYTES)
        except OSError as error:
            self.error = unreadable(self._location, error)
            raise self.error from error
        if xxhash.xxh3_64_intdigest(block) != self._blocks.digests[index]:
            self.error = changed(self._location)
            raise self.error
        self._index, self._block = index, block
        return block


def digest_blocks(raw: BinaryIO, file: RawFile, location: str) -> BlockDigests:
    """The digests of the file's blocks. Raises InputError if the file is not the one in the lock."""
    whole, digests, num_bytes = HashedFile(raw, file, location), [], 0
    while block := _full_block(whole):
        digests.append(xxhash.xxh3_64_intdigest(block))
        num_bytes += len(block)
    whole.finish()
    return BlockDigests(num_bytes, np.array(digests, np.uint64))


def _full_block(file: HashedFile) -> bytes:
    """BLOCK_BYTES bytes, fewer at the end: one read of a remote file may return fewer."""
    block = file.read(BLOCK_BYTES)
    while 0 < len(block) < BLOCK_BYTES and (more := file.read(BLOCK_BYTES - len(block))):
        block += more
    return block


def check_digest(digest: str, file: RawFile, location: str) -> None:
    if digest != file.sha256:
        raise changed(location, f": its SHA-256 is {digest[:16]}... and the lock says {file.sha256[:16]}...")


def changed(location: str, detail: str = "") -> InputError:
    return InputError(
        f"{shown_path(location)}: the file changed during the run{detail}; nothing read from it is used. Restore it, "
        "or run again with --update-lock to use its new content"
    )


def unreadable(location: str, error: OSError) -> InputError:
    reason = error.strerror or str(error) or type(error).__name__
    return InputError(f"{shown_path(location)}: cannot be read ({reason}); check the disk or the connection")
