"""Digest of a module's source and of every module of the same package that it imports, directly or not.

Imports are found in the text, so nothing is imported: `from package.folder.file import name`, `import
package.folder.file` and `DeferredModule("package.folder.file")`, at the top of a file or inside a function. Relative
imports are not followed; there are none."""

import hashlib
import re
from functools import cache
from pathlib import Path

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n]*)|import[ \t]+([\w., \t]+))", re.M
)
_DEFERRED = re.compile(r"\bDeferredModule\(\s*\"([\w.]+)\"")
_NAME, _WORD = re.compile(r"[\w.]+"), re.compile(r"\w+")


def source_files(module: str, path: Path) -> dict[str, Path]:
    """Name -> file of the module and of all modules of its package that it reaches, sorted by name.

    module: its full name, such as gristmill.foundation.files; path: its file."""
    parts = module.split(".")
    root = path.parents[len(parts) - 2] if len(parts) > 1 else path.parent
    found = {module: path}
    waiting = [module]
    while waiting:
        for name, file in _imported(found[waiting.pop()], parts[0], root).items():
            if name not in found:
                found[name] = file
                waiting.append(name)
    return dict(sorted(found.items()))


@cache
def source_digest(module: str, path: Path) -> str:
    """SHA-256 of the bytes of all source_files: any edit changes it."""
    lines = "".join(f"{name} {_file_digest(file)}\n" for name, file in source_files(module, path).items())
    return hashlib.sha256(lines.encode()).hexdigest()


@cache
def _imported(path: Path, package: str, root: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    text = path.read_text("utf-8")
    statements = [*_IMPORT.findall(text), *(("", "", name) for name in _DEFERRED.findall(text))]
    for origin, names, plain in statements:
        members = [f"{origin}.{member}" for member in _WORD.findall(names)]
        for name in _NAME.findall(plain) or [origin, *members]:
            first, *rest = name.split(".")
            file = root.joinpath(*rest).with_suffix(".py") if rest else root / f"{first}.py"
            if first == package and file.is_file():
                found[name] = file
    return found


@cache
def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
