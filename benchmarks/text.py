"""Text for benchmarks: a given folder, the shared corpora, or seeded synthetic text."""

import ast
import io
import itertools
import json
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import zstandard

ROOT = Path(__file__).parent.parent
SOURCE_SUFFIXES, LONGEST_SOURCE = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".html"}, 2_000_000
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CORPORA = Path(os.environ.get("GRISTMILL_SHARED_DATA") or ROOT / "../shared/data") / "corpora"


def documents(folder: Path | None, num_bytes: int) -> list[str]:
    """Documents of about num_bytes of UTF-8 in all, shuffled with a fixed seed; synthetic ones if there are none.

    A folder holds .txt, .md or .jsonl(.zst) files with a field `text`."""
    chosen = folder or CORPORA
    found = list(_read(chosen)) if chosen.is_dir() else []
    found = found or list(made(num_bytes))
    random.Random(0).shuffle(found)
    taken, held = [], 0
    for text in found:
        if held >= num_bytes:
            break
        taken.append(text)
        held += len(text.encode())
    return taken


def made(num_bytes: int) -> Iterator[str]:
    """Synthetic text: words of a Zipf-distributed vocabulary in sentences and paragraphs."""
    rng = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, range(26, 0, -1), k=rng.randint(1, 9))) for _ in range(30_000)]
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(words) + 1)))

    def sentence() -> str:
        return f"{' '.join(rng.choices(words, cum_weights=weights, k=rng.randint(4, 20))).capitalize()}."

    written = 0
    while written < num_bytes:
        text = "\n\n".join("\n".join(sentence() for _ in range(5)) for _ in range(12))
        written += len(text)
        yield text


def installed_texts(num_bytes: int) -> list[str]:
    """Source code and documents of the installed Python packages, of about num_bytes, shuffled with a fixed seed, every
    text once: real text of hundreds of MB that every machine has."""
    paths = [path for path in Path(zstandard.__file__).parents[1].rglob("*") if path.suffix in SOURCE_SUFFIXES]
    random.Random(0).shuffle(paths := sorted(paths))
    texts: dict[bytes, None] = {}
    held = 0
    for path in paths:
        content = path.read_bytes() if held < num_bytes and path.is_file() else b""
        if 0 < len(content) <= LONGEST_SOURCE and content not in texts:
            texts[content] = None
            held += len(content)
    return [content.decode("utf-8", "replace") for content in texts]


def docstrings() -> Iterator[str]:
    """The docstrings of each module of the standard library: a few MB of English on every machine."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in (library / f"{name}.py" for name in sorted(sys.stdlib_module_names)):
        if path.is_file():
            nodes = ast.walk(ast.parse(path.read_bytes()))
            found = (ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED))
            yield "\n\n".join(text for text in found if text)


def _read(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".txt", ".md"):
            yield path.read_text("utf-8")
        elif path.name.endswith((".jsonl", ".jsonl.zst")):
            yield from _texts(path)


def _texts(path: Path) -> Iterator[str]:
    with path.open("rb") as raw:
        stream = zstandard.ZstdDecompressor().stream_reader(raw) if path.suffix == ".zst" else raw
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            text = json.loads(line).get("text")
            if text:
                yield text
