"""Modules that are not imported although a library asks for them, where it does without."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType


class HidingFinder:
    """First in sys.meta_path: raises ImportError for the hidden names, as if they were not installed."""

    def __init__(self, names: Sequence[str]):
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}: hidden by hidden_modules", name=name)


@contextmanager
def hidden_modules(*names: str) -> Iterator[None]:
    """Inside the block, importing one of the names raises ImportError, unless it is imported already.

    After the block all names can be imported again."""
    finder = HidingFinder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
