"""Settings of decontamination in the recipe."""

import bz2
import glob
import gzip
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import orjson
import zstandard
from pydantic import Field, field_validator, model_validator

from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest

Policy = Literal["split", "drop", "annotate"]


class BenchmarkConfig(Config):
    """A benchmark in local files: JSON lines, or plain text with one example a line; .gz, .bz2, .zst are unpacked.

    paths: files or globs, whose matches are read in the order of their names.

    fields: those whose texts are indexed, each by itself; a list (choices) gives one text an entry, `a.b` goes into
    an object. Files of plain text take no fields, unless `lines` names the lines of a record that has several:
    HellaSwag's are [context, gold, ending, ending, ending, ending], of which fields [context, ending] are wanted.
    answers: those of the fields that hold answers, which are not searched for in other wordings; if none are named,
    all but the first whose value is a list. A field may be missing in some records, not in all.
    id_field: the record's id (`#` and its number for a record without one); the record's number from 0 if not given
    (across the files, in the order they are named). Where the files lie decides nothing; what is in them does."""

    name: str = Field(min_length=1)
    paths: tuple[Path, ...] = Field(min_length=1, json_schema_extra={"execution": True})
    fields: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    id_field: str | None = None

    def files(self) -> list[Path]:
        """The files of the paths, each once. Raises InputError for a glob that matches nothing."""
        paths: list[Path] = []
        for path in self.paths:
            matches = sorted(map(Path, glob.glob(str(path), recursive=True))) if glob.has_magic(str(path)) else [path]
            if not matches:
                raise InputError(f"{path}: the benchmark {self.name} has no file of this pattern; check its paths")
            paths += [match for match in matches if match not in paths]
        return paths

    @model_validator(mode="after")
    def lines_hold_the_fields(self) -> Self:
        strange = [field for field in self.fields if self.lines and field not in self.lines]
        if self.lines and not self.fields:
            raise ValueError(f"benchmark {self.name}: lines are named and fields are not; choose among {self.lines}")
        if strange:
            raise ValueError(f"benchmark {self.name}: no line is called {strange[0]!r}; lines are {self.lines}")
        return self

    @model_validator(mode="after")
    def answers_are_fields(self) -> Self:
        strange = [field for field in self.answers if field not in self.fields]
        if strange:
            raise ValueError(f"benchmark {self.name}: the answer {strange[0]!r} is none of its fields {self.fields}")
        return self


class TaskChoice(Config):
    """A task (or suite) of the evaluation by name. fields: the fields of a record that are indexed, each by itself;
    none: all that hold text."""

    name: str = Field(min_length=1)
    fields: tuple[str, ...] = ()


class DecontaminateConfig(Config):
    """Defaults are MT-NLG 530B's (Megatron-LM tools/openwebtext/filter_ngrams.py) unless said otherwise.

    benchmarks: in local files. tasks: of the evaluation, a name or {name, fields}, whose texts the caller hands over;
    task_data: the folder their files lie in, if it is not evaluate.data; download: lm-eval's own tasks may be named
    too, whose texts are read from the data hub. ngram: words of a match. min_ngram: a text of fewer words than ngram
    is searched as one n-gram if it has at least so many; shorter texts are counted and not searched.
    common: an n-gram that stands so often in the corpus is a common phrase and does not count. common_in: so many
    documents (GPT-3: "13-grams that matched more than 10 training documents", appendix C), or so many `places`
    (Megatron: key_threshold 10). Documents, so that a text that repeats a question ten times does not hide itself.
    max_edits: texts of at most max_edited_words words are also found with that many words substituted, inserted or
    deleted: where words in their order have at least min_share of the text's information and at least
    min_information nats (edits.py); 0: not searched so. answer_window: a question of fewer than min_ngram words
    is found word for word with an answer that begins in so many words behind it; 0: not searched.
    policy: `split` removes the match, `margin` characters on each side and the rest of the sentence, and keeps pieces
    of at least min_piece_characters; a document of more than max_pieces is dropped. `drop` removes the document;
    `annotate` only reports."""

    benchmarks: tuple[BenchmarkConfig, ...] = ()
    tasks: tuple[TaskChoice, ...] = ()
    task_data: Path | None = Field(default=None, json_schema_extra={"execution": True})
    download: bool = Field(default=False, json_schema_extra={"execution": True})
    ngram: int = Field(default=13, ge=2)
    min_ngram: int = Field(default=8, ge=2)
    common: int = Field(default=10, ge=2)
    common_in: Literal["documents", "places"] = "documents"
    max_edits: int = Field(default=3, ge=0)
    min_share: float = Field(default=0.55, gt=0, le=1)
    min_information: float = Field(default=34.0, gt=0)
    answer_window: int = Field(default=50, ge=0)
    policy: Policy = "split"
    margin: int = Field(default=200, ge=0)
    min_piece_characters: int = Field(default=200, ge=1)
    max_pieces: int = Field(default=10, ge=1)

    @field_validator("tasks", mode="before")
    @classmethod
    def short_forms(cls, value: object) -> object:
        entries = value if isinstance(value, list | tuple) else [value]
        return [{"name": entry} if isinstance(entry, str) else entry for entry in entries]

    @model_validator(mode="after")
    def n_grams_in_order(self) -> Self:
        if self.min_ngram > self.ngram:
            raise ValueError(f"min_ngram={self.min_ngram} is over ngram={self.ngram}; try {self.ngram}")
        return self

    @model_validator(mode="after")
    def something_is_named_once(self) -> Self:
        names = [*(benchmark.name for benchmark in self.benchmarks), *(task.name for task in self.tasks)]
        if not names:
            raise ValueError("no benchmarks and no tasks are named, so nothing would be searched; name some, or null")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the benchmark {twice[0]!r} is named twice; give each its own name")
        return self

    @property
    def max_edited_words(self) -> int:
        """A longer text keeps an n-gram whole through max_edits edits, each of up to two folded words (`it's`): what is
        left of ngram 13 and 3 edits in 59 words is 53 in four runs, one of which has 14."""
        return (self.max_edits + 1) * self.ngram + 2 * self.max_edits if self.max_edits else 0


