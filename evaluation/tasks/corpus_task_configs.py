"""lm-eval configs of the two held-out tasks. Each config contains its documents: nothing is read or downloaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from datasets import Dataset

from gristmill.evaluation.tasks.corpus_tasks import ClozeQuestion, HeldOutDocument

BITS_PER_BYTE = "bits_per_byte"
CLOZE = "cloze"
HELD_OUT_TASKS = (BITS_PER_BYTE, CLOZE)


def bits_per_byte_task(group: str, texts: Sequence[HeldOutDocument]) -> dict[str, Any]:
    """The rolling log-likelihood of the texts of one source or language."""
    return {
        "task": f"{BITS_PER_BYTE}_{group}",
        "task_alias": f"{BITS_PER_BYTE} {group}",
        "custom_dataset": documents_of([asdict(text) for text in texts]),
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            {"metric": BITS_PER_BYTE, "aggregation": BITS_PER_BYTE, "higher_is_better": False},
        ],
        "num_fewshot": 0,
        "metadata": {"version": 1.0, "source": f"held-out documents of {group}", "prompt": "end of document"},
    }


def cloze_task(questions: Sequence[ClozeQuestion]) -> dict[str, Any]:
    """Multiple choice of the next line. The line break before it is part of the answer.

    acc_mutual_info takes the line that the context makes likelier by the greatest factor, so that a line does not win
    by being common (Brown et al. 2020, arXiv 2005.14165, section 2.4); acc takes the likeliest."""
    choices = len(questions[0].choices)
    listed = [{**asdict(question), "choices": list(question.choices)} for question in questions]
    return {
        "task": CLOZE,
        "custom_dataset": documents_of(listed),
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "\n",
        "metric_list": [
            {"metric": "acc_mutual_info", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
        "num_fewshot": 0,
        "metadata": {
            "version": 1.0,
            "source": "held-out documents; wrong lines from other documents of the same source",
            "prompt": "the lines before it",
            "chance": 1 / choices,
        },
    }


def documents_of(records: Sequence[Mapping[str, Any]]) -> Callable[..., dict[str, Dataset]]:
    """lm-eval's `custom_dataset` with these records as its test split."""

    def load(**kwargs: Any) -> dict[str, Dataset]:
        return {"test": Dataset.from_list(list(records))}

    return load
