"""Bits per byte of the right answers, for every task that has some: it falls long before accuracies rise, and varies
less between checkpoints (Signal and Noise, arXiv 2508.13144; the "Easy" suite of OlmoBaseEval)."""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

from gristmill.evaluation.results.not_evaluated import evaluated
from gristmill.evaluation.results.standard_errors import ANSWER_BITS, bits_per_byte, subtasks_of

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
    too_long = getattr(model, "too_long", {})
    found = {
        place: (logprob, size)
        for request, (place, size), (logprob, _) in zip(requests, sizes, scored, strict=True)
        if (request.task_name, request.doc_id) not in too_long
    }
    if model.world_size == 1:
        return found
    return {place: pair for each in model.gather_object(found) or () for place, pair in each.items()}


def add_answer_bits(raw: dict[str, Any], samples: Samples, tasks: Mapping[str, Task], generated: Pairs) -> None:
    """Adds the metric to the samples of each task, to its result and to those of its groups.

    Multiple choice: the right choice, without the space before it, as acc_norm counts it; of several right ones the
    likeliest. Where the contexts differ and not the answers (Winogrande), the answer behind the right one."""
    for name, found in samples.items():
        task = tasks[name]
        kept = [sample for sample in evaluated(found) if sample["filter"] == found[0]["filter"]]
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
    pairs = [scored[index] for index in _right_answers(task, sample) if 0 <= index < len(scored)]
    return max(pairs, key=lambda pair: pair[0] / max(pair[1], 1), default=None)


def _right_answers(task: Task, sample: Mapping[str, Any]) -> list[int]:
    """Indices of the right choices, as lm-eval reads them (api/task.py, process_results)."""
    if task.OUTPUT_TYPE == "loglikelihood":
        return [0]
    gold = task.doc_to_text(sample["doc"]) if task.multiple_input else task.doc_to_target(sample["doc"])
    choices = task.doc_to_choice(sample["doc"])
    found = [choices.index(each) if each in choices else -1 if isinstance(each, str) else each
             for each in (gold if isinstance(gold, list) else [gold])]  # fmt: skip
    return [index for index in found if index < len(choices)]
