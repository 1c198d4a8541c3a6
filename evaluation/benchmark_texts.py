"""The texts of benchmarks, for decontamination: what is handed down to `data_pipeline`, which may not look up here."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from gristmill.evaluation.suites import SUITES
from gristmill.evaluation.tasks.loaders import load

TASK_FOLDER = Path(__file__).with_name("tasks")


def benchmark_texts(tasks: Sequence[str], data: Path) -> Iterator[tuple[str, str]]:
    """(task, text) of every document: all strings of a record, one a line. Tasks by their names, with or without
    `gristmill_`, or suites. Raises InputError if a file is absent or not the pinned one, KeyError for no such task."""
    for name in tasks:
        for member in SUITES.get(name, (name,)):
            short = member.removeprefix("gristmill_")
            for arguments in _dataset_arguments(short):
                for record in load(**arguments, data=str(data))["test"]:
                    yield short, "\n".join(_strings(record))


def _dataset_arguments(short: str) -> list[dict[str, Any]]:
    path = TASK_FOLDER / f"{short}.yaml"
    if not path.is_file():
        raise KeyError(f"no task {short!r} in {TASK_FOLDER.name}/; there are {sorted(_names())}")
    config = yaml.load(path.read_text("utf-8"), _Loader)
    sets = config["task"] if isinstance(config["task"], list) else [config]
    return [each["dataset_kwargs"] for each in sets]


def _names() -> Iterator[str]:
    return (path.stem for path in TASK_FOLDER.glob("*.yaml") if "task:" in path.read_text("utf-8"))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


class _Loader(yaml.SafeLoader):
    """Reads `!function name` as the name."""


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
