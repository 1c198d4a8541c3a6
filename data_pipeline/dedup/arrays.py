"""Arrays as files that are whole or absent, with the same bytes for the same values."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.foundation.canonical_json import canonical_json
from gristmill.foundation.checksum_files import sealed_path
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import is_temporary, remove_tree, sweep, write_atomic
from gristmill.foundation.task_files import fetch

IDENTITY_FILE = "identity.json"


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes one .npy file, whole or not at all."""
    with sealed_path(path) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array(file, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)


def load_array(path: Path, mapped: bool = False) -> np.ndarray:
    """The array of one .npy file; mapped: pages are read as they are touched. Raises InputError if it is damaged."""
    try:
        return np.load(fetch(path), mmap_mode="r" if mapped else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: no readable array ({error}); delete its folder and run again") from error


def open_workspace(folder: Path, identity: dict[str, Any]) -> None:
    """Makes `folder` the workspace of the work that `identity` describes: what that work left there is kept.

    What other work of this kind left there is removed, and so are files that a kill left half written. Raises
    InputError if the folder holds anything else."""
    mark = folder / IDENTITY_FILE
    content = canonical_json(identity)
    folder.mkdir(parents=True, exist_ok=True)
    others = [path for path in folder.iterdir() if path != mark and not is_temporary(path)]
    if others and not mark.exists():
        raise InputError(f"{folder}: holds {others[0].name}, which is not deduplication's; name an empty folder")
    if not mark.exists() or mark.read_bytes() != content:
        write_atomic(mark, b"")  # the identity of no work, so that a kill in between does not keep half of them
        for path in others:
            remove_tree(path) if path.is_dir() else path.unlink()
        write_atomic(mark, content)
    sweep(folder)


def document_file_identity(document_file: DocumentFile) -> dict[str, Any]:
    """What decides the work on one document file: source, priority, kept rows, and the file by size and Parquet footer.

    The footer holds the sizes, offsets and statistics of every column of every row group."""
    size = int(document_file.bytes)
    with document_file.path.open("rb") as file:
        file.seek(max(size - 8, 0))
        footer = int.from_bytes(file.read(4), "little") + 8
        file.seek(max(size - footer, 0))
        digest = hashlib.sha256(file.read()).hexdigest()
    return {
        "source": document_file.source,
        "priority": document_file.priority,
        "bytes": size,
        "footer": digest,
        "kept": document_file.kept_digest() or "all",
    }
