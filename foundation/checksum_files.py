"""Checksum files ("seals") for cached files that are in no manifest, to detect damaged or incomplete files.

The seal of X is `.X.seal`: the XXH3-128 of its bytes and, unless the writer was killed in between, the file state.
While the state is the same the bytes are not read again; in a copied or touched folder they are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import xxhash

from gristmill.foundation.file_state_cache import file_state, read_cached
from gristmill.foundation.files import atomic_path

READ_BYTES = 1 << 20


@contextmanager
def sealed_path(path: Path) -> Iterator[Path]:
    """As `atomic_path`, with a seal. The seal is written first, so a file without one was not written by us."""
    with atomic_path(path) as temporary:
        yield temporary
        digest = _digest(temporary)
        _write_seal(path, {"xxh3": digest})
    _write_seal(path, {"xxh3": digest, "state": file_state(path)})


def seal(path: Path) -> None:
    """Write the seal of an existing file."""
    _write_seal(path, {"xxh3": _digest(path), "state": file_state(path)})


def seal_with(path: Path, digest: str) -> None:
    """Write the seal of an existing file whose XXH3-128 is known."""
    _write_seal(path, {"xxh3": digest, "state": file_state(path)})


def is_sealed(path: Path) -> bool:
    """Whether the file exists, is complete and unchanged."""
    found = read_cached(seal_of(path))
    if not isinstance(found, dict) or not path.is_file():
        return False
    return found.get("state") == file_state(path) or found.get("xxh3") == _digest(path)


def drop_damaged(folder: Path, say: Callable[[str], None], unsealed: tuple[str, ...] = ()) -> None:
    """Remove every file below the folder that is damaged or has no seal, and report it; it will be written again.

    unsealed: names of files without seals, which are kept."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        if path.name not in unsealed and not is_sealed(path):
            say(f"{path}: damaged; it is written again")
            path.unlink()
            seal_of(path).unlink(missing_ok=True)


def remove_seals(folder: Path) -> None:
    """Remove all seals before the manifest is written, which then has the digests of the files."""
    for path in sorted(folder.rglob(".*.seal")):
        path.unlink()


def seal_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.seal")


def _write_seal(path: Path, content: dict[str, Any]) -> None:
    """Not atomic: an incomplete seal matches no file, which is then written again."""
    seal_of(path).write_bytes(orjson.dumps(content))


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()
