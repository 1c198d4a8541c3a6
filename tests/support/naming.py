"""Names and words that the six folders of the package do not use; `make lint` runs this file.

python tests/support/naming.py [FOLDER...] prints FILE:LINE: what is wrong, and exits with 1 if anything is."""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("foundation", "data_pipeline", "tokenizers", "training", "evaluation", "pipelines")
# They say nothing of the value: a noun of the field does (document, layer, matches, kept_rows).
VAGUE_NAMES = {"found", "one", "each", "held", "mine", "theirs", "shown", "again", "room"}
# Classes and functions of earlier versions, and the field's word that they have now.
FIELD_WORDS = {
    "AddressOptions": "ListenOptions",
    "Finding": "Issue",
    "Found": "a noun of the field (NgramMatches, BenchmarkHits)",
    "Played": "ScheduleTrace",
    "Processes": "RunContext",
    "Publisher": "Uploader",
    "Say": "LogLine",
    "Shuffle": "PartitionedFiles",
    "Turn": "SchedulerStep",
    "Verdict": "ChanceTest",
    "behind": "of_mirror",
    "last_line": "error_summary",
    "marked": "capital_letter_rules",
    "not_of_transformers": "unsupported_by_transformers",
    "play": "simulate",
    "say": "info",
    "shown": "format_value, html_text or what it returns",
    "smoothed": "moving_average",
}
# A codec compresses, or is a text's encoding; elsewhere a text is encoded by a tokenizer.
CODEC_FOLDERS = ("data_pipeline",)
VAGUE_OPENINGS = ("Of", "What")
# One spelling, -ize. Words that are always written with s (exercise, revise) have another stem. Fields of
# earlier versions (model.initialisation) keep theirs, in the table of recipe_file.py that says the new name.
BRITISH = re.compile(
    r"(?<!\.)\b\w*(?:initial|normal|penal|linear|util|special|quant|parallel|organ|minim|maxim|general|capital|optim|recogn|"
    r"summar|serial|token|synchron|material|random|vector|real)is(?:e|es|ed|ing|ation|ations|er|ers)\b",
    re.IGNORECASE,
)

Fault = tuple[Path, int, str]


def vague_names(path: Path, tree: ast.Module) -> Iterator[Fault]:
    """Values and parameters called by one of VAGUE_NAMES."""
    for node in ast.walk(tree):
        name = node.arg if isinstance(node, ast.arg) else ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name in VAGUE_NAMES:
            yield path, node.lineno, f"a value is called {name}: use the noun that says what it is"


def field_words(path: Path, tree: ast.Module) -> Iterator[Fault]:
    """Classes and functions called by a word of FIELD_WORDS, and values called codec outside of CODEC_FOLDERS."""
    for node in ast.walk(tree):
        name = node.name.lstrip("_") if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else ""
        if name in FIELD_WORDS:
            yield path, node.lineno, f"{name}: write {FIELD_WORDS[name]}"
        values = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}
        value = getattr(node, values.get(type(node), ""), "")
        if "codec" in value.lower() and value != "codecs" and path.parts[0] not in CODEC_FOLDERS:
            yield path, node.lineno, f"{value}: call a tokenizer by its name"


def vague_openings(path: Path, tree: ast.Module) -> Iterator[Fault]:
    """Docstrings that begin with "Of ..." or "What ..."."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            first = (ast.get_docstring(node) or "-").split()[0]
            if first in VAGUE_OPENINGS:
                yield path, node.body[0].lineno, f"a docstring begins with {first!r}: begin with a noun or a verb"


def british_spellings(path: Path, text: str) -> Iterator[Fault]:
    """Words in -ise and -isation."""
    for number, line in enumerate(text.split("\n"), 1):
        for match in BRITISH.finditer(line):
            yield path, number, f"{match.group()}: write it with z"


def repeated_classes(trees: dict[Path, ast.Module]) -> Iterator[Fault]:
    """Public classes of one name in two files."""
    files = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append((path, node.lineno))
    for name, places in files.items():
        for path, line in places[1:]:
            yield path, line, f"class {name} is in {places[0][0]} too: say which it is by its name"


def faults(folders: Sequence[str] = FOLDERS, root: Path = ROOT) -> list[Fault]:
    """All faults of the Python files below these folders, in order."""
    texts = {path: path.read_text("utf-8") for folder in folders for path in sorted((root / folder).rglob("*.py"))}
    trees = {path.relative_to(root): ast.parse(text) for path, text in texts.items()}
    faults = list(repeated_classes(trees))
    for path, tree in trees.items():
        faults += [*vague_names(path, tree), *field_words(path, tree), *vague_openings(path, tree)]
        faults += british_spellings(path, texts[root / path])
    return sorted(faults)


if __name__ == "__main__":
    FAULTS = faults(sys.argv[1:] or FOLDERS)
    print("\n".join(f"{path}:{line}: {message}" for path, line, message in FAULTS) or "names: no fault")
    sys.exit(bool(FAULTS))
