"""Load benchmark files from disk as the documents of lm-eval tasks. Nothing is downloaded; digests are checked."""

import hashlib
import json
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.foundation.errors import InputError

COMPRESSIONS = ("", ".zst", ".gz", ".bz2", ".xz")
NO_FOLDER = "no data folder is named; give one with evaluate.data of the recipe, --data, or GRISTMILL_SHARED_DATA"


def load(
    file: str,
    fields: Sequence[str],
    form: str = "jsonl",
    sha256: str | None = None,
    fewshot_file: str | None = None,
    split: str = "test",
    data: str | None = None,
    **stated: Any,
) -> dict[str, Dataset]:
    """{split: records of data/file, "train": records of data/fewshot_file}; files may be compressed (.zst, .gz, .bz2,
    .xz).

    The parameters are the `dataset_kwargs` of a task's YAML. fields: required in every record. sha256: of the
    decompressed bytes; None accepts any file. fewshot_file: of the few-shot examples; "train" is empty if it is absent.
    Raises InputError with the expected file and format."""
    fewshot_path = None if fewshot_file is None else find_packed(fewshot_file, data)
    path = find(file, data, fields)
    return {
        "train": Dataset.from_list([])
        if fewshot_path is None
        else _documents(fewshot_path, _records(fewshot_path, fields, form, None)),
        split: _documents(path, _records(path, fields, form, sha256)),
    }


def _documents(path: Path, records: list[dict[str, Any]]) -> Dataset:
    try:
        return Dataset.from_list(records)
    except (pa.ArrowException, UnicodeError, OverflowError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: a field has different types in different records, or a value that is no text or 64-bit number "
            f"({' '.join(str(error).split())[:200]}); correct the file"
        ) from error


def _records(path: Path, fields: Sequence[str], form: str, sha256: str | None) -> list[dict[str, Any]]:
    content = _unpacked(path)
    digest = hashlib.sha256(content).hexdigest()
    if sha256 is not None and digest != sha256:
        raise InputError(
            f"{path}: not the file that the task pins (sha256 {digest[:16]}..., expected {sha256[:16]}...); "
            "download that one, or write your own task without sha256"
        )
    if form not in FORMS:
        raise InputError(f"{path}: the task's form {form!r} is unknown; known are {', '.join(FORMS)}")
    try:
        records = list(FORMS[form](content.decode(), path))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error}); fetch the file again") from error
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: a record is not in the format {form!r} ({type(error).__name__}: {error}); fetch the file again"
        ) from error
    if not records:
        raise InputError(f"{path}: has no record; download the file again")
    for number, record in enumerate(records):
        missing = [field for field in fields if field not in record]
        if missing:
            raise InputError(f"{path}: record {number} has no field {missing[0]!r}; its fields are {sorted(record)}")
    return records


def find(file: str, data: str | None, fields: Sequence[str] = ()) -> Path:
    """The file below the data folder, compressed or not. Raises InputError if it is absent."""
    expected = f"{file} (as it is or as {', '.join(COMPRESSIONS[1:])}): one record a line, with {', '.join(fields)}"
    if data is None:
        raise InputError(f"this task reads {expected}; {NO_FOLDER}")
    path = find_packed(file, data)
    if path is None:
        raise InputError(f"{Path(data) / file}: absent; this task reads {expected}")
    return path


def find_packed(file: str, data: str | None) -> Path | None:
    """The file below the data folder, compressed or not; None if it is absent."""
    if Path(file).is_absolute() or ".." in Path(file).parts:
        raise InputError(f"dataset_kwargs names {file}: give a path below the data folder, without '..'")
    paths = [] if data is None else [Path(data) / f"{file}{suffix}" for suffix in COMPRESSIONS]
    return next((path for path in paths if path.is_file()), None)


