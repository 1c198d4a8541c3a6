"""Modules that are imported when they are first used: for large libraries that most runs of a command do not need."""

import importlib
from types import ModuleType
from typing import Any


class DeferredModule:
    """Stands for a module of that name and imports it at the first access to an attribute.

    trafilatura = DeferredModule("trafilatura") at the top of a file, then trafilatura.extract(page) as usual. An import
    error is raised at that access."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loaded(), attribute)

    def __repr__(self) -> str:
        return f"<deferred module {self._name!r}>"

    def _loaded(self) -> ModuleType:
        return importlib.import_module(self._name)
