"""Reader for format `python_docs`: the interpreter's own modules as code, or their docstrings and comments as prose."""

import ast
import csv
import importlib.metadata
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError

# Shorter comment blocks ("# type: ignore") are not prose.
MIN_COMMENT_CHARS = 80

# Matches one string or comment, so that a "#" inside a string is not a comment. Longest quotes first; an unclosed
# string reaches to the end of the text, which keeps the search linear.
_TOKEN = re.compile(
    r'"""(?:\\.?|[^\\])*?(?:"""|\Z)'
    r"|'''(?:\\.?|[^\\])*?(?:'''|\Z)"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'"
    r"|(?P<comment>#[^\n]*)",
    re.DOTALL,
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read_python_docs(raw: bytes, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """Read one document per file: the module itself (code), or its docstrings and comment blocks in order (prose);
    METADATA's long description and licence texts unchanged. A module without prose gives no document."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        yield Unreadable(
            0, "invalid_encoding", f"invalid utf-8 at byte {error.start}", error.start, excerpt(raw[error.start :])
        )
        return
    if name.endswith("/METADATA"):
        text = _description(text)
    elif source.part == "prose" and name.endswith(".py"):
        try:
            text = prose(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            yield Unreadable(0, "no_python", f"not a Python module: {type(error).__name__}: {error}", 0, excerpt(text))
            return
    if text.strip():
        yield Record(0, text, language=source.language or "en")


def prose(module: str) -> str:
    """Docstrings and comment blocks in source order, separated by blank lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in string literals
        tree = ast.parse(module)
    pieces = [(line, text) for line, text in _docstrings(tree)] + _comments(module)
    return "\n\n".join(text for _, text in sorted(pieces))


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text
        for field in ("body", "orelse", "handlers", "finalbody"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                waiting.extend(inner)


def _comments(module: str) -> list[tuple[int, str]]:
    """(first line, text) of each run of whole-line comments, without the marks."""
    line_of = _line_numbers(module)
    blocks: list[tuple[int, list[str]]] = []
    last_line = -1
    for token in _TOKEN.finditer(module):
        if token["comment"] is None:
            continue
        start = module.rfind("\n", 0, token.start()) + 1
        if module[start : token.start()].strip():
            continue  # stands behind code
        line = line_of(token.start())
        text = token["comment"].lstrip("#!").removeprefix(" ").rstrip()
        if line == last_line + 1 and blocks:
            blocks[-1][1].append(text)
        else:
            blocks.append((line, [text]))
        last_line = line
    texts = [(line, "\n".join(lines).strip()) for line, lines in blocks]
    return [(line, text) for line, text in texts if len(text) >= MIN_COMMENT_CHARS]


def _line_numbers(module: str):
    """A function from position to line number, from 1, for positions that only grow."""
    at, line = 0, 1

    def number(position: int) -> int:
        nonlocal at, line
        line += module.count("\n", at, position)
        at = position
        return line

    return number


def _description(metadata: str) -> str:
    """Long description of a METADATA file: the text behind its first blank line. Headers hold addresses and pins."""
    return metadata.partition("\n\n")[2]


# Files of the running interpreter that format `python_docs` reads: a corpus that every machine has.

# Folders of tests, test data, caches or third-party packages.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "testing", "__pycache__", "site-packages", "lib-dynload", "_bundled"}
LICENCE_NAMES = ("licen", "copying", "notice", "authors", "copyright")


def python_files(source: SourceConfig) -> dict[str, str]:
    """Name -> path. `stdlib/json/decoder.py`, `numpy/linalg/_linalg.py`, `dist/numpy/METADATA`; never a folder of
    this machine. Code: the standard library. Prose: that, the packages the recipe names, and every distribution's
    METADATA and licence files. Empty files are excluded."""
    standard = Path(sysconfig.get_paths()["stdlib"])
    paths = {f"stdlib/{path.relative_to(standard).as_posix()}": path for path in _modules(standard)}
    if source.part == "prose":
        for package in source.packages:
            paths |= _package(package)
        paths |= _metadata()
    return {name: str(path) for name, path in sorted(paths.items()) if path.stat().st_size}


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
    descriptions = {}
    for distribution in importlib.metadata.distributions(path=_site_folders()):
        name = (distribution.metadata["Name"] or "").lower()
        if not name or name == "gristmill":
            continue
        for file in _installed_files(distribution):
            _, inside, below = file.partition(".dist-info/")
            if inside and (below == "METADATA" or _is_licence(below.rpartition("/")[2])):
                path = Path(str(distribution.locate_file(file)))
                if path.is_file():
                    descriptions[f"dist/{name}/{below}"] = path
    return descriptions


def _installed_files(distribution: importlib.metadata.Distribution) -> list[str]:
    """Names as the package's RECORD has them, of those beside it. `distribution.files` makes a path of each of all
    packages' files, which takes a second."""
    record = distribution.read_text("RECORD")
    if record is None:
        return [str(file) for file in distribution.files or ()]
    return [name for name, *_ in csv.reader(line for line in record.splitlines() if ".dist-info/" in line)]


def _is_licence(name: str) -> bool:
    return any(word in name.lower() for word in LICENCE_NAMES) and not name.endswith((".py", ".pyc"))


def _site_folders() -> list[str]:
    """Where packages are installed: the interpreter's own folders first, then those that a `.pth` file added, such as
    the site-packages of the environment below this one."""
    paths = sysconfig.get_paths()
    own = sorted({paths["purelib"], paths["platlib"]})
    added = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [*dict.fromkeys([*own, *added])]
