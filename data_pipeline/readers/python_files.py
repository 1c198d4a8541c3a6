"""Files of the running interpreter that format `python_docs` reads: a corpus that every machine has."""

import importlib.metadata
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError

# Folders of tests, test data, caches or third-party packages.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "testing", "__pycache__", "site-packages", "lib-dynload", "_bundled"}
LICENCE_NAMES = ("licen", "copying", "notice", "authors", "copyright")


def python_files(source: SourceConfig) -> dict[str, str]:
    """Name -> path. `stdlib/json/decoder.py`, `numpy/linalg/_linalg.py`, `dist/numpy/METADATA`; never a folder of
    this machine. Code: the standard library. Prose: that, the packages the recipe names, and every distribution's
    METADATA and licence files. Empty files are excluded."""
    standard = Path(sysconfig.get_paths()["stdlib"])
    found = {f"stdlib/{path.relative_to(standard).as_posix()}": path for path in _modules(standard)}
    if source.part == "prose":
        for package in source.packages:
            found |= _package(package)
        found |= _metadata()
    return {name: str(path) for name, path in sorted(found.items()) if path.stat().st_size}


def _modules(root: Path) -> Iterator[Path]:
    """Every module below the folder, without tests and the build's settings, which hold paths of this machine."""
    for folder, folders, files in os.walk(root):  # Path.walk is Python 3.12's
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("config-"))
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(("_sysconfigdata", "test_")):
                yield Path(folder) / name


def _package(name: str) -> dict[str, Path]:
    root = next((Path(p) / name for p in _site_folders() if (Path(p) / name).is_dir()), None)
    if root is None:
        raise InputError(f"python_docs: no package {name!r} is installed; install it or remove it from packages")
    return {f"{name}/{path.relative_to(root).as_posix()}": path for path in _modules(root)}


def _metadata() -> dict[str, Path]:
    found = {}
    for distribution in importlib.metadata.distributions(path=_site_folders()):
        name = (distribution.metadata["Name"] or "").lower()
        if not name or name == "gristmill":
            continue
        for file in distribution.files or ():
            inner = next((i for i, part in enumerate(file.parts) if part.endswith(".dist-info")), None)
            if inner is None or inner + 1 == len(file.parts):
                continue
            below = "/".join(file.parts[inner + 1 :])
            path = Path(str(distribution.locate_file(file)))
            if (below == "METADATA" or _is_licence(file.parts[-1])) and path.is_file():
                found[f"dist/{name}/{below}"] = path
    return found


def _is_licence(name: str) -> bool:
    return any(word in name.lower() for word in LICENCE_NAMES) and not name.endswith((".py", ".pyc"))


def _site_folders() -> list[str]:
    paths = sysconfig.get_paths()
    return sorted({paths["purelib"], paths["platlib"]})
