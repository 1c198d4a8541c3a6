"""Raw files on this machine or behind an fsspec URL: globs, sizes and opening."""

import glob
import os
from pathlib import Path
from typing import BinaryIO, cast

from gristmill.data_pipeline.readers.local_files import local_files, local_path
from gristmill.foundation.addresses import address_size, is_address, matching_addresses, open_address
from gristmill.foundation.errors import InputError


def shown_path(location: str) -> str:
    r"""The path as printable text: bytes of a file name that are not UTF-8 are escaped.

    caf\xe9.txt in Latin-1, which Python holds as caf\udce9.txt -> caf\\xe9.txt"""
    return os.fsencode(location).decode("utf-8", "backslashreplace")


def open_raw(location: str) -> BinaryIO:
    """Open a file for reading bytes. Raises InputError that names the file if it cannot be opened."""
    try:
        if is_address(location):
            return cast(BinaryIO, open_address(location))
        return Path(location).open("rb")
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
        return Path(location).stat().st_size
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            f"{shown_path(location)}: cannot be read ({_reason(error)}); check the path and its permissions"
        ) from error


def matching(pattern: str) -> dict[str, str]:
    """Name -> location of every file that matches the glob, sorted; a name is the path below the folder before the
    first wildcard.

    data/*/a.txt -> {"x/a.txt": "data/x/a.txt", ...}. A folder stands for all files below it. Hidden files are left
    out. `~` and file:/// are expanded. A name is always text: shown_path says how.
    Raises InputError if nothing matches."""
    pattern = local_path(pattern)
    locations = _remote(pattern) if is_address(pattern) else local_files(pattern)
    if not locations and not is_address(pattern) and os.path.exists(pattern) and not os.path.isdir(pattern):
        raise InputError(
            f"{pattern}: a pipe or device, which cannot be pinned and read again; write it to a file first"
        )
    if not locations and is_address(pattern):
        raise InputError(f"{pattern}: no file matches; check the address, the bucket and your access to it")
    if not locations:
        raise InputError(f"{pattern}: no file matches; check the path, or quote the glob so that your shell leaves it")
    fixed = _fixed_folder(pattern)
    return {shown_path(location[len(fixed) :].lstrip("/")): location for location in sorted(locations)}


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
