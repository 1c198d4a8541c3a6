"""Index of tasks by name: ours, those of the user's files, and with --download lm-eval's own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind, TaskIndex

from gristmill.evaluation.config import RECALL_TASKS
from gristmill.evaluation.tasks.corpus_task_configs import HELD_OUT_TASKS
from gristmill.evaluation.tasks.multilingual import multilingual_configs
from gristmill.evaluation.tasks.suites import SUITES, absent_file
from gristmill.evaluation.tasks.task_files import TASK_FOLDER, is_task_file, read_task_file, task_files_below
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.nearest_name import nearest_name


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
    found = {}
    for config in configs:
        entry = TaskIndex.entry_from_config(dict(config))
        assert entry is not None
        found[entry.name] = entry
    return found


def known_tasks(names: Sequence[str], sources: TaskSources) -> KnownTasks:
    """names: of tasks and suites, or paths of task files. Raises InputError or RecipeError on a requested file
    and cannot be used."""
    known = KnownTasks(task_manager(sources.data, sources.download), [])
    if sources.include_path is not None:
        found, known.wrong = task_files_below(sources.include_path, sources.download)
        for name, config in found.items():
            _add(known, name, config)
    for name in names:
        if is_task_file(name):
            config = read_task_file(Path(name), sources.download)
            name = config.get("group", config.get("task"))
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
