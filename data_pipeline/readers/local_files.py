"""Local files by glob; each is found once, since `**` enters no folder twice even where links form loops."""

import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from urllib.parse import unquote, urlsplit

from gristmill.foundation.errors import InputError


def local_path(pattern: str) -> str:
    """Expand `~/data` and `file:///data` to local paths; other patterns stay unchanged.

    Raises InputError for a file URL of another host or without an absolute path."""
    if not pattern.startswith("file:"):
        return os.path.expanduser(pattern)
    parts = urlsplit(pattern)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InputError(f"{pattern}: a file URL is file:/// and an absolute path; write the path alone")
    return unquote(parts.path)


def local_files(pattern: str) -> list[str]:
    """Paths of the files that match a glob or lie below a folder, sorted. Hidden files are excluded.

    The path of an existing file or folder is no glob, also if it contains brackets: "data [2024]". A link to a folder
    that was already visited is not followed, so loops of links end."""
    if os.path.isfile(pattern):
        return [pattern]
    if os.path.isdir(pattern):
        return sorted("/".join([pattern.rstrip("/"), *below]) for below in _files_below(pattern))
    parts = pattern.split("/")
    if "**" not in parts:
        return sorted(path for path in glob.glob(pattern) if os.path.isfile(path))
    first = parts.index("**")
    start, rest = "/".join(parts[:first]), [part for part, _ in groupby(parts[first:])]
    folders = glob.glob(start) if glob.has_magic(start) else [start or ("." if first == 0 else "/")]
    found = set()
    for folder in folders:
        prefix = [] if first == 0 else [folder.rstrip("/")]
        found |= {"/".join([*prefix, *below]) for below in _files_below(folder) if _matches(below, rest)}
    return sorted(found)


def _files_below(folder: str) -> Iterator[list[str]]:
    """Path components of every file below a folder, relative to it: data -> [["a.txt"], ["x", "b.txt"]]."""
    entered = {_identity(folder)}
    for here, folders, names in os.walk(folder, followlinks=True):
        inside = []
        for name in sorted(folders, key=lambda name: (os.path.islink(os.path.join(here, name)), name)):
            identity = _identity(os.path.join(here, name))
            if not name.startswith(".") and identity not in entered:
                entered.add(identity)
                inside.append(name)
        folders[:] = inside
        parts = [] if here == folder else os.path.relpath(here, folder).split("/")
        yield from ([*parts, name] for name in names if _is_shown(here, name))


def _is_shown(folder: str, name: str) -> bool:
    return not name.startswith(".") and os.path.isfile(os.path.join(folder, name))


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError:  # removed since it was listed, or not readable: os.walk skips it too
        return (-1, -1)
    return status.st_dev, status.st_ino


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """["x", "a.txt"] matches ["**", "*.txt"]: `**` stands for any number of folders, and at the end for everything."""
    if not pattern or not parts:
        return not parts and not pattern
    if pattern[0] == "**":
        return len(pattern) == 1 or any(_matches(parts[skip:], pattern[1:]) for skip in range(len(parts)))
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
