"""A folder of tasks that any process which sees it can run, such as the elements of a Slurm array job.

`place.json`: what a node must have. `order-N.task`: function and task N. `answer-N.task`: its answer, whole or absent.
Element e of E runs the tasks e, e + E, e + 2 E, ..., which are ordered by size, and leaves out those with an answer."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from gristmill.foundation.engine.node import Place, run_task
from gristmill.foundation.engine.parcel import Parcel, packed, unpacked
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic

PLACE_NAME = "place.json"


@dataclass(frozen=True)
class TaskFolder:
    folder: Path

    def write(self, function: Callable[[Any], Any], tasks: Sequence[Any], place: Place, elements: int) -> None:
        """The tasks, numbered in this order, for so many elements."""
        for number, task in enumerate(tasks):
            self._put(self._order(number), packed((function, task), self.folder))
        content = {"place": asdict(place), "tasks": len(tasks), "elements": elements}
        write_atomic(self.folder / PLACE_NAME, orjson.dumps(content))

    def run(self, element: int) -> None:
        """The tasks of one element. A task that fails leaves its exception as its answer.

        Raises InputError if the folder holds no tasks, RecipeError for an element that is not one of its."""
        try:
            content = orjson.loads((self.folder / PLACE_NAME).read_bytes())
            place = Place(**{**content["place"], "probe": None})
            tasks, elements = content["tasks"], content["elements"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.folder}: no folder of tasks ({error}); `gristmill run --engine slurm` writes it and names it"
            ) from error
        if not 0 <= element < elements:
            raise RecipeError(f"element {element}: the tasks of {self.folder} have the elements 0 to {elements - 1}")
        for number in range(element, tasks, elements):
            if not self.has_answer(number):
                answer = run_task(self._get(self._order(number)), place, self.folder)
                self._put(self._answer(number), answer)

    def has_answer(self, number: int) -> bool:
        return self._answer(number).exists()

    def answer(self, number: int) -> tuple[bool, Any]:
        """(True, the result) or (False, (exception, its traceback))."""
        return unpacked(self._get(self._answer(number)))

    def _order(self, number: int) -> Path:
        return self.folder / f"order-{number:07d}.task"

    def _answer(self, number: int) -> Path:
        return self.folder / f"answer-{number:07d}.task"

    def _put(self, path: Path, parcel: Parcel) -> None:
        write_atomic(path, pickle.dumps(parcel))

    def _get(self, path: Path) -> Parcel:
        try:
            return pickle.loads(path.read_bytes())
        except (OSError, pickle.UnpicklingError, EOFError) as error:
            raise InputError(f"{path}: a task's file cannot be read ({error}); run the command again") from error
