"""Names of objectives in a recipe. Without torch."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.foundation.errors import RecipeError

SCORED_BY_TASKS = ("causal", "distillation", "span_corruption")  # their models give the next token
FINE_TUNING = ("classification", "multiple_choice", "source_classification", "span_extraction")
BUILT_IN = ("causal", "distillation", "masked", "span_corruption", *FINE_TUNING)


def objective_identity(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the objective is, for the run's fingerprint: its name, or class and digest of the user's file."""
    if name in BUILT_IN:
        return {"name": name, "options": dict(options)}
    path, class_name = parse_user_objective(name)
    return {"class": class_name, "sha256": hashlib.sha256(read_source(path)).hexdigest(), "options": dict(options)}


def parse_user_objective(name: str) -> tuple[Path, str]:
    """ "a/my_objective.py:Rewarded" -> (Path("a/my_objective.py"), "Rewarded")."""
    path, colon, class_name = name.rpartition(":")
    if not colon or not path.endswith(".py") or not class_name.isidentifier():
        raise RecipeError(
            f"train.objective: {name!r} is not one of {list(BUILT_IN)}, nor a class in a Python file such as "
            "my_objective.py:Rewarded; correct the name"
        )
    return Path(path), class_name


def read_source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecipeError(f"train.objective: {path}: {error.strerror}; name a Python file that can be read") from error