def _unpacked(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return b"".join(blocks(stream, path.name))
    except Damaged as error:
        raise InputError(f"{path}: {error}; fetch the file again") from error


# File formats of benchmarks, each read as records with the fields that the task's prompt uses.


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


# The forms below give records the fields that the hub's copies have, which lm-eval's prompts are written for.


def _race(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """A record an article, its problems in one string, as EleutherAI/race on the hub has them, which is taken as it is.

    From the release: an article a line with lists of questions, options and answers (A to D). From the hub's other
    copy: a question a line with its article, those of one article together."""
    for article, lines in groupby(_json_lines(text, path), key=lambda line: line["article"]):
        problems: list[dict[str, Any]] = []
        for line in lines:
            if "problems" in line:
                problems += literal_eval(line["problems"])
                continue
            several = "questions" in line
            names = ("questions", "options", "answers") if several else ("question", "options", "answer")
            lists = [line[name] if several else [line[name]] for name in names]
            for question, options, answer in zip(*lists, strict=True):
                if "ABCD".index(answer) >= len(options):
                    raise ValueError(f"the answer {answer} of {len(options)} options")
                problems.append({"question": question, "answer": answer, "options": options})
        yield {"article": article, "problems": repr(problems)}


def _anli(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """Either format: that of the release (context, and e, n or c), or that of the hub (premise, and 0, 1 or 2)."""
    for record in _json_lines(text, path):
        if "context" in record:
            record = {"premise": record.pop("context"), **record, "label": "enc".index(record["label"])}
        yield record


def _arc(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """From llm-foundry's prompts: "Question: ..." -> question, choices with their letters, the answer's letter."""
    for record in _json_lines(text, path):
        if "query" in record:
            record = {"question": record["query"].removeprefix("Question: "), **_lettered(record)}
        yield record


def _openbookqa(text: str, path: Path) -> Iterator[dict[str, Any]]:
    for record in _json_lines(text, path):
        if "query" in record:
            record = {"question_stem": record["query"], **_lettered(record)}
        yield record


def _lettered(record: dict[str, Any]) -> dict[str, Any]:
    letters = [chr(ord("A") + number) for number in range(len(record["choices"]))]
    return {"choices": {"text": record["choices"], "label": letters}, "answerKey": letters[record["gold"]]}


def _boolq(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """From llm-foundry's prompts: "Passage: ...\nQuestion: ...?" -> passage, question without its mark, label."""
    for record in _json_lines(text, path):
        if "query" in record:
            passage, question = record["query"].removeprefix("Passage: ").rsplit("\nQuestion: ", 1)
            record = {"passage": passage, "question": question.removesuffix("?"), "label": record["gold"]}
        yield record


def _copa(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """From llm-foundry's prompts: "It rained, therefore" -> the premise "It rained.", and that its effect is asked."""
    for record in _json_lines(text, path):
        if "query" in record:
            premise, connector = record["query"].rsplit(", ", 1)
            asked = {"because": "cause", "therefore": "effect"}[connector]
            first, second = record["choices"]
            record = {"premise": f"{premise}.", "choice1": first, "choice2": second, "question": asked,
                      "label": record["gold"]}  # fmt: skip
        yield record


def _piqa(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """From llm-foundry's prompts: "Question: ...\n" -> goal, both solutions, label."""
    for record in _json_lines(text, path):
        if "query" in record:
            first, second = record["choices"]
            goal = record["query"].removeprefix("Question: ").removesuffix("\n")
            record = {"goal": goal, "sol1": first, "sol2": second, "label": record["gold"]}
        yield record


def _winogrande(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """From both filled beginnings and the end they share -> the sentence with its gap `_`, both options, 1 or 2."""
    for record in _json_lines(text, path):
        if "context_options" in record:
            first, second = record["context_options"]
            same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
            before = "".join(letter for letter, _ in same)
            before = before[: before.rfind(" ") + 1]
            record = {"sentence": f"{before}_ {record['continuation']}", "option1": first[len(before) :],
                      "option2": second[len(before) :], "answer": str(record["gold"] + 1)}  # fmt: skip
        yield record


def _wic(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """The label of the release ("true", "false", or a JSON truth value) -> 1, 0."""
    for record in _json_lines(text, path):
        label = record["label"]
        yield {**record, "label": label if isinstance(label, int) else ("false", "true").index(label)}


def _lambada(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """From context and last word -> the whole text. A last word after a line break follows without a space."""
    for record in _json_lines(text, path):
        if "continuation" in record:
            word = record["continuation"]
            record = {"text": record["context"] + ("" if word[:1].isspace() else " ") + word}
        yield record


def _lines(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """A text is a line; empty lines are none."""
    for line in text.split("\n"):
        if line.strip():
            yield {"text": line.rstrip("\r")}


FORMS: dict[str, Callable[[str, Path], Iterator[dict[str, Any]]]] = {
    "jsonl": _json_lines,
    "hellaswag": _hellaswag,
    "race": _race,
    "anli": _anli,
    "arc": _arc,
    "openbookqa": _openbookqa,
    "boolq": _boolq,
    "copa": _copa,
    "piqa": _piqa,
    "winogrande": _winogrande,
    "wic": _wic,
    "lambada": _lambada,
    "lines": _lines,
}
