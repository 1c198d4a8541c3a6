"""Reader for format `python_docs`: the interpreter's own modules as code, or their docstrings and comments as prose."""

import ast
import re
import warnings
from collections.abc import Iterator

from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt
from gristmill.data_pipeline.readers.source import SourceConfig

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
    for found in _TOKEN.finditer(module):
        if found["comment"] is None:
            continue
        start = module.rfind("\n", 0, found.start()) + 1
        if module[start : found.start()].strip():
            continue  # stands behind code
        line = line_of(found.start())
        text = found["comment"].lstrip("#!").removeprefix(" ").rstrip()
        if line == last_line + 1 and blocks:
            blocks[-1][1].append(text)
        else:
            blocks.append((line, [text]))
        last_line = line
    texts = [(line, "\n".join(held).strip()) for line, held in blocks]
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
    """What follows the first blank line of a METADATA file: the long description. Headers hold addresses and pins."""
    return metadata.partition("\n\n")[2]
