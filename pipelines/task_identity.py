"""How evaluation tasks enter the fingerprint of a stage: by name, and task files by content."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gristmill.evaluation.config import EvaluateConfig


def task_identity(tasks: Sequence[str], evaluate: EvaluateConfig) -> list[Any]:
    """["piqa", "my/rivers.yaml"] -> ["piqa", {"task_file": digest}]: a path decides nothing, what the file says does.

    Raises InputError if a task file is absent, RecipeError if it is not a task file."""
    return [{"task_file": _digest(name, evaluate)} if name.endswith((".yaml", ".yml")) else name for name in tasks]


def _digest(name: str, evaluate: EvaluateConfig) -> str:
    # Imported here: lm-eval takes seconds to load, and few recipes name task files.
    from gristmill.evaluation.tasks.task_files import task_file_digest

    return task_file_digest(Path(name), None if evaluate.data is None else Path(evaluate.data))
