"""Base class of execution engines: independent tasks in, their results in the order of the tasks."""

import statistics
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, overload

from gristmill.foundation.progress import Reporter
from gristmill.foundation.startup import release_unused_memory

Task = TypeVar("Task")
Result = TypeVar("Result")
Value = TypeVar("Value")

# Task attributes that name its input, in order of preference: raw or annotated files before output files.
NAMING_FIELDS = ("label", "annotated", "document_file", "path", "documents", "prefix", "folder")


class LazySequence(Sequence[Value]):
    """Values that are built when they are asked for, such as the tasks of a map: this process holds none of them. It is
    pickled as the tuple of all.

    build: makes the value of each of these numbers."""

    def __init__(self, build: Callable[[int], Value], numbers: Sequence[int]):
        self._build, self._numbers = build, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Value: ...
    @overload
    def __getitem__(self, place: slice) -> "LazySequence[Value]": ...
    def __getitem__(self, place: int | slice) -> "Value | LazySequence[Value]":
        if isinstance(place, slice):
            return LazySequence(self._build, self._numbers[place])
        return self._build(self._numbers[place])

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


def joined(sequences: Sequence[Sequence[Value]]) -> LazySequence[Value]:
    """The values of one sequence after the other."""
    firsts = [0, *accumulate(map(len, sequences))]

    def value(number: int) -> Value:
        place = bisect_right(firsts, number) - 1
        return sequences[place][number - firsts[place]]

    return LazySequence(value, range(firsts[-1]))


# Where a map has more tasks than BATCHED_TASKS a worker, consecutive small ones are one task: of BATCH_TASKS at most,
# which are together at most a part in BATCHES_PER_WORKER of a worker's share of the weight.
BATCHED_TASKS, BATCH_TASKS, BATCHES_PER_WORKER = 64, 64, 16


@dataclass(frozen=True)
class TaskBatch:
    """Consecutive tasks of a map, which has `total`. first: number of the first."""

    tasks: tuple
    first: int
    total: int

    @property
    def label(self) -> str:
        """For messages; its names are those of the first and the last task."""
        names = [task_name(task).removeprefix(", ") for task in (self.tasks[0], self.tasks[-1])]
        numbers = f"tasks {self.first + 1:,} to {self.first + len(self.tasks):,} of {self.total:,}"
        return f"{numbers} together" + (f", from {names[0]} to {names[1]}" if all(names) else "")


class BatchFunction:
    """The function of a map for a batch of its tasks: their results, in order."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function
        self.__module__ = getattr(function, "__module__", type(self).__module__)

    def __call__(self, batch: TaskBatch) -> list[Any]:
        return [self.function(task) for task in batch.tasks]


def task_batches(weights: Sequence[float], workers: int) -> list[range]:
    """The numbers of the tasks of each batch. One task a batch where there are few, or one worker.

    129 tasks of weight 1 and one of 999, 2 workers: batches of 35, 35, 35, 24 and the large one alone."""
    if workers <= 1 or len(weights) <= BATCHED_TASKS * workers:
        return [range(number, number + 1) for number in range(len(weights))]
    limit = sum(weights) / (BATCHES_PER_WORKER * workers)
    batches: list[range] = []
    weight = 0.0
    for number, of_task in enumerate(weights):
        if batches and len(batches[-1]) < BATCH_TASKS and weight + of_task <= limit:
            batches[-1] = range(batches[-1].start, number + 1)
            weight += of_task
        else:
            batches.append(range(number, number + 1))
            weight = of_task
    return batches


# A running task of a cluster that takes longer than so many seconds, and so many times as long as tasks of its weight
# took, is run a second time.
STRAGGLER_SECONDS, STRAGGLER_FACTOR = 60.0, 3.0


class Stragglers:
    """Tasks of a map that run far longer than those that ended, as on a node that stands still. An engine asks when no
    task waits, runs each a second time beside the first, and takes the first answer: both write the same bytes."""

    def __init__(self, weights: Sequence[float], clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._sizes = [weight + sum(weights) / max(len(weights), 1) + 1e-9 for weight in weights]
        self._begun: dict[int, float] = {}
        self._rates: list[float] = []  # seconds by size, of the tasks that ended
        self._doubled: set[int] = set()

    def begin(self, task: int) -> None:
        self._begun.setdefault(task, self._clock())

    def end(self, task: int) -> None:
        self._rates.append((self._clock() - self._begun.pop(task)) / self._sizes[task])

    def overdue(self) -> list[int]:
        """The tasks that must be run a second time now; a task is named once."""
        if not self._rates:
            return []
        rate, now = STRAGGLER_FACTOR * statistics.median(self._rates), self._clock()
        tasks = [
            task
            for task, begun in self._begun.items()
            if task not in self._doubled and now - begun > max(STRAGGLER_SECONDS, rate * self._sizes[task])
        ]
        self._doubled.update(tasks)
        return tasks


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
        """The results in the order of the tasks, which may be a LazySequence. `sizes` are the tasks' weights on the
        progress bar, in `unit`.

        The first exception of a task is raised here and unfinished tasks are dropped; then, and on an interrupt, what
        runs is stopped. Raises InputError, which names the task, if a task is lost with its process."""
        return list(self.imap(function, tasks, description, sizes, unit))

    def imap(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        description: str,
        sizes: Sequence[float] | None = None,
        unit: str = "tasks",
    ) -> Iterator[Result]:
        """As `map`, one result after the other: this process holds those whose turn has not come. The last one comes
        after all tasks have ended."""
        weights = list(sizes) if sizes is not None else [1.0] * len(tasks)
        last = len(tasks) - 1
        waiting: dict[int, Result] = {}
        turn = 0
        with (
            self.reporter.meter(description, sum(weights), unit) as meter,
            closing(self._results_of_batches(function, tasks, weights, description)) as results,
        ):
            for index, result in results:
                waiting[index] = result
                meter.advance(weights[index])
                while turn in waiting and turn < last:
                    yield waiting.pop(turn)
                    turn += 1
        if len(tasks):
            release_unused_memory()
            yield waiting[last]

    def _results_of_batches(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], weights: Sequence[float], description: str
    ) -> Generator[tuple[int, Result], None, None]:
        """As `_results`; many small tasks travel to the workers in batches of consecutive ones."""
        batches = task_batches(weights, self.workers)
        if len(batches) == len(tasks):
            yield from self._results(function, tasks, weights, description)
            return

        def task_batch(number: int) -> TaskBatch:
            batch = batches[number]
            return TaskBatch(tuple(tasks[batch.start : batch.stop]), batch.start, len(tasks))

        grouped = LazySequence(task_batch, range(len(batches)))
        sums = [sum(weights[batch.start : batch.stop]) for batch in batches]
        with closing(self._results(BatchFunction(function), grouped, sums, description)) as results:
            for number, of_batch in results:
                yield from zip(batches[number], of_batch, strict=True)

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


def task_name(task: Any) -> str:
    """', FILE' for a task with a named input, else ''. A tuple uses its first member that has one."""
    if isinstance(task, str | Path):
        return f", {task}"
    if isinstance(task, tuple | list):
        return next((name for member in task if (name := task_name(member))), "")
    return next((task_name(value) for field in NAMING_FIELDS if (value := getattr(task, field, None)) is not None), "")
