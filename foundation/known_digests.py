"""SHA-256 digests of files, each computed once until its file changes."""

from collections.abc import Callable
from pathlib import Path

from gristmill.foundation.files import file_digest


class KnownDigests:
    """Digests of files that this process hashed, or that `add` told it. A file keeps its digest when it is renamed, and
    loses it when its size or time of modification changes. on_progress is called after every 16 MB."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, ...], str] = {}
        self.on_progress: Callable[[], None] = lambda: None

    def __call__(self, path: Path) -> str:
        state = _state(path)
        if state not in self._digests:
            self._digests[state] = file_digest(path, self.on_progress)
        return self._digests[state]

    def add(self, path: Path, digest: str) -> None:
        """digest: of the file as it is now, computed by another process."""
        self._digests[_state(path)] = digest


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
