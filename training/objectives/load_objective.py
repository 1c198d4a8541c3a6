"""Loads the objective of a recipe: one that comes with gristmill, or a class in the user's own Python file."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError

from gristmill.foundation.config import Config
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.user_code import read_source, run_file
from gristmill.training.objectives.classification import Classification, MultipleChoice, SourceClassification
from gristmill.training.objectives.masked import Masked, SpanCorruption
from gristmill.training.objectives.objective import (
    Causal,
    Distillation,
    Objective,
    ObjectiveInputs,
    defined_at,
    errors_named,
    wrong,
)
from gristmill.training.objectives.objective_names import parse_user_objective
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

FUNCTIONS = ("sample", "loss", "predict")
CALLS = {  # what a class may define, and the arguments it is called with
    "sample": ("k",),
    "loss": ("model", "batch"),
    "predict": ("model", "batch"),
    "scores": ("k", "predictions"),
    "chances": ("k",),
    "scored_with": ("k",),
}
DATA_FORMS = get_args(get_type_hints(Objective)["data"])


def load_objective(name: str) -> type[Objective]:
    """The class. Raises RecipeError, with file and line, if the name is unknown or the file does not load.

    The file is the user's own code and runs with the user's rights, as the recipe says by naming it."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    path, class_name = parse_user_objective(name)
    module = run_file(str(path), read_source(path, "train.objective"), "train.objective")
    objective = getattr(module, class_name, None)
    if not (isinstance(objective, type) and issubclass(objective, Objective)):
        classes = sorted(
            name
            for name, member in vars(module).items()
            if isinstance(member, type) and issubclass(member, Objective) and member is not Objective
        )
        raise RecipeError(
            f"train.objective: {path} has no class {class_name!r} that derives from Objective; it has {classes}"
        )
    _check_class(objective, path)
    return objective


def _check_class(objective: type[Objective], path: Path) -> None:
    """Raises RecipeError for a class that lacks one of the three functions, or whose settings are of another kind."""
    missing = [name for name in FUNCTIONS if getattr(objective, name) is getattr(Objective, name)]
    if missing:
        raise RecipeError(
            f"train.objective: {path}: {objective.__name__} does not define {', '.join(missing)}; write them"
        )
    for name, arguments in CALLS.items():
        is_bound = isinstance(inspect.getattr_static(objective, name), staticmethod | classmethod)
        try:
            inspect.signature(getattr(objective, name)).bind(*(arguments if is_bound else ("self", *arguments)))
        except TypeError as error:
            raise RecipeError(
                f"train.objective: {defined_at(objective, name)}: {objective.__name__}.{name} is called with "
                f"({', '.join(arguments)}) and {error}; correct it, or rename a function of your own"
            ) from error
    if not (isinstance(objective.Options, type) and issubclass(objective.Options, Config)):
        raise RecipeError(f"train.objective: {path}: {objective.__name__}.Options is no class that derives from Config")
    if objective.data not in DATA_FORMS:
        raise RecipeError(
            f"train.objective: {path}: {objective.__name__}.data is {objective.data!r}; one of {DATA_FORMS}"
        )


def make_objective(name: str, options: Mapping[str, Any], inputs: ObjectiveInputs) -> Objective:
    """The objective with its options. Raises RecipeError naming a wrong option, or file and line of its own error."""
    objective, checked = check_options(name, options)
    with errors_named("cannot be made", defined_at(objective, "__init__")):
        made = objective(inputs, checked)
    if getattr(made, "inputs", None) is not inputs or getattr(made, "options", None) is not checked:
        raise wrong(made, "__init__", "does not set self.inputs and self.options; call super().__init__")
    return made


def check_options(name: str, options: Mapping[str, Any]) -> tuple[type[Objective], Any]:
    """(the class, its checked options). Raises RecipeError as `make_objective` does."""
    objective = load_objective(name)
    try:
        return objective, objective.Options.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in ("train.objective_options", *first["loc"]))
        raise RecipeError(f"{field}: {first['msg']}; {name} takes {sorted(objective.Options.model_fields)}") from error
