"""Loads the objective of a recipe: one that comes with gristmill, or a class in the user's own Python file."""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.objectives.causal import Causal
from gristmill.training.objectives.classification import Classification
from gristmill.training.objectives.distillation import Distillation
from gristmill.training.objectives.masked import Masked
from gristmill.training.objectives.multiple_choice import MultipleChoice
from gristmill.training.objectives.names import parse_user_objective, read_source
from gristmill.training.objectives.objective import Objective, ObjectiveInputs
from gristmill.training.objectives.source_classification import SourceClassification
from gristmill.training.objectives.span_corruption import SpanCorruption
from gristmill.training.objectives.span_extraction import SpanExtraction

OBJECTIVES: Mapping[str, type[Objective]] = {
    "causal": Causal,
    "distillation": Distillation,
    "masked": Masked,
    "span_corruption": SpanCorruption,
    "classification": Classification,
    "multiple_choice": MultipleChoice,
    "source_classification": SourceClassification,
    "span_extraction": SpanExtraction,
}


def load_objective(name: str) -> type[Objective]:
    """The class. Raises RecipeError, with file and line, if the name is unknown or the file does not load.

    The file is the user's own code and runs with the user's rights, as the recipe says by naming it."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    path, class_name = parse_user_objective(name)
    read_source(path)
    module_name = f"gristmill_objective_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickles look the module up
    with errors_named("does not load"):
        spec.loader.exec_module(module)
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Objective)):
        classes = sorted(
            name
            for name, each in vars(module).items()
            if isinstance(each, type) and issubclass(each, Objective) and each is not Objective
        )
        raise RecipeError(
            f"train.objective: {path} has no class {class_name!r} that derives from Objective; it has {classes}"
        )
    return found


def make_objective(name: str, options: Mapping[str, Any], inputs: ObjectiveInputs) -> Objective:
    """The objective with its options. Raises RecipeError naming a wrong option, or file and line of its own error."""
    found, checked = check_options(name, options)
    with errors_named("cannot be made"):
        return found(inputs, checked)


def check_options(name: str, options: Mapping[str, Any]) -> tuple[type[Objective], Any]:
    """(the class, its checked options). Raises RecipeError as `make_objective` does."""
    found = load_objective(name)
    try:
        return found, found.Options.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in ("train.objective_options", *first["loc"]))
        raise RecipeError(f"{field}: {first['msg']}; {name} takes {sorted(found.Options.model_fields)}") from error


@contextmanager
def errors_named(what: str) -> Iterator[None]:
    """Turns an exception of an objective into a RecipeError with the file and line it came from."""
    try:
        yield
    except (RecipeError, InputError):
        raise
    except SyntaxError as error:
        raise RecipeError(
            f"train.objective: {error.filename}:{error.lineno}: {what}: {error.msg}; correct the file"
        ) from error
    except Exception as error:
        frame = _objective_frame(traceback.extract_tb(error.__traceback__))
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise RecipeError(
            f"train.objective: {frame.filename}:{frame.lineno}: {what}: {type(error).__name__}: {message}; correct the "
            "file or the recipe"
        ) from error


def _objective_frame(frames: list[traceback.FrameSummary]) -> traceback.FrameSummary:
    """The innermost frame in an objective's file: outside of installed packages and of gristmill's engine."""
    engine, objectives = str(Path(__file__).parents[1]), str(Path(__file__).parent)
    for frame in reversed(frames):
        is_engine = frame.filename.startswith(engine) and not frame.filename.startswith(objectives)
        if not is_engine and "site-packages" not in frame.filename and not frame.filename.startswith("<"):
            return frame
    return frames[-1]
