"""Index of tasks by name: ours, those of the user's files, and with --download lm-eval's own."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import lm_eval.utils
import yaml
from datasets import Dataset
from jinja2 import BaseLoader, StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval.api.registry import aggregation_registry, get_metric, metric_registry
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind, TaskIndex

from gristmill.evaluation.inference.config import RECALL_TASKS
from gristmill.evaluation.tasks.corpus_tasks import HELD_OUT_TASKS
from gristmill.evaluation.tasks.loaders import find_packed, load
from gristmill.evaluation.tasks.suites import SUITES, absent_file, multilingual_configs
from gristmill.foundation.config import read_yaml
from gristmill.foundation.errors import InputError, RecipeError, nearest_name
from gristmill.foundation.files import file_digest
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.user_code import attribute_of, defined_at, errors_named, is_reference, read_source, run_file

FIELD = "evaluate.tasks"


@dataclass(frozen=True)
class TaskSources:
    """Sources of tasks. data: folder of our tasks' data files. download: also lm-eval's own tasks, which download data.
    include_path: a folder of task files, which take precedence over ours."""

    data: Path | None = None
    download: bool = False
    include_path: Path | None = None


@dataclass
class KnownTasks:
    """manager: lm-eval's TaskManager with all tasks. names: the requested names. notes: for the reader. wrong: errors
    of files in the included folder."""

    manager: TaskManager
    names: list[str]
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def require(self, download: bool) -> None:
        """Raises RecipeError on an unknown task, with the nearest name and the errors of task files."""
        known = [*self.manager.task_index, *SUITES, *HELD_OUT_TASKS, *RECALL_TASKS]
        for name in self.names:
            if name not in known:
                near = nearest_name(name, known, cutoff=0.0)
                hint = "" if download else "; use --download for lm-eval's own tasks"
                raise RecipeError("; ".join([f"no task {name!r}; the nearest is {near!r}{hint}", *self.wrong]))


def task_manager(data: Path | None, download: bool) -> TaskManager:
    """lm-eval's TaskManager with our tasks. With `download`, of a task that both have ours is taken if its file
    exists."""
    stated = {"data": None if data is None else str(data)}
    multilingual = _entries(multilingual_configs(data))
    if not download:
        manager = TaskManager(include_path=str(TASK_FOLDER), include_defaults=False, metadata=stated)
        manager.task_index.update(multilingual)
        return manager
    manager = TaskManager(include_defaults=True, metadata=stated)
    ours = {**TaskIndex.build([TASK_FOLDER]), **multilingual}
    for name, entry in ours.items():
        if name not in manager.task_index or absent_file(name, ours, data) is None:
            manager.task_index[name] = entry
    return manager


def _entries(configs: Iterable[Mapping[str, Any]]) -> dict[str, Entry]:
    entries = {}
    for config in configs:
        entry = TaskIndex.entry_from_config(dict(config))
        assert entry is not None
        entries[entry.name] = entry
    return entries


def known_tasks(names: Sequence[str], sources: TaskSources) -> KnownTasks:
    """names: of tasks and suites, or paths of task files. Raises InputError or RecipeError on a requested file
    and cannot be used."""
    known = KnownTasks(task_manager(sources.data, sources.download), [])
    if sources.include_path is not None:
        task_files, known.wrong = task_files_below(sources.include_path, sources.download)
        for name, config in task_files.items():
            _add(known, name, config)
    for name in names:
        if is_reference(name):
            config = own_task(name)
            name = str(config["task"])
            _add(known, name, config)
        elif is_task_file(name):
            config = read_task_file(Path(name), sources.download)
            name = _task_name(config)
            _add(known, name, config)
        known.names.append(name)
    return known


def _add(known: KnownTasks, name: str, config: Mapping[str, Any]) -> None:
    index = known.manager.task_index
    (entry,) = _entries([config]).values()
    if name in index:
        known.notes.append(f"{name} is the user's task of that name, not that of gristmill or lm-eval")
    index[name] = entry
    tags = config.get("tag") or []
    for tag in [tags] if isinstance(tags, str) else tags:
        index.setdefault(tag, Entry(name=tag, kind=Kind.TAG, yaml_path=None)).tags.add(name)


def own_task(name: str) -> dict[str, Any]:
    """lm-eval's config of a task in the user's Python file, my_tasks.py:spelling: what the function of that name
    returns, with the questions under `documents`. The file is the user's own code and runs with the user's rights.

    Raises RecipeError with file and line if it does not run or returns no task."""
    path, _, function_name = name.rpartition(":")
    module = run_file(path, read_source(Path(path), FIELD), FIELD)
    function = attribute_of(module, function_name, path, FIELD)
    with errors_named(FIELD, f"{function_name} fails", defined_at(function)):
        config = function()
    is_task = isinstance(config, dict) and isinstance(config.get("documents"), list | tuple) and config["documents"]
    if not is_task or not all(isinstance(document, dict) for document in config["documents"]):
        raise RecipeError(
            f"{FIELD}: {defined_at(function)}: {function_name} returned no task; return a dictionary with lm-eval's "
            "fields and `documents`, a list of dictionaries"
        )
    documents = list(config["documents"])
    settings = {key: value for key, value in config.items() if key != "documents"}
    return {
        "test_split": "test",
        **settings,
        "task": settings.get("task", function_name),
        "custom_dataset": lambda **_: {"test": Dataset.from_list(documents)},
    }


# Read users' task files in lm-eval's YAML format. They are untrusted: none of their code is run.
#
# lm-eval runs what `!function` and `class` name, and loads metrics and data sets that are Python files. All these are
# rejected here; templates run in jinja2's sandbox (see `sandboxed`).

TASK_FOLDER = Path(__file__).parent
SUFFIXES = (".yaml", ".yml")
READERS = ("csv", "json", "parquet", "text")  # of `datasets`: none of them runs or unpickles what it reads
LOADER = "gristmill.evaluation.tasks.loaders.load"
CODE = "can run code, and no code of a task file is run: write it as a template ({{...}}), or run the task with lm-eval"


def is_task_file(name: str) -> bool:
    return name.endswith(SUFFIXES)


def read_task_file(path: Path, download: bool = False) -> dict[str, Any]:
    """The config of a task or group, with its includes resolved.

    A task whose dataset_kwargs name a `file` reads it as ours do, below the data folder. Raises InputError if there is
    no such file, RecipeError on what is not a task or would run code."""
    config = _read(path, ())
    if not isinstance(config.get("task", config.get("group")), str | list):
        raise RecipeError(f"{path}: names no `task` (nor `group`); a task file of lm-eval has one")
    for member in [config, *(entry for entry in _list(config.get("task")) if isinstance(entry, dict))]:
        _check(path, member, download)
        if "file" in member.get("dataset_kwargs", {}) and "dataset_path" not in member:
            member["custom_dataset"] = load
    return config


def task_file_digest(path: Path, data: Path | None) -> str:
    """Digest of a task file: its config with resolved includes, and the bytes of its data files.

    Comments and the paths of the files do not change it. Raises as `read_task_file` does."""
    config = _read(path, ())
    members = [config, *(member for member in _list(config.get("task")) if isinstance(member, dict))]
    files = [file for member in members for file in _data_files(member, data)]
    return fingerprint({"config": _without_data_files(config), "data": [file_digest(file) for file in files]})


def _data_files(config: Mapping[str, Any], data: Path | None) -> list[Path]:
    """Local data files of a task: ours below the data folder, or those that `datasets` reads by path or pattern."""
    options = config.get("dataset_kwargs") or {}
    folder = None if data is None else str(data)
    named = [find_packed(options[key], folder) for key in ("file", "fewshot_file") if options.get(key)]
    patterns = options.get("data_files")
    if isinstance(patterns, dict):
        patterns = [pattern for value in patterns.values() for pattern in _list(value)]
    matched = [Path(name) for pattern in _list(patterns) for name in sorted(glob(str(pattern), recursive=True))]
    return [path for path in [*named, *matched] if path is not None and path.is_file()]


def _without_data_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as JSON values: without our loader's function, and without the paths whose content is digested."""
    kept = {name: value for name, value in config.items() if name != "custom_dataset"}
    options = kept.get("dataset_kwargs")
    if isinstance(options, dict):
        kept["dataset_kwargs"] = {name: value for name, value in options.items() if name != "data_files"}
    if isinstance(kept.get("task"), list):
        kept["task"] = [_without_data_files(member) if isinstance(member, dict) else member for member in kept["task"]]
    return kept


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.expanduser().resolve()
    if path in seen:
        raise RecipeError(f"{path}: includes itself; take the `include` out")
    if not path.is_file():
        raise InputError(f"{path}: no such task file; name a YAML file, or a task by its name")
    config = _ours(path) if path.is_relative_to(TASK_FOLDER) else _theirs(path)
    merged: dict[str, Any] = {}
    for name in _list(config.pop("include", [])):
        beside = path.parent / str(name)
        merged |= _read(beside if beside.is_file() else TASK_FOLDER / str(name), (*seen, path))
    return merged | config


