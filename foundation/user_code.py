"""Code of the user: a function or class of a Python file that the recipe names, or of an installed package.

The file is the user's own code and runs with the user's rights, as the recipe says by naming it. Its text travels with
the recipe, so that workers on other machines run what the fingerprint states."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import Field

from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError, RecipeError, did_you_mean

PACKAGE = Path(__file__).parents[1]
OWN = tuple(
    PACKAGE / name for name in ("data_pipeline", "evaluation", "foundation", "pipelines", "tokenizers", "training")
)


class UserCode(Config):
    """A function of a Python file or of an installed package. In a recipe: my_rules.py:no_lorem or
    my_package.no_lorem.

    file: the path, or the package's module. function: its name. sha256: of the file. source: the file's text, which is
    read with the recipe; null for a package."""

    file: str = Field(json_schema_extra={"execution": True})
    function: str
    sha256: str
    source: str | None = Field(default=None, json_schema_extra={"execution": True})

    @property
    def label(self) -> str:
        """my_rules.no_lorem, of the file a/my_rules.py; my_package.no_lorem of a package."""
        name = self.file.partition(".")[0] if self.source is None else Path(self.file).stem
        return f"{name}.{self.function}"

    def load(self, field: str) -> Any:
        """The function, whose file is run once a process.

        Raises RecipeError with file and line if the file does not run or has no such name; InputError if an installed
        package is not the one that the recipe was read with."""
        if self.source is not None:
            return attribute_of(run_file(self.file, self.source, field), self.function, self.file, field)
        point = next((candidate for candidate in _points(field_group(field)) if _label(candidate) == self.label), None)
        if point is None or _module_digest(point.module) != self.sha256:
            raise InputError(
                f"{field}: {self.label}: the installed package differs from the one that the recipe was read with; "
                "install the same version on every machine"
            )
        return point.load()


# Entry points by which an installed package offers functions: the group and the recipe's fields that name them.
GROUPS = {"filters": "gristmill.rules", "signals": "gristmill.signals", "reader": "gristmill.readers"}


def field_group(field: str) -> str:
    """The group of entry points that the last word of a field names: `curate.filters` -> gristmill.rules."""
    return GROUPS[field.rpartition(".")[2]]


def is_reference(name: str) -> bool:
    """Whether the name is one of a function in a Python file: my_rules.py:no_lorem."""
    path, colon, function = name.rpartition(":")
    return bool(colon) and path.endswith(".py") and function.isidentifier()


def read_user_code(name: str, folder: Path, field: str) -> UserCode | None:
    """The code that the recipe names: `my_rules.py:no_lorem`, relative to the folder, or `my_package.no_lorem` of an
    entry point; None if the name has neither form. Raises RecipeError if there is no such file, function or package."""
    if is_reference(name):
        path, _, function = name.rpartition(":")
        source = read_source(folder / Path(path).expanduser(), field)
        digest = hashlib.sha256(source.encode()).hexdigest()
        return UserCode(file=str(folder / path), function=function, sha256=digest, source=source)
    package, dot, function = name.partition(".")
    if not dot or not (package.isidentifier() and function.isidentifier()):
        return None
    points = {_label(point): point for point in _points(field_group(field))}
    if name not in points:
        offered = f"installed packages offer {', '.join(sorted(points)) or 'none'}"
        hint = did_you_mean(name, points, otherwise=offered)
        raise RecipeError(f"{field}: no {name!r} in the entry points {field_group(field)}; {hint}")
    module = points[name].module
    return UserCode(file=module, function=function, sha256=_module_digest(module))


def _points(group: str) -> list[EntryPoint]:
    return sorted(entry_points(group=group), key=lambda point: (point.name, point.value))


def _label(point: EntryPoint) -> str:
    return f"{point.module.partition('.')[0]}.{point.name}"


def _module_digest(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise InputError(f"{module}: the module of an entry point is not installed; install its package again")
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def read_source(path: Path, field: str) -> str:
    """The text of a Python file. Raises RecipeError if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise RecipeError(f"{field}: {path}: {error.strerror}; name a Python file that can be read") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{field}: {path}: not UTF-8; write the file in UTF-8") from error


@lru_cache(maxsize=64)
def run_file(file: str, source: str, field: str) -> ModuleType:
    """The module that the text defines. Raises RecipeError with file and line of the error if it does not run."""
    digest = hashlib.sha256(f"{file}\0{source}".encode()).hexdigest()
    name = f"gristmill_user_{digest[:16]}"
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module  # dataclasses and pickles look the module up
    with errors_named(field, "does not load", file):
        exec(compile(source, file, "exec"), vars(module))
    return module


def attribute_of(module: ModuleType, name: str, file: str, field: str) -> Any:
    """The function or class. Raises RecipeError with the nearest name that the file defines."""
    value = getattr(module, name, None)
    if not callable(value):
        known = sorted(
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        )
        hint = did_you_mean(name, known, otherwise=f"it defines {', '.join(known) or 'none'}")
        raise RecipeError(f"{field}: {file} has no function {name!r}; {hint}")
    return value


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters that have no default."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.default is parameter.empty)


def defined_at(function: Any) -> str:
    """The line of a function's definition: mine.py:12."""
    code = getattr(function, "__code__", None)
    return (
        f"{code.co_filename}:{code.co_firstlineno}"
        if code is not None
        else str(getattr(function, "__name__", function))
    )


# Errors of the user's code as one line: the file and line they come from, and what to change.


@contextmanager
def errors_named(
    field: str, what: str, place: str = "", is_engine: Callable[[Path], bool] | None = None
) -> Iterator[None]:
    """Turns an exception of the user's code, and an exit, into a RecipeError with the file and line it came from.

    place: of exceptions that come from no line of the file. is_engine: True for files whose lines are not the user's;
    by default those of gristmill."""
    try:
        yield
    except (RecipeError, InputError):
        raise
    except (Exception, SystemExit) as error:
        raise named_error(error, field, what, place, is_engine or is_gristmill) from error


def named_error(
    error: BaseException, field: str, what: str, place: str, is_engine: Callable[[Path], bool]
) -> RecipeError:
    """`curate.filters: my_rules.py:7: fails: KeyError: ...`"""
    if isinstance(error, SyntaxError):
        place, message = f"{error.filename or place}:{error.lineno or 1}", str(error.msg)
    else:
        place = _place(error, is_engine) or place
        first = error.args[0] if isinstance(error, KeyError) and error.args else error
        message = f"{type(error).__name__}: {first}"
    return RecipeError(f"{field}: {place}: {what}: {message}; correct the file or the recipe")


def _place(error: BaseException, is_engine: Callable[[Path], bool]) -> str:
    """File and line of the innermost frame outside of libraries and of gristmill's engine."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_library(frame.filename) and not is_engine(Path(frame.filename)):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def is_library(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith("<")


def is_gristmill(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in OWN)
