"""Base class of execution engines: independent tasks in, their results in the order of the tasks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.startup import release_unused_memory

Task = TypeVar("Task")
Result = TypeVar("Result")

# Task attributes that name its input, in order of preference: raw or annotated files before output files.
NAMING_FIELDS = ("label", "annotated", "document_file", "path", "documents", "prefix", "folder")


class Engine(ABC):
    """Runs tasks. A task is a picklable value; the function is a module-level function of one task.

    Results and files must depend neither on the number of workers nor on the engine. A task may run twice, even at the
    same time on two machines, so a task writes a file through `atomic_path` and writes the same bytes each time.
    reporter: takes progress and messages."""

    reporter: Reporter

    @property
    @abstractmethod
    def workers(self) -> int:
        """How many tasks run at once."""

    def map(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        description: str,
        sizes: Sequence[float] | None = None,
        unit: str = "tasks",
    ) -> list[Result]:
        """The results in the order of the tasks. `sizes` are the tasks' weights on the progress bar, in `unit`.

        The first exception of a task is raised here and unfinished tasks are dropped; then, and on an interrupt, what
        runs is stopped. Raises InputError, which names the task, if a task is lost with its process."""
        weights = list(sizes) if sizes is not None else [1.0] * len(tasks)
        with self.reporter.meter(description, sum(weights), unit) as meter:
            by_index: dict[int, Result] = {}
            with closing(self._results(function, tasks, weights, description)) as results:
                for index, result in results:
                    by_index[index] = result
                    meter.advance(weights[index])
        if tasks:
            release_unused_memory()
        return [by_index[index] for index in range(len(tasks))]

    def start(self, modules: Sequence[str]) -> None:  # noqa: B027 - most engines start nothing early
        """Start the workers, which have or will import these modules, and return at once. To be called before the first
        task, while no library of this process has started threads."""

    @abstractmethod
    def _results(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], weights: Sequence[float], description: str
    ) -> Generator[tuple[int, Result], None, None]:
        """(index, result) of every task as they finish."""

    @abstractmethod
    def close(self) -> None:
        """Free what the engine holds between maps: a map after it starts it again."""


def name_of(task: Any) -> str:
    """', FILE' for a task with a named input, else ''. A tuple uses its first member that has one."""
    if isinstance(task, str | Path):
        return f", {task}"
    if isinstance(task, tuple | list):
        return next((name for member in task if (name := name_of(member))), "")
    return next((name_of(value) for field in NAMING_FIELDS if (value := getattr(task, field, None)) is not None), "")
