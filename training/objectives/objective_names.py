"""Names of objectives in a recipe, and the files of labelled records that some of them read. Without torch."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import file_digest
from gristmill.foundation.user_code import is_reference, read_source

SCORED_BY_TASKS = ("causal", "distillation", "span_corruption")  # their models give the next token
OWN_DATA = ("classification", "multiple_choice", "span_extraction")  # read records of their own, no corpus
RECORD_FILES = ("train", "validation", "test")  # the options that name them
BUILT_IN = ("causal", "distillation", "masked", "span_corruption", "source_classification", *OWN_DATA)


def objective_identity(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Identity of the objective in the run's fingerprint: its name, or class and digest of the user's file."""
    if name in BUILT_IN:
        return {"name": name, "options": dict(options)}
    path, class_name = parse_user_objective(name)
    source = read_source(path, "train.objective")
    return {"class": class_name, "sha256": hashlib.sha256(source.encode()).hexdigest(), "options": dict(options)}


def records_digests(options: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of each file of records that the options name. Raises InputError if one cannot be read."""
    digests = {}
    for split in RECORD_FILES:
        if options.get(split) is not None:
            path = Path(str(options[split]))
            try:
                digests[split] = records_digest(path)
            except OSError as error:
                raise InputError(
                    f"train.objective_options.{split}: {path}: {error.strerror}; name a file of records"
                ) from error
    return digests


def parse_user_objective(name: str) -> tuple[Path, str]:
    """ "a/my_objective.py:Rewarded" -> (Path("a/my_objective.py"), "Rewarded")."""
    path, _, class_name = name.rpartition(":")
    if not is_reference(name):
        raise RecipeError(
            f"train.objective: {name!r} is not one of {list(BUILT_IN)}, nor a class in a Python file such as "
            "my_objective.py:Rewarded; correct the name"
        )
    return Path(path), class_name


# Files of labelled records: JSON lines, tables separated by tabs, and whole JSON files.


Located = tuple[dict[str, Any], str]  # a record, and "FILE:LINE" or its place in a JSON file


def read_records(path: Path) -> list[Located]:
    """The records of a file, or of all files of a folder, by name. Raises InputError naming file and line.

    .tsv: a header, then a record a line (GLUE's files: no quoting, no escapes); anything else is JSON, as a whole or a
    record a line. A JSON object with `data` is a file of SQuAD: a record for each question."""
    records = [located for file in record_paths(path) for located in _read_file(file)]
    if not records:
        raise InputError(f"{path}: holds no record; name a file of JSON lines")
    return records


def record_paths(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))


def records_digest(path: Path) -> str:
    """Digest of the bytes of all files of `read_records`, in its order. Raises OSError if one cannot be read."""
    digests = [file_digest(file) for file in record_paths(path)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def label_name(label: Any) -> Any:
    """A label as text: 1 -> "1", true -> "true"."""
    if isinstance(label, bool):
        return str(label).lower()
    return str(label) if isinstance(label, int) else label


def _read_file(path: Path) -> Iterator[Located]:
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); name a file of records in UTF-8") from error
    if path.suffix == ".tsv":
        return _table_rows(path, text.split("\n"))
    whole = _whole_json(text) if path.suffix != ".jsonl" else None
    if isinstance(whole, dict) and isinstance(whole.get("data"), list):
        return _squad_questions(path, whole["data"])
    if isinstance(whole, list):
        return _checked(((record, f"{path}: record {number}") for number, record in enumerate(whole)))
    return _json_lines(path, text.split("\n"))


def _whole_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_lines(path: Path, lines: list[str]) -> Iterator[Located]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON ({error}); correct the line") from error
        yield from _checked([(record, where)])


def _checked(records: Any) -> Iterator[Located]:
    for record, where in records:
        if not isinstance(record, dict):
            raise InputError(f"{where}: no JSON object; correct the line")
        yield record, where


def _table_rows(path: Path, lines: list[str]) -> Iterator[Located]:
    names = lines[0].rstrip("\r").split("\t")
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) != len(names):
            raise InputError(
                f"{path}:{number}: {len(cells)} columns, the header has {len(names)}: {names}; correct the line"
            )
        yield dict(zip(names, cells, strict=True)), f"{path}:{number}"


def _squad_questions(path: Path, articles: list[Any]) -> Iterator[Located]:
    for i, article in enumerate(articles):
        for j, paragraph in enumerate(_list_in(article, "paragraphs", f"{path}: data[{i}]")):
            where = f"{path}: data[{i}].paragraphs[{j}]"
            for k, question in enumerate(_list_in(paragraph, "qas", where)):
                if not isinstance(question, dict):
                    raise InputError(f"{where}.qas[{k}]: no JSON object; correct the file")
                yield question | {"context": paragraph.get("context")}, f"{where}.qas[{k}]"


def _list_in(parsed: Any, name: str, where: str) -> list[Any]:
    if not isinstance(parsed, dict) or not isinstance(parsed.get(name), list):
        raise InputError(f"{where}: has no list `{name}`, as files of SQuAD have; correct the file")
    return parsed[name]
