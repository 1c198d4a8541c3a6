"""The texts of a benchmark: what must not stand in training data."""

import bz2
import gzip
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import zstandard

from gristmill.data_pipeline.decontamination.config import BenchmarkConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest

PLAIN = "text"  # the one field of a line of plain text
OPENERS = {".gz": gzip.open, ".bz2": bz2.open}


@dataclass(frozen=True)
class Example:
    """One text of one benchmark. example: the record's id; field: which of its fields, so that questions and answers
    are told apart in index, ledger and report. text: empty if the record lacks the field."""

    benchmark: str
    example: str
    field: str
    text: str
    is_answer: bool = False


def read_benchmark(config: BenchmarkConfig) -> list[Example]:
    """All texts of the benchmark; an empty one for each field that a record lacks.

    Raises InputError, naming file and line, for a missing file, a bad line, or a field that no record has."""
    found: list[Example] = []
    fields = config.fields or (PLAIN,)
    held: set[str] = set()
    first: tuple[str, dict[str, Any]] | None = None
    for number, (where, record) in enumerate(_records(config)):
        first = first or (where, record)
        known = value_of(record, config.id_field) if config.id_field else number
        name = f"#{number}" if known is None else str(known)
        for field in fields:
            value = value_of(record, field)
            texts = [text for text in _texts(value) if text.strip()]
            held |= {field} if texts else set()
            is_answer = is_answer_field(field, fields, config.answers, value)
            found += [Example(config.name, name, field, text, is_answer) for text in texts or [""]]
    if first is None:
        raise InputError(f"{config.paths[0]}: the benchmark {config.name} has no text; check its paths and fields")
    for field in fields:
        if field not in held:
            where, record = first
            field_value(record, field, where)
            raise InputError(f"{where}: no record has a text in the field {field!r}; check `fields`")
    return found


def is_answer_field(field: str, fields: Sequence[str], answers: Sequence[str], value: Any) -> bool:
    """Whether the field holds answers: one of those named, or if none are, a list behind the first field."""
    return field in answers if answers else isinstance(value, list) and field != fields[0]


def missing_fields(examples: Iterable[Example]) -> dict[str, dict[str, int]]:
    """By benchmark and field: in how many records the field is missing, null or empty. Those in none are left out."""
    found: dict[str, dict[str, int]] = {}
    for example in examples:
        if not example.text:
            fields = found.setdefault(example.benchmark, {})
            fields[example.field] = fields.get(example.field, 0) + 1
    return found


def benchmark_digests(config: BenchmarkConfig) -> list[str]:
    """SHA-256 of each of the benchmark's files: what of them decides the bytes of a corpus. Raises InputError."""
    try:
        return [file_digest(path) for path in config.paths]
    except OSError as error:
        raise InputError(f"{error.filename}: the benchmark cannot be read ({error}); check its path") from error


def numbered_examples(texts: Iterable[tuple[str, int, str, str, bool]]) -> list[Example]:
    """Of (benchmark, record, field, text, is_answer), as evaluation hands down the records of its tasks."""
    return [Example(benchmark, str(record), field, text, answer) for benchmark, record, field, text, answer in texts]


def _records(config: BenchmarkConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, record): an object, a line of text, or several lines under their names."""
    if config.lines:
        yield from _records_of_lines(config)
        return
    for where, line in _lines(config.paths):
        if line.strip():
            yield where, _record(line, where) if config.fields else {PLAIN: line}


def _records_of_lines(config: BenchmarkConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in config.paths:
        held = list(_lines([path]))
        if len(held) % len(config.lines):
            raise InputError(
                f"{path}: {len(held)} lines are no whole number of records of {len(config.lines)}; set `lines` to the "
                "lines of one record, or fetch the file again"
            )
        for first in range(0, len(held), len(config.lines)):
            record: dict[str, Any] = {}
            for name, (_, line) in zip(config.lines, held[first : first + len(config.lines)], strict=True):
                record.setdefault(name, []).append(line)
            yield held[first][0], record


def _lines(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        try:
            with _opened(path) as file:
                for number, line in enumerate(io.TextIOWrapper(file, "utf-8"), 1):
                    yield f"{path}:{number}", line.rstrip("\n")
        except (OSError, EOFError, UnicodeDecodeError, zstandard.ZstdError) as error:
            raise InputError(f"{path}: the benchmark cannot be read ({error}); check the path and the file") from error


def _opened(path: Path) -> Any:
    if path.suffix == ".zst":
        return zstandard.open(path, "rb")
    opener: Any = OPENERS.get(path.suffix, open)
    return opener(path, "rb")


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{where}: no JSON ({error}); a benchmark of plain text takes no `fields`") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: a {type(record).__name__}, not an object with fields")
    return record


def field_value(record: dict[str, Any], field: str, where: str) -> Any:
    """What stands at a dotted name: {"a": {"b": 1}}, "a.b" -> 1. Raises InputError if nothing does."""
    if (value := value_of(record, field)) is None:
        raise InputError(f"{where}: no field {field!r}; fields are {sorted(record)}; set `fields`")
    return value


def value_of(record: dict[str, Any], field: str) -> Any:
    """The same, None if nothing stands there or null does."""
    if field in record:
        return record[field]
    value: Any = record
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        return [value]
    if value is None:
        return []
    if isinstance(value, list):
        return [text for entry in value for text in ([entry] if isinstance(entry, str) else _texts(entry))]
    return [str(value)]
