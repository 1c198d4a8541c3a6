"""Files of this machine by glob, each once: `**` enters no folder twice, whatever links point where."""

import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from urllib.parse import unquote, urlsplit

from gristmill.foundation.errors import InputError


def local_path(pattern: str) -> str:
    """`~/data` and `file:///data` as paths of this machine; other patterns as they are.

    Raises InputError for a file address of another host or without a whole path."""
    if not pattern.startswith("file:"):
        return os.path.expanduser(pattern)
    parts = urlsplit(pattern)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InputError(f"{pattern}: a file address is file:/// and a path from the root; write the path alone")
    return unquote(parts.path)


def local_files(pattern: str) -> list[str]:
    """Paths of the files that a glob matches, or that lie below a folder, sorted. Hidden files are left out.

    A link to a folder that was entered already is not entered again, so links that form a loop end."""
    if os.path.isdir(pattern):
        pattern = f"{pattern.rstrip('/')}/**"
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
    """The path of every file below a folder, from there, in parts: data -> [["a.txt"], ["x", "b.txt"]]."""
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
    except OSError:  # gone since it was listed, or not ours to look at: os.walk passes it over too
        return (-1, -1)
    return status.st_dev, status.st_ino


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """["x", "a.txt"] matches ["**", "*.txt"]: `**` stands for any number of folders, and at the end for everything."""
    if not pattern or not parts:
        return not parts and not pattern
    if pattern[0] == "**":
        return len(pattern) == 1 or any(_matches(parts[skip:], pattern[1:]) for skip in range(len(parts)))
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
