"""Errors of an objective as one line: the file and line they come from, and what to change."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gristmill.foundation.errors import InputError, RecipeError

ROOT = Path(__file__).parents[1]
OWN = tuple(
    ROOT / name for name in ("data_pipeline", "evaluation", "foundation", "pipelines", "tokenizers", "training")
)
OBJECTIVES = ROOT / "training/objectives"


@contextmanager
def errors_named(what: str, place: str = "") -> Iterator[None]:
    """Turns an exception of an objective, and an exit, into a RecipeError with the file and line it came from. place:
    of exceptions that come from no line of the file."""
    try:
        yield
    except (RecipeError, InputError):
        raise
    except (Exception, SystemExit) as error:
        raise _named(error, what, place) from error


@contextmanager
def user_errors_named(what: str) -> Iterator[None]:
    """As `errors_named`, for calls during a run: only of exceptions that the user's own lines raise; those of
    gristmill, such as a lost connection or too little memory, pass."""
    try:
        yield
    except (RecipeError, InputError):
        raise
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
        if any(Path(frames[-1].filename).is_relative_to(folder) for folder in OWN):
            raise
        raise _named(error, what, "") from error


def wrong(objective: Any, function: str, problem: str) -> RecipeError:
    """What a function of the objective returns is wrong."""
    return RecipeError(f"train.objective: {defined_at(type(objective), function)}: {problem}")


def defined_at(found: type, function: str) -> str:
    """The line of the function's definition: mine.py:12."""
    code = getattr(getattr(found, function, None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else found.__name__


def _named(error: BaseException, what: str, place: str) -> RecipeError:
    if isinstance(error, SyntaxError):
        place, message = f"{error.filename or place}:{error.lineno or 1}", str(error.msg)
    else:
        place = _place(error) or place
        first = error.args[0] if isinstance(error, KeyError) and error.args else error
        message = f"{type(error).__name__}: {first}"
    return RecipeError(f"train.objective: {place}: {what}: {message}; correct the file or the recipe")


def _place(error: BaseException) -> str:
    """File and line of the innermost frame in an objective's file: outside of libraries and of gristmill's engine."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_library(frame.filename) and not _is_engine(Path(frame.filename)):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith("<")


def _is_engine(path: Path) -> bool:
    """True for gristmill's files but those of the objectives that come with it."""
    if path.parent == OBJECTIVES:
        return path.stem in ("check", "load", "objective")
    return any(path.is_relative_to(folder) for folder in OWN)
