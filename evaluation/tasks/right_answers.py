"""The right answers of tasks and what stands before them, for scores that need no wrong answers."""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from lm_eval.api.task import Task

from gristmill.evaluation.tasks.harness import load_tasks, right_choices
from gristmill.evaluation.tasks.suites import offline
from gristmill.evaluation.tasks.task_index import TaskSources, sandboxed
from gristmill.foundation.errors import RecipeError

SCORED_KINDS = ("multiple_choice", "loglikelihood")


def right_answers(names: Sequence[str], limit: int, sources: TaskSources) -> dict[str, list[tuple[str, str]]]:
    """Task -> (context, right answer) of its first `limit` questions, without worked examples.

    Raises RecipeError for unknown tasks and those without a right answer to score, InputError where data are absent."""
    printed = io.StringIO()
    with offline(not sources.download), sandboxed(), redirect_stderr(printed), redirect_stdout(printed):
        loaded, _ = load_tasks(names, sources)
        return {name: _answers(name, task, limit) for name, task in sorted(loaded["tasks"].items())}


def _answers(name: str, task: Task, limit: int) -> list[tuple[str, str]]:
    if task.OUTPUT_TYPE not in SCORED_KINDS:
        raise RecipeError(f"task {name}: its answers are generated text; name tasks with choices or a continuation")
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    choices: dict[int, dict[int, tuple[str, str]]] = {}
    documents = {}
    for instance in task.instances:
        documents[instance.doc_id] = instance.doc
        choices.setdefault(instance.doc_id, {})[instance.idx] = instance.args[:2]
    answers = []
    for number, document in sorted(documents.items()):
        right = [place for place in right_choices(task, document) if place in choices[number]]
        if right:
            answers.append(choices[number][right[0]])
    return answers