def _theirs(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: not readable ({error.strerror}); check its permissions") from error
    try:
        config = read_yaml(content, str(path)).value
    except RecipeError as error:
        if b"!function" in content:
            raise RecipeError(f"{path}: !function {CODE}") from error
        raise
    if not isinstance(config, dict):
        raise RecipeError(f"{path}: holds no fields; a task file of lm-eval is a YAML object")
    return config


class _OurLoader(yaml.SafeLoader):
    """YAML loader of this repository's own task files, whose `!function` is always `loaders.load`."""


def _our_function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    return {LOADER: load}[str(loader.construct_scalar(node))]


_OurLoader.add_constructor("!function", _our_function)


def _ours(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.load(path.read_text("utf-8"), _OurLoader)
    return config


def _task_name(config: Mapping[str, Any]) -> str:
    return str(config.get("group", config.get("task")))


def _check(path: Path, config: Mapping[str, Any], download: bool) -> None:
    for name in ("class", "use_prompt", "unsafe_code"):
        if config.get(name):
            raise RecipeError(f"{path}: {name} {CODE}")
    get_metric("acc")  # fills the registry
    for number, metric in enumerate(_list(config.get("metric_list"))):
        name = str(metric.get("metric")) if isinstance(metric, dict) else metric
        if not isinstance(metric, dict) or name not in metric_registry or metric.get("hf_evaluate"):
            raise RecipeError(
                f"{path}: metric_list.{number}: {name!r} is no metric of lm-eval's own; there are "
                f"{', '.join(sorted(metric_registry))}"
            )
        aggregation = metric.get("aggregation", "mean")
        if aggregation not in aggregation_registry:
            raise RecipeError(
                f"{path}: metric_list.{number}: no aggregation {aggregation!r}; there are "
                f"{', '.join(sorted(aggregation_registry))}"
            )
    if not isinstance(config.get("dataset_kwargs", {}), dict):
        raise RecipeError(f"{path}: dataset_kwargs: holds no fields; give it names and values")
    source = config.get("dataset_path")
    if source is None or source in READERS:
        return
    if not download or Path(str(source)).exists():
        raise RecipeError(
            f"{path}: dataset_path: {source!r} is not read; name one of {', '.join(READERS)} with "
            "dataset_kwargs.data_files, or allow the data hub with --download"
        )


def task_files_below(folder: Path, download: bool = False) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """(config of every task file in a folder by task name, errors of invalid files).

    Files without a task name are includes of others and are skipped."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name one that holds task files (*.yaml)")
    task_files: dict[str, dict[str, Any]] = {}
    wrong: list[str] = []
    for path in sorted(path for suffix in SUFFIXES for path in folder.rglob(f"*{suffix}")):
        try:
            config = _read(path, ())
            if "task" in config or "group" in config:
                config = read_task_file(path, download)
                task_files[_task_name(config)] = config
        except (InputError, RecipeError) as error:
            wrong.append(str(error))
    return task_files, wrong


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


@contextmanager
def sandboxed() -> Iterator[None]:
    """Renders task templates in jinja's sandbox, without access to anything but their document."""
    before = lm_eval.utils.env
    inside = ImmutableSandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
    inside.filters.update(before.filters)
    lm_eval.utils.env = inside
    try:
        yield
    finally:
        lm_eval.utils.env = before
