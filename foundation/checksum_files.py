"""Files that outlive the run that made them, outside of manifests: each has a seal beside it that tells damage.

The seal of X is `.X.seal`: the XXH3-128 of its bytes and, where no kill came between, the state of the file. While the
state is the same the bytes are not read again; in a copied or touched folder they are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import xxhash

from gristmill.foundation.file_state_cache import file_state, read_remembered
from gristmill.foundation.files import atomic_path

READ_BYTES = 1 << 20


@contextmanager
def sealed_path(path: Path) -> Iterator[Path]:
    """As `atomic_path`, and sealed. The seal is there before the file: a file without one is none of ours."""
    with atomic_path(path) as temporary:
        yield temporary
        digest = _digest(temporary)
        _write_seal(path, {"xxh3": digest})
    _write_seal(path, {"xxh3": digest, "state": file_state(path)})


def seal(path: Path) -> None:
    """Seals a file that was written otherwise."""
    _write_seal(path, {"xxh3": _digest(path), "state": file_state(path)})


def is_sealed(path: Path) -> bool:
    """Whether the file is there, was finished, and is as it was then."""
    found = read_remembered(seal_of(path))
    if not isinstance(found, dict) or not path.is_file():
        return False
    return found.get("state") == file_state(path) or found.get("xxh3") == _digest(path)


def drop_damaged(folder: Path, say: Callable[[str], None], unsealed: tuple[str, ...] = ()) -> None:
    """Removes every file below the folder that is not as it was sealed, so that it is made again, and says so.

    unsealed: names of files that have no seal and stay."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        if path.name not in unsealed and not is_sealed(path):
            say(f"{path}: damaged, so it is made again")
            path.unlink()
            seal_of(path).unlink(missing_ok=True)


def remove_seals(folder: Path) -> None:
    """Of a folder whose manifest is about to be written: that vouches for the files from then on."""
    for path in sorted(folder.rglob(".*.seal")):
        path.unlink()


def seal_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.seal")


def _write_seal(path: Path, content: dict[str, Any]) -> None:
    """Not atomic: half a seal fits no file, which is then made again."""
    seal_of(path).write_bytes(orjson.dumps(content))


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()
