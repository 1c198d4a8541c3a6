"""Verification of stage outputs against the manifest before they are read; results are cached by file state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from gristmill.foundation.errors import InputError
from gristmill.foundation.file_state_cache import file_state, is_settled, read_cached, write_cached
from gristmill.foundation.files import file_digest
from gristmill.foundation.manifest import CACHE_FOLDER, MANIFEST_NAME, Manifest, Output, read_manifest

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
    known = {name: found for name, found in known.items() if found is not None}
    if known != before:
        write_cached(folder / RECORD, known)


def _checked(folder: Path, output: Output, known: Any) -> dict[str, Any] | None:
    """The cache entry of the file; None if it changed too recently to be cached."""
    path = folder / output.path
    try:
        state = file_state(path)
        found = {"state": state, "sha256": output.sha256}
        if found == known:
            return found
        right = state["bytes"] == output.bytes and file_digest(path) == output.sha256
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {_remedy(folder)}") from error
    if not right:
        raise InputError(f"{path}: altered since it was written: its sha256 differs; {_remedy(folder)}")
    return found if is_settled(state) else None


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
