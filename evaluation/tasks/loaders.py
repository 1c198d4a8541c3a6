"""Benchmark files on disk as the documents of lm-eval tasks. Nothing is downloaded; a pinned file is checked."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.evaluation.tasks.benchmark_formats import FORMS
from gristmill.foundation.errors import InputError

PACKINGS = ("", ".zst", ".gz", ".bz2", ".xz")
NO_FOLDER = "no data folder is named; give one with --data, or set GRISTMILL_SHARED_DATA"


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
    """{split: the records of data/file, "train": those of data/fewshot_file}; both may be packed (.zst, .gz, .bz2, .xz)

    What a task's YAML gives under dataset_kwargs. fields: those every record must have. sha256: of the unpacked bytes;
    without it any version of the file is taken. fewshot_file: where few-shot examples come from; "train" is empty if it
    is not there. Raises InputError that says what is expected where."""
    shown = None if fewshot_file is None else find_packed(fewshot_file, data)
    asked = find(file, data, fields)
    return {
        "train": Dataset.from_list([]) if shown is None else _documents(shown, _records(shown, fields, form, None)),
        split: _documents(asked, _records(asked, fields, form, sha256)),
    }


def _documents(path: Path, records: list[dict[str, Any]]) -> Dataset:
    try:
        return Dataset.from_list(records)
    except (pa.ArrowException, UnicodeError, OverflowError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: a field has not the same type in all records, or holds what is no text or number of 64 bits "
            f"({' '.join(str(error).split())[:200]}); mend the file"
        ) from error


def _records(path: Path, fields: Sequence[str], form: str, sha256: str | None) -> list[dict[str, Any]]:
    content = _unpacked(path)
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise InputError(
            f"{path}: not the file this task is pinned to (sha256 {found[:16]}..., expected {sha256[:16]}...); "
            "fetch that one, or write a task of your own without sha256"
        )
    if form not in FORMS:
        raise InputError(f"{path}: a task asks for the form {form!r}; there are {', '.join(FORMS)}")
    try:
        records = list(FORMS[form](content.decode(), path))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error}); fetch the file again") from error
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: a record is not of the form {form!r} ({type(error).__name__}: {error}); fetch the file again"
        ) from error
    if not records:
        raise InputError(f"{path}: holds no record; fetch the file again")
    for number, record in enumerate(records):
        missing = [field for field in fields if field not in record]
        if missing:
            raise InputError(f"{path}: record {number} has no field {missing[0]!r}; its fields are {sorted(record)}")
    return records


def find(file: str, data: str | None, fields: Sequence[str] = ()) -> Path:
    """The file, packed or not, below the data folder."""
    expected = f"{file} (as it is or as {', '.join(PACKINGS[1:])}): one record a line, with {', '.join(fields)}"
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
    paths = [] if data is None else [Path(data) / f"{file}{packing}" for packing in PACKINGS]
    return next((path for path in paths if path.is_file()), None)


def _unpacked(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return b"".join(blocks(stream, path.name))
    except Damaged as error:
        raise InputError(f"{path}: {error}; fetch the file again") from error
