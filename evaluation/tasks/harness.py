"""Run tasks with lm-eval, offline; the results do not depend on the machine."""

import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate

from gristmill.evaluation.config import RECALL_TASKS, EvaluateConfig
from gristmill.evaluation.results.not_evaluated import exclude_skipped, gather_skip_reasons, skipped_notes
from gristmill.evaluation.results.standard_errors import add_standard_errors
from gristmill.evaluation.tasks.corpus_task_configs import HELD_OUT_TASKS
from gristmill.evaluation.tasks.few_shot import set_shots
from gristmill.evaluation.tasks.gold_answers import add_answer_bits, generation_answers
from gristmill.evaluation.tasks.offline import offline
from gristmill.evaluation.tasks.suites import expand
from gristmill.evaluation.tasks.task_files import is_task_file, sandboxed
from gristmill.evaluation.tasks.task_index import TaskSources, known_tasks
from gristmill.foundation.errors import InputError, RecipeError

NO_SOURCES = TaskSources()


@dataclass(frozen=True)
class Results:
    """summary: lm-eval's result dictionary without the samples; samples and tasks by name. notes: for the reader, such
    as skipped tasks of a suite and skipped questions. log: lm-eval's output."""

    summary: dict[str, Any]
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    log: str = ""


def run_tasks(
    model: LM,
    tasks: Sequence[str | dict[str, Any]],
    config: EvaluateConfig,
    sources: TaskSources = NO_SOURCES,
) -> Results | None:
    """Results of the tasks: names of ours, of suites, paths of task files, or lm-eval task configs. None on every rank
    but the first.

    Calls lm-eval's `evaluate` and not its command line, which collects a description of the machine and indexes
    14,683 tasks."""
    printed = io.StringIO()
    with offline(not sources.download), sandboxed(), redirect_stderr(printed), redirect_stdout(printed):
        loaded, task_notes = _load(tasks, sources)
        few_shot_notes = [set_shots(task, config.shots) for task in loaded["tasks"].values()]
        with _local_rank(model.rank):
            try:
                raw = evaluate(model, loaded, limit=config.limit, bootstrap_iters=0, log_samples=True)
            except (TemplateError, LookupError, SyntaxError, TypeError, ValueError) as error:
                if not sources.include_path and not any(isinstance(name, str) and is_task_file(name) for name in tasks):
                    raise
                raise InputError(
                    f"a task file uses fields that its records do not have ({_error_text(error)}); check it"
                ) from error
        answers = generation_answers(model, loaded["tasks"])
        too_long = gather_skip_reasons(model)
        if raw is None:
            return None
        samples = {name: _numbered(found) for name, found in sorted(raw.pop("samples").items())}
        exclude_skipped(raw, samples, loaded["tasks"], loaded.get("groups", {}), too_long)
        add_answer_bits(raw, samples, loaded["tasks"], answers)
    summary = _portable(raw)
    add_standard_errors(summary, samples)
    notes = [*skipped_notes(samples), *filter(None, few_shot_notes), *task_notes]
    return Results(summary, samples, loaded["tasks"], notes, printed.getvalue())


@contextmanager
def _local_rank(rank: int) -> Iterator[None]:
    """Sets LOCAL_RANK to the rank of the model replica: lm-eval returns results only where it is 0, which with a rank
    order from the planner need not be the first replica."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK") if before is None else os.environ.update({"LOCAL_RANK": before})


def _load(tasks: Sequence[str | dict[str, Any]], sources: TaskSources) -> tuple[Any, list[str]]:
    """(lm-eval's tasks and groups, notes for the reader)."""
    known = known_tasks([task for task in tasks if isinstance(task, str)], sources)
    known.require(sources.download)
    named, left_out = expand(known.names, known.manager.task_index, sources.data)
    given = [task for task in tasks if not isinstance(task, str)]
    if not named and not given:
        raise RecipeError("nothing to evaluate: " + ("; ".join(left_out) or "name tasks"))
    try:
        return known.manager.load([*given, *named]), [*known.notes, *left_out]
    except (InputError, RecipeError):
        raise
    except ConnectionError as error:  # the hub's "offline" and "not reachable" are both of this kind
        raise InputError(
            f"{', '.join(named)}: the data could not be fetched ({error}); use a task over local files"
        ) from error
    except Exception as error:  # lm-eval does not check task files
        raise InputError(
            f"{', '.join(named)}: lm-eval cannot load it as a task ({_error_text(error)}); check its file"
        ) from error


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def require_tasks(tasks: Sequence[str], data: Path | None = None) -> None:
    """Checks that the named tasks load. Raises RecipeError on an unknown name, InputError where a task's file is
    absent, empty or not the pinned one."""
    named = [name for name in tasks if name not in (*HELD_OUT_TASKS, *RECALL_TASKS)]
    if named:
        printed = io.StringIO()
        with offline(), sandboxed(), redirect_stderr(printed), redirect_stdout(printed):
            _load(named, TaskSources(data))


LEFT_OUT_OF_CONFIGS = ("custom_dataset", "process_docs", "fewshot_config")  # code


def _portable(raw: dict[str, Any]) -> dict[str, Any]:
    """The summary without code, paths and `N/A`: equal on every machine."""
    summary = dict(raw)
    summary["configs"] = {name: _portable_config(config) for name, config in raw["configs"].items()}
    summary["results"] = {name: _measured(result) for name, result in raw["results"].items()}
    return summary


def _portable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: _portable_text(value) for name, value in config.items() if name not in LEFT_OUT_OF_CONFIGS}
    kept["metadata"] = {
        name: value for name, value in (config.get("metadata") or {}).items() if name not in ("config_source", "data")
    }
    return kept


def _portable_text(value: Any) -> Any:
    """The name of a function without its address, which differs from process to process."""
    return re.sub(" at 0x[0-9a-f]+", "", value) if isinstance(value, str) else value


def _measured(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if value != "N/A"}


def _numbered(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(samples, key=lambda sample: (sample["doc_id"], sample["filter"]))
