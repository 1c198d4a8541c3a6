"""Names of objectives in a recipe. Without torch."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.user_code import is_reference, read_source
from gristmill.training.objectives.record_files import records_digest

SCORED_BY_TASKS = ("causal", "distillation", "span_corruption")  # their models give the next token
OWN_DATA = ("classification", "multiple_choice", "span_extraction")  # read records of their own, no corpus
RECORD_FILES = ("train", "validation", "test")  # the options that name them
BUILT_IN = ("causal", "distillation", "masked", "span_corruption", "source_classification", *OWN_DATA)


def objective_identity(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Identity of the objective in the run's fingerprint: its name, or class and digest of the user's file."""
    if name in BUILT_IN:
        return {"name": name, "options": dict(options)}
    path, class_name = parse_user_objective(name)
    source = read_source(path, "train.objective")
    return {"class": class_name, "sha256": hashlib.sha256(source.encode()).hexdigest(), "options": dict(options)}


def records_digests(options: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of each file of records that the options name. Raises InputError if one cannot be read."""
    digests = {}
    for split in RECORD_FILES:
        if options.get(split) is not None:
            path = Path(str(options[split]))
            try:
                digests[split] = records_digest(path)
            except OSError as error:
                raise InputError(
                    f"train.objective_options.{split}: {path}: {error.strerror}; name a file of records"
                ) from error
    return digests


def parse_user_objective(name: str) -> tuple[Path, str]:
    """ "a/my_objective.py:Rewarded" -> (Path("a/my_objective.py"), "Rewarded")."""
    path, _, class_name = name.rpartition(":")
    if not is_reference(name):
        raise RecipeError(
            f"train.objective: {name!r} is not one of {list(BUILT_IN)}, nor a class in a Python file such as "
            "my_objective.py:Rewarded; correct the name"
        )
    return Path(path), class_name
