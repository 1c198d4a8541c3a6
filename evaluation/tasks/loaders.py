"""Load benchmark files from disk as the documents of lm-eval tasks. Nothing is downloaded; digests are checked."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.evaluation.tasks.benchmark_formats import FORMS
from gristmill.foundation.errors import InputError

COMPRESSIONS = ("", ".zst", ".gz", ".bz2", ".xz")
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
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise InputError(
            f"{path}: not the file that the task pins (sha256 {found[:16]}..., expected {sha256[:16]}...); "
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
