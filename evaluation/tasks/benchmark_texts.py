"""Texts of benchmarks for decontamination; passed to `data_pipeline`, which does not import this folder."""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from gristmill.data_pipeline.decontamination.config import field_value, is_answer_field, value_of
from gristmill.evaluation.tasks.suites import SUITES, offline
from gristmill.evaluation.tasks.task_index import task_manager
from gristmill.foundation.errors import InputError, RecipeError, nearest_name

OURS = "gristmill_"


class BenchmarkText(NamedTuple):
    """One text of one record. record: its number in the task, from 0. field: name, `a.b` for a field of an object; a
    list (choices) gives one text per entry. text: empty if the record lacks the field. is_answer: an entry of a list
    after the record's first field."""

    task: str
    record: int
    field: str
    text: str
    is_answer: bool = False


def benchmark_texts(
    tasks: Sequence[tuple[str, Sequence[str]]], data: Path | None, download: bool = False
) -> Iterator[BenchmarkText]:
    """Every text of every (task, fields), taken through lm-eval; no fields: all that hold text.

    Tasks by their names (ours with or without `gristmill_`) or suites; with `download` also lm-eval's own, which read
    from the data hub. All splits that a task asks questions from are read: test, or validation where there is none.
    Raises InputError if a file is absent or not the pinned one, or no record has a field that is named; RecipeError
    for no such task."""
    manager = task_manager(data, download)
    for name, fields in tasks:
        for member in SUITES.get(name, (name,)):
            yield from _texts_of_task(_known(member, manager), fields, manager, download)


def benchmark_digest(texts: Sequence[BenchmarkText]) -> str:
    """SHA-256 of all texts."""
    hasher = hashlib.sha256()
    for text in texts:
        hasher.update(json.dumps(text).encode() + b"\n")
    return hasher.hexdigest()


def _known(name: str, manager: TaskManager) -> str:
    for candidate in (f"{OURS}{name}", name):
        if candidate in manager.task_index:
            return candidate
    known = [*(task.removeprefix(OURS) for task in manager.task_index), *SUITES]
    near = nearest_name(name, known, cutoff=0.0)
    raise RecipeError(
        f"curate.decontaminate: no task {name!r}; the nearest is {near!r}; name local files in `benchmarks`"
    )


def _texts_of_task(name: str, fields: Sequence[str], manager: TaskManager, download: bool) -> Iterator[BenchmarkText]:
    try:
        printed = io.StringIO()  # lm-eval warns about options that are not set
        with offline(not download), redirect_stderr(printed), redirect_stdout(printed):
            loaded = manager.load([name])["tasks"]
            records = [(member, _records(task)) for member, task in sorted(loaded.items())]
    except ConnectionError as error:  # the hub's "offline" and "not reachable" are both of this kind
        raise InputError(f"{name}: its data could not be fetched ({error}); use a task over local files") from error
    for member, rows in records:
        short = member.removeprefix(OURS)
        for field in fields:
            if rows and all(value_of(record, field) is None for record in rows):
                field_value(rows[0], field, f"task {short}, record 0")
        for number, record in enumerate(rows):
            for field in fields or record:
                value = value_of(record, field)
                texts = list(_strings(value)) or ([""] if fields else [])
                is_answer = is_answer_field(field, fields or tuple(record), (), value)
                yield from (BenchmarkText(short, number, field, text, is_answer) for text in texts)


def _records(task: Task) -> list[dict[str, Any]]:
    return list(task.test_docs() if task.has_test_docs() else task.validation_docs())


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
