"""Outputs of a stage are held to its manifest before they are read, once: what was found right is remembered."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from gristmill.foundation.errors import InputError
from gristmill.foundation.file_state_cache import file_state, is_settled, read_remembered, remember
from gristmill.foundation.files import file_digest
from gristmill.foundation.manifest import CACHE_FOLDER, MANIFEST_NAME, Manifest, Output, read_manifest

RECORD = Path(CACHE_FOLDER) / "checked" / "outputs.json"


def check_outputs(folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Every output whose path is wanted is there and as the manifest says; in a folder without one nothing is checked.

    Raises InputError that names the file. A file is not read again while its size, times and inode are the same."""
    if (folder / MANIFEST_NAME).is_file():
        check_against(folder, read_manifest(folder), wanted)


def check_against(folder: Path, manifest: Manifest, wanted: Callable[[str], bool] = lambda _: True) -> None:
    """The same, of a folder whose manifest was read."""
    before = read_remembered(folder / RECORD)
    known: dict[str, Any] = dict(before) if isinstance(before, dict) else {}
    for output in manifest.outputs:
        if wanted(output.path):
            known[output.path] = _checked(folder, output, known.get(output.path))
    known = {name: found for name, found in known.items() if found is not None}
    if known != before:
        remember(folder / RECORD, known)


def _checked(folder: Path, output: Output, known: Any) -> dict[str, Any] | None:
    """What to remember of the file; None if it changed too lately to be remembered."""
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
        raise InputError(f"{path}: altered since it was written, for its sha256 is another; {_remedy(folder)}")
    return found if is_settled(state) else None


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raises InputError, which names the folder, where a file in it does not hold what its stage writes."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, pa.ArrowException, OSError) as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{folder}: a file in it is damaged ({said}); {_remedy(folder)}") from error


def _remedy(folder: Path) -> str:
    return f"`gristmill verify {folder}` lists such files: restore them, or remove that folder and run its stage again"
