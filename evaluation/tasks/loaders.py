"""Benchmark files on disk as the documents of lm-eval tasks. Nothing is downloaded; a pinned file is checked."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from gristmill.data_pipeline.errors import InputError
from gristmill.data_pipeline.readers.compression import Damaged, blocks

PACKINGS = ("", ".zst", ".gz", ".bz2", ".xz")
NO_FOLDER = "no data folder is named; give one with --data, or set GRISTMILL_SHARED_DATA"


def load(
    file: str,
    fields: Sequence[str],
    form: str = "jsonl",
    sha256: str | None = None,
    data: str | None = None,
    **stated: Any,
) -> dict[str, Dataset]:
    """{"test": the records of data/file}, which may be packed (.zst, .gz, .bz2, .xz).

    What a task's YAML gives under dataset_kwargs. fields: those every record must have. sha256: of the unpacked bytes;
    without it any version of the file is taken. Raises InputError that says what is expected where."""
    path = find(file, data, fields)
    content = _unpacked(path)
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise InputError(
            f"{path}: not the file this task is pinned to (sha256 {found[:16]}..., expected {sha256[:16]}...); "
            "fetch that one, or write a task of your own without sha256"
        )
    records = list(FORMS[form](content.decode(), path))
    if not records:
        raise InputError(f"{path}: holds no record; fetch the file again")
    for number, record in enumerate(records):
        missing = [field for field in fields if field not in record]
        if missing:
            raise InputError(f"{path}: record {number} has no field {missing[0]!r}; its fields are {sorted(record)}")
    return {"test": Dataset.from_list(records)}


def find(file: str, data: str | None, fields: Sequence[str] = ()) -> Path:
    """The file, packed or not, below the data folder."""
    expected = f"{file} (as it is or as {', '.join(PACKINGS[1:])}): one record a line, with {', '.join(fields)}"
    if data is None:
        raise InputError(f"this task reads {expected}; {NO_FOLDER}")
    for packing in PACKINGS:
        path = Path(data) / f"{file}{packing}"
        if path.is_file():
            return path
    raise InputError(f"{Path(data) / file}: absent; this task reads {expected}")


def _unpacked(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return b"".join(blocks(stream, path.name))
    except Damaged as error:
        raise InputError(f"{path}: {error}; fetch the file again") from error


def _json_lines(text: str, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: not JSON ({error}); fetch the file again") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}:{number}: {type(record).__name__} where an object is expected")
        yield record


def _hellaswag(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """Six lines a record: the context, the number of the right ending, four endings."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) % 6:
        raise InputError(f"{path}: {len(lines)} lines are no whole number of records of 6 lines; it was cut short")
    for first in range(0, len(lines), 6):
        context, gold, *endings = lines[first : first + 6]
        if gold not in ("0", "1", "2", "3"):
            raise InputError(f"{path}:{first + 2}: {gold!r} is no number of an ending (0 to 3)")
        yield {"context": context, "gold": int(gold), "endings": endings}


def _race(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """A record for each question, from either form: that of the release, an article a line with lists of questions,
    options and answers (A to D); or that of the hub, a question a line with its answer."""
    for article in _json_lines(text, path):
        several = "questions" in article
        names = ("questions", "options", "answers") if several else ("question", "options", "answer")
        lists = [article[name] if several else [article[name]] for name in names]
        for question, options, answer in zip(*lists, strict=True):
            gold = "ABCD".index(answer)
            yield {"article": article["article"], "question": question, "options": options, "gold": gold}


def _anli(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """Either form: that of the release (context, and e, n or c), or that of the hub (premise, and 0, 1 or 2)."""
    for record in _json_lines(text, path):
        if "premise" in record:
            record = {**record, "context": record["premise"], "label": "enc"[record["label"]]}
        yield record


FORMS: dict[str, Callable[[str, Path], Iterator[dict[str, Any]]]] = {
    "jsonl": _json_lines,
    "hellaswag": _hellaswag,
    "race": _race,
    "anli": _anli,
}
