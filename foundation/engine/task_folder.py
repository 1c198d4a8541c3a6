"""A folder of tasks that any process which sees it can run, such as the elements of a Slurm array job.

`place.json`: what a node must have. `orders/N.task`: function and task N. `answers/N.task`: its answer, whole or
absent. Element e of E runs the tasks e, e + E, e + 2 E, ..., which are ordered by size, and leaves out those with an
answer. The folder is on a file system that all nodes share (`SharedFiles`) or in a store (`StoredFiles`)."""

import hmac
import os
import secrets
import stat
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import orjson

from gristmill.foundation.addresses import is_address
from gristmill.foundation.engine.node import Place, run_task
from gristmill.foundation.engine.parcel import Parcel
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import is_temporary, write_atomic
from gristmill.foundation.store import Store
from gristmill.foundation.task_files import FOLDER, Listing, TaskObjects

PLACE_NAME = "place.json"
KEY_VARIABLE = "GRISTMILL_TASKS_KEY"
DIGEST, DIGEST_BYTES = "sha256", 32


class TaskFiles(Protocol):
    """The files of a folder of tasks, each whole or absent."""

    def put(self, name: str, content: bytes) -> None: ...

    def get(self, name: str) -> bytes:
        """Raises OSError or InputError."""
        ...

    def remove(self, name: str) -> None: ...

    def names(self, folder: str) -> Iterable[str]:
        """Of the files in it, without the folder."""
        ...


@dataclass(frozen=True)
class SharedFiles:
    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    def put(self, name: str, content: bytes) -> None:
        write_atomic(self.folder / name, content)

    def get(self, name: str) -> bytes:
        """Raises InputError for a file that another user may have written: a task names the function that runs."""
        path = self.folder / name
        for place in (path, path.parent, self.folder):
            state = place.stat()
            if state.st_uid not in (os.geteuid(), 0) or state.st_mode & stat.S_IWOTH:
                raise InputError(
                    f"{place}: another user can write here, so its tasks are not run; "
                    f"use a folder of your own, or `chmod o-w {place}`"
                )
        return path.read_bytes()

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()

    def names(self, folder: str) -> Iterable[str]:
        found = self.folder / folder
        return [path.name for path in found.iterdir() if not is_temporary(path)] if found.is_dir() else []


@dataclass(frozen=True)
class StoredFiles:
    """Below an address. Each object begins with its HMAC: orders and answers are pickles, which others who may write to
    the bucket could replace. key: drawn by the driver; it reaches the nodes by KEY_VARIABLE."""

    address: str
    key: bytes

    @classmethod
    def below(cls, objects: TaskObjects) -> "StoredFiles":
        """A new folder among the tasks' objects, with a new key; it is deleted with them."""
        return cls(f"{objects.address}/{FOLDER}/map-{uuid.uuid4().hex[:16]}", secrets.token_bytes(DIGEST_BYTES))

    def __str__(self) -> str:
        return self.address

    @property
    def _store(self) -> Store:
        return Store(self.address)

    def put(self, name: str, content: bytes) -> None:
        self._store.put_bytes(name, self._digest(name, content) + content)

    def get(self, name: str) -> bytes:
        found = self._store.read(name)
        if found is None:
            raise InputError(f"{self.address}/{name}: no such object")
        content = found[DIGEST_BYTES:]
        if not hmac.compare_digest(found[:DIGEST_BYTES], self._digest(name, content)):
            raise InputError(f"{self.address}/{name}: not written by this run, or {KEY_VARIABLE} is another run's")
        return content

    def remove(self, name: str) -> None:
        self._store.delete(name)

    def names(self, folder: str) -> Iterable[str]:
        return [name.removeprefix(f"{folder}/") for name in self._store.list(folder)]

    def _digest(self, name: str, content: bytes) -> bytes:
        place = f"{self.address}/{name}\0".encode()
        return hmac.digest(self.key, place + content, DIGEST)


@dataclass(frozen=True)
class TaskFolder:
    files: TaskFiles

    @classmethod
    def at(cls, location: str) -> "TaskFolder":
        """For a node. Raises RecipeError if it needs a key that the environment does not have."""
        if not is_address(location):
            return cls(SharedFiles(Path(location)))
        try:
            return cls(StoredFiles(location.rstrip("/"), bytes.fromhex(os.environ[KEY_VARIABLE])))
        except (KeyError, ValueError) as error:
            raise RecipeError(
                f"{location}: {KEY_VARIABLE} is not set to the key of this folder; `gristmill run --engine slurm` "
                "gives it to its jobs"
            ) from error

    def write(self, orders: Iterable[Parcel], place: Place, elements: int, scratch: Path | Listing) -> None:
        """The tasks, numbered in this order, for so many elements. scratch: see `run_task`."""
        count = 0
        for number, order in enumerate(orders):
            self.files.put(f"orders/{_name(number)}", order.to_bytes())
            count = number + 1
        listing = asdict(scratch) if isinstance(scratch, Listing) else None
        content = {"place": asdict(place), "tasks": count, "elements": elements, "listing": listing}
        self.files.put(PLACE_NAME, orjson.dumps(content))

    def run(self, element: int) -> None:
        """The tasks of one element. A task that fails leaves its exception as its answer.

        Raises InputError if the folder holds no tasks, RecipeError for an element that is not one of its."""
        try:
            content = orjson.loads(self.files.get(PLACE_NAME))
            place = replace(Place(**content["place"]), probe=None)
            tasks, elements = content["tasks"], content["elements"]
            scratch = _scratch(self.files, content["listing"])
        except (OSError, InputError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.files}: no folder of tasks ({error}); `gristmill run --engine slurm` writes it and names it"
            ) from error
        if not 0 <= element < elements:
            raise RecipeError(f"element {element}: the tasks of {self.files} have the elements 0 to {elements - 1}")
        if isinstance(scratch, Listing):
            place = replace(place, objects=scratch.objects)
        answered = self.answered()
        for number in range(element, tasks, elements):
            if number not in answered:
                answer = run_task(self._get(f"orders/{_name(number)}"), place, scratch)
                self.files.put(f"answers/{_name(number)}", answer.to_bytes())

    def answered(self) -> set[int]:
        """The numbers of the tasks that have an answer."""
        return {int(name.removesuffix(".task")) for name in self.files.names("answers")}

    def answer(self, number: int) -> Parcel:
        """What `run_task` gave."""
        return self._get(f"answers/{_name(number)}")

    def forget(self, number: int) -> None:
        """The answer, so that the task runs again."""
        self.files.remove(f"answers/{_name(number)}")

    def _get(self, name: str) -> Parcel:
        try:
            return Parcel.from_bytes(self.files.get(name))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.files}/{name}: a task's file cannot be read ({error}); run the command again"
            ) from error


def _name(number: int) -> str:
    return f"{number:07d}.task"


def _scratch(files: TaskFiles, listing: dict | None) -> Path | Listing:
    if isinstance(files, SharedFiles):
        return files.folder
    assert listing is not None
    return Listing(TaskObjects(**listing["objects"]), listing["digest"], listing["root"])
