"""Arrays as files that are whole or absent, with the same bytes for the same values."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.dedup.part import Part
from gristmill.data_pipeline.errors import InputError
from gristmill.data_pipeline.provenance.canonical import canonical_json
from gristmill.data_pipeline.provenance.files import atomic_path, is_temporary, write_atomic


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes one .npy file, whole or not at all."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array(file, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)


def load_array(path: Path, mapped: bool = False) -> np.ndarray:
    """The array of one .npy file; mapped: pages are read as they are touched. Raises InputError if it is damaged."""
    try:
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"{path}: no readable array ({error}); delete the folder it stands in and run again"
        ) from error


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """Makes `folder` the workspace of the work that `identity` describes: what that work left there is kept.

    What any other work left there is removed, and so are files that a kill left half written."""
    mark = folder / "identity.json"
    content = canonical_json(identity)
    if mark.exists() and mark.read_bytes() == content:
        for path in [path for path in folder.rglob("*") if is_temporary(path)]:
            path.unlink()
        return
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_atomic(mark, content)


def part_identity(part: Part) -> dict[str, Any]:
    """What decides the work on one part: source, priority, living rows, and the file by size and Parquet footer.

    The footer holds the sizes, offsets and statistics of every column of every row group."""
    size = int(part.bytes)
    with part.path.open("rb") as file:
        file.seek(max(size - 8, 0))
        footer = int.from_bytes(file.read(4), "little") + 8
        file.seek(max(size - footer, 0))
        digest = hashlib.sha256(file.read()).hexdigest()
    living = "all" if part.alive is None else hashlib.sha256(np.packbits(part.alive).tobytes()).hexdigest()
    return {"source": part.source, "priority": part.priority, "bytes": size, "footer": digest, "alive": living}