# The texts of a benchmark: what must not stand in training data.

PLAIN = "text"  # the one field of a line of plain text
OPENERS = {".gz": gzip.open, ".bz2": bz2.open}


@dataclass(frozen=True)
class BenchmarkExample:
    """One text of one benchmark. example: the record's id; field: which of its fields, so that questions and answers
    are told apart in index, ledger and report. text: empty if the record lacks the field."""

    benchmark: str
    example: str
    field: str
    text: str
    is_answer: bool = False


def read_benchmark(config: BenchmarkConfig) -> list[BenchmarkExample]:
    """All texts of the benchmark; an empty one for each field that a record lacks.

    Raises InputError, naming file and line, for a missing file, a bad line, or a field that no record has."""
    examples: list[BenchmarkExample] = []
    fields = config.fields or (PLAIN,)
    filled_fields: set[str] = set()
    first: tuple[str, dict[str, Any]] | None = None
    for number, (where, record) in enumerate(_records(config)):
        first = first or (where, record)
        known = value_of(record, config.id_field) if config.id_field else number
        name = f"#{number}" if known is None else str(known)
        for field in fields:
            value = value_of(record, field)
            texts = [text for text in _texts(value) if text.strip()]
            filled_fields |= {field} if texts else set()
            is_answer = is_answer_field(field, fields, config.answers, value)
            examples += [BenchmarkExample(config.name, name, field, text, is_answer) for text in texts or [""]]
    if first is None:
        raise InputError(f"{config.paths[0]}: the benchmark {config.name} has no text; check its paths and fields")
    for field in fields:
        if field not in filled_fields:
            where, record = first
            field_value(record, field, where)
            raise InputError(f"{where}: no record has a text in the field {field!r}; check `fields`")
    return examples


def is_answer_field(field: str, fields: Sequence[str], answers: Sequence[str], value: Any) -> bool:
    """Whether the field holds answers: one of those named, or if none are, a list behind the first field."""
    return field in answers if answers else isinstance(value, list) and field != fields[0]


def missing_fields(examples: Iterable[BenchmarkExample]) -> dict[str, dict[str, int]]:
    """By benchmark and field: in how many records the field is missing, null or empty. Those in none are left out."""
    missing: dict[str, dict[str, int]] = {}
    for example in examples:
        if not example.text:
            fields = missing.setdefault(example.benchmark, {})
            fields[example.field] = fields.get(example.field, 0) + 1
    return missing


def benchmark_digests(config: BenchmarkConfig) -> list[str]:
    """SHA-256 of each of the benchmark's files: what of them decides the bytes of a corpus. Raises InputError."""
    try:
        return [file_digest(path) for path in config.files()]
    except OSError as error:
        raise InputError(f"{error.filename}: the benchmark cannot be read ({error}); check its path") from error


def numbered_examples(texts: Iterable[tuple[str, int, str, str, bool]]) -> list[BenchmarkExample]:
    """Examples of (benchmark, record, field, text, is_answer), as evaluation hands down the records of its tasks."""
    return [
        BenchmarkExample(benchmark, str(record), field, text, answer)
        for benchmark, record, field, text, answer in texts
    ]


def _records(config: BenchmarkConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, record): an object, a line of text, or several lines under their names."""
    if config.lines:
        yield from _records_of_lines(config)
        return
    for where, line in _lines(config.files()):
        if line.strip():
            yield where, _record(line, where) if config.fields else {PLAIN: line}


def _records_of_lines(config: BenchmarkConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in config.files():
        lines = list(_lines([path]))
        if len(lines) % len(config.lines):
            raise InputError(
                f"{path}: {len(lines)} lines are no whole number of records of {len(config.lines)}; set `lines` to the "
                "lines of one record, or fetch the file again"
            )
        for first in range(0, len(lines), len(config.lines)):
            record: dict[str, Any] = {}
            for name, (_, line) in zip(config.lines, lines[first : first + len(config.lines)], strict=True):
                record.setdefault(name, []).append(line)
            yield lines[first][0], record


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
    """Value at a dotted name: {"a": {"b": 1}}, "a.b" -> 1. Raises InputError if nothing does."""
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
