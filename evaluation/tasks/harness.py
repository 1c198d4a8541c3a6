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
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate

from gristmill.evaluation.inference.config import RECALL_TASKS, EvaluateConfig
from gristmill.evaluation.results.statistics import (
    ANSWER_BITS,
    add_standard_errors,
    bits_per_byte,
    evaluated,
    exclude_skipped,
    gather_skip_reasons,
    skipped_notes,
    subtasks_of,
)
from gristmill.evaluation.tasks.corpus_tasks import HELD_OUT_TASKS
from gristmill.evaluation.tasks.suites import expand, offline
from gristmill.evaluation.tasks.task_index import TaskSources, is_task_file, known_tasks, sandboxed
from gristmill.foundation.errors import InputError, RecipeError

NO_SOURCES = TaskSources()


@dataclass(frozen=True)
class TaskResults:
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
) -> TaskResults | None:
    """Results of the tasks: names of ours, of suites, paths of task files, or lm-eval task configs. None on every rank
    but the first.

    Calls lm-eval's `evaluate` and not its command line, which collects a description of the machine and indexes
    14,683 tasks."""
    printed = io.StringIO()
    with offline(not sources.download), sandboxed(), redirect_stderr(printed), redirect_stdout(printed):
        loaded, task_notes = load_tasks(tasks, sources)
        few_shot_notes = [set_num_fewshot(task, config.num_fewshot) for task in loaded["tasks"].values()]
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
        skipped = gather_skip_reasons(model)
        if raw is None:
            return None
        samples = {name: _numbered(task_samples) for name, task_samples in sorted(raw.pop("samples").items())}
        exclude_skipped(raw, samples, loaded["tasks"], loaded.get("groups", {}), skipped)
        add_answer_bits(raw, samples, loaded["tasks"], answers)
    summary = _portable(raw)
    add_standard_errors(summary, samples)
    notes = [*skipped_notes(samples), *filter(None, few_shot_notes), *task_notes]
    return TaskResults(summary, samples, loaded["tasks"], notes, printed.getvalue())


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


def load_tasks(tasks: Sequence[str | dict[str, Any]], sources: TaskSources) -> tuple[Any, list[str]]:
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
            load_tasks(named, TaskSources(data))


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


# Few-shot examples: their number, the split they come from (not the evaluated one if another exists), their seed.

FEWSHOT_SEED = 1234  # lm-eval's default: the same examples before the same question as there


def set_num_fewshot(task: Task, num_fewshot: int | None) -> str | None:
    """Sets the number of few-shot examples where the task leaves it open, their split and their seed.

    Returns a note if they come from the evaluated questions. Raises RecipeError if there are too few examples."""
    if task.get_config("num_fewshot") is None or (num_fewshot is not None and task.get_config("num_fewshot") != 0):
        task.set_config("num_fewshot", num_fewshot or 0)
    wanted = task.get_config("num_fewshot")
    name = task.get_config("task")
    note = None
    if wanted and task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise RecipeError(f"task {name} scores whole texts, which have no few-shot examples; leave --num-fewshot out")
    if wanted:
        note = _draw_from_another_split(task, name)
        available = len(task.sampler.df) - (note is not None)
        if wanted > available:
            raise RecipeError(f"task {name} has {available} few-shot examples, {wanted} are requested; lower the shots")
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return note


def _draw_from_another_split(task: Task, name: str) -> str | None:
    """Keeps the task's own split if it is not the evaluated one, else takes the train or validation split; a note if
    there is none. lm-eval removes a question from its own examples if `fewshot_cfg.split` equals `test_split` (also
    None)."""
    config, fewshot = task.config, task.fewshot_cfg
    evaluated = config.test_split or config.validation_split
    chosen = fewshot.split or (
        None if fewshot.samples is not None else config.training_split or config.validation_split
    )
    if fewshot.split is None and fewshot.samples is None and chosen is None:
        chosen = evaluated
    if chosen != evaluated and len(task.sampler.df):
        return None
    others = {
        config.training_split: task.training_docs,
        config.validation_split: task.validation_docs,
    }
    for split, documents in others.items():
        if split is not None and split != evaluated and len(documents_of_split := list(documents() or ())):
            task.sampler, fewshot.split = _sampler(task, documents_of_split), split
            return None
    task.sampler, fewshot.split = _sampler(task, list(task.eval_docs)), config.test_split
    return (
        f"{name}: few-shot examples are other questions of the evaluated split, since there is no train or validation "
        "split; no question is its own example"
    )


def _sampler(task: Task, documents: list) -> ContextSampler:
    return type(task.sampler)(documents, rnd=FEWSHOT_SEED)


