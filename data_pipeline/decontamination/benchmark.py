"""The texts of a benchmark: what must not stand in training data."""

import bz2
import gzip
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import zstandard
from pydantic import Field

from gristmill.data_pipeline.config import Config
from gristmill.data_pipeline.errors import InputError

OPENERS = {".gz": gzip.open, ".bz2": bz2.open}


@dataclass(frozen=True)
class Example:
    """One text of one benchmark. example: the record's id; field: which of its fields, so that questions and answers
    are told apart in index, ledger and report."""

    benchmark: str
    example: str
    field: str
    text: str


class BenchmarkConfig(Config):
    """A benchmark in local files: JSON lines, or plain text with one example a line; .gz, .bz2, .zst are unpacked.

    fields: those whose texts are indexed, each by itself; a list (choices) gives one text an entry, `a.b` goes into
    an object. Files of plain text take no fields. id_field: the record's id; the record's number from 0 if not
    given (across the files, in the order they are named)."""

    name: str = Field(min_length=1)
    paths: tuple[Path, ...] = Field(min_length=1)
    fields: tuple[str, ...] = ()
    id_field: str | None = None


def read_benchmark(config: BenchmarkConfig) -> list[Example]:
    """All texts of the benchmark. Raises InputError, naming file and line, for a missing file, field or bad line."""
    found = []
    for number, (where, line) in enumerate(_lines(config.paths)):
        if not config.fields:
            found.append(Example(config.name, str(number), "text", line))
            continue
        record = _record(line, where)
        name = str(_value(record, config.id_field, where)) if config.id_field else str(number)
        for field in config.fields:
            found += [Example(config.name, name, field, text) for text in _texts(_value(record, field, where))]
    if not found:
        raise InputError(f"{config.paths[0]}: the benchmark {config.name} has no text; check its paths and fields")
    return found


def numbered_examples(texts: Iterable[tuple[str, str]]) -> list[Example]:
    """(benchmark, text) pairs, as evaluation hands down the records of its tasks, numbered from 0 in each benchmark.

    [("a", "x"), ("b", "y"), ("a", "z")]: examples a 0, b 0, a 1."""
    counts: Counter[str] = Counter()
    found = []
    for benchmark, text in texts:
        found.append(Example(benchmark, str(counts[benchmark]), "record", text))
        counts[benchmark] += 1
    return found


def _lines(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        try:
            with _opened(path) as file:
                for number, line in enumerate(io.TextIOWrapper(file, "utf-8"), 1):
                    if line.strip():
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


def _value(record: dict[str, Any], field: str, where: str) -> Any:
    value: Any = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            raise InputError(f"{where}: no field {field!r}; fields are {sorted(record)}; set the benchmark's `fields`")
        value = value[key]
    return value


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, list):
        return [text for entry in value for text in _texts(entry)]
    return [value if isinstance(value, str) else str(value)]