# Bits per byte of the right answers, for every task that has some: it falls long before accuracies rise, and varies
# less between checkpoints (Signal and Noise, arXiv 2508.13144; the "Easy" suite of OlmoBaseEval).

Samples = Mapping[str, Sequence[dict[str, Any]]]  # by task
Pair = tuple[float, int]  # log-likelihood of a right answer in nats, its UTF-8 bytes
Pairs = dict[tuple[str, int], Pair]  # by task and document


def generation_answers(model: Any, tasks: Mapping[str, Task]) -> Pairs:
    """Right answers of tasks that generate text, each scored behind its prompt; of all data-parallel replicas on the
    first one. An answer that does not fit the sequence length is left out."""
    generating = {name: task for name, task in tasks.items() if task.OUTPUT_TYPE == "generate_until"}
    if not generating:
        return {}
    requests, sizes = [], []
    for name, task in generating.items():
        delimiter = task.config.target_delimiter
        for instance in {instance.doc_id: instance for instance in task.instances}.values():
            answer = task.doc_to_target(instance.doc)
            if isinstance(answer, str) and answer:
                requests.append(
                    Instance(
                        "loglikelihood",
                        instance.doc,
                        (instance.args[0], delimiter + answer),
                        0,
                        metadata=(f"{name}, right answers", instance.doc_id, 1),
                    )
                )
                sizes.append(((name, instance.doc_id), len(answer.encode())))
    scored = model.loglikelihood(requests) if requests else []
    skipped = getattr(model, "skipped", {})
    answers = {
        place: (logprob, size)
        for request, (place, size), (logprob, _) in zip(requests, sizes, scored, strict=True)
        if (request.task_name, request.doc_id) not in skipped
    }
    if model.world_size == 1:
        return answers
    return {place: pair for rank_answers in model.gather_object(answers) or () for place, pair in rank_answers.items()}


def add_answer_bits(raw: dict[str, Any], samples: Samples, tasks: Mapping[str, Task], generated: Pairs) -> None:
    """Adds the metric to the samples of each task, to its result and to those of its groups.

    Multiple choice: the right choice, without the space before it, as acc_norm counts it; of several right ones the
    likeliest. Where the contexts differ and not the answers (Winogrande), the answer behind the right one."""
    for name, task_samples in samples.items():
        task = tasks[name]
        kept = [sample for sample in evaluated(task_samples) if sample["filter"] == task_samples[0]["filter"]]
        for sample in kept:
            pair = generated.get((name, sample["doc_id"]))
            if task.OUTPUT_TYPE in ("multiple_choice", "loglikelihood"):
                pair = _scored_answer(task, sample)
            if pair is not None and pair[1]:
                sample[ANSWER_BITS] = list(pair)
                sample["metrics"] = [*sample["metrics"], ANSWER_BITS]
        _add_result(raw, name, kept)
    for group in raw.get("group_subtasks", {}):
        below = [task for task in subtasks_of(group, raw["group_subtasks"]) if task in samples]
        if group in raw["results"] and group not in samples:
            _add_result(raw, group, [sample for task in below for sample in evaluated(samples[task])])


def _add_result(raw: dict[str, Any], name: str, samples: Sequence[Mapping[str, Any]]) -> None:
    chosen = [sample for sample in samples if ANSWER_BITS in sample]
    if chosen:
        bits = bits_per_byte([sample[ANSWER_BITS] for sample in chosen])
        raw["results"][name][f"{ANSWER_BITS},{chosen[0]['filter']}"] = bits
        raw["higher_is_better"].setdefault(name, {})[ANSWER_BITS] = False


def _scored_answer(task: Task, sample: Mapping[str, Any]) -> Pair | None:
    """The best of the right answers among those that the task has scored."""
    scored = [
        (response[0], len(arguments[1].removeprefix(task.config.target_delimiter).encode()))
        for response, arguments in zip(sample["filtered_resps"], sample["arguments"], strict=True)
    ]
    pairs = [scored[index] for index in right_choices(task, sample["doc"]) if 0 <= index < len(scored)]
    return max(pairs, key=lambda pair: pair[0] / max(pair[1], 1), default=None)


def right_choices(task: Task, document: Any) -> list[int]:
    """Indices of the right choices, as lm-eval reads them (api/task.py, process_results)."""
    if task.OUTPUT_TYPE == "loglikelihood":
        return [0]
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    choices = task.doc_to_choice(document)
    indices = [choices.index(answer) if answer in choices else -1 if isinstance(answer, str) else answer
             for answer in (gold if isinstance(gold, list) else [gold])]  # fmt: skip
    return [index for index in indices if index < len(choices)]


# The right answers of tasks and what stands before them, for scores that need no wrong answers.

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
