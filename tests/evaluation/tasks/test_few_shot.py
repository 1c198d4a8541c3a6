"""Few-shot examples: their number, their split, and the errors."""

import pytest
from datasets import Dataset
from lm_eval.tasks import TaskManager

from gristmill.evaluation.tasks.few_shot import set_shots
from gristmill.foundation.errors import RecipeError


def note_and_prompts(task, shots: int) -> tuple[str | None, list[str]]:
    note = set_shots(task, shots)
    task.build_all_requests(rank=0, world_size=1)
    return note, [str(instance.args[0]) for instance in task.instances]


def quiz(documents: dict[str, int], **settings):
    """A task over numbered questions. documents: number of questions of each split."""
    config = {
        "task": "quiz",
        "custom_dataset": lambda **stated: {
            split: Dataset.from_list([{"q": f"{split} {number}", "a": "yes"} for number in range(count)])
            for split, count in documents.items()
        },
        "output_type": "loglikelihood",
        "doc_to_text": "q",
        "doc_to_target": "a",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        **settings,
    }
    return TaskManager(include_path=None, include_defaults=False).load([config])["tasks"]["quiz"]


@pytest.mark.parametrize(
    ("documents", "settings", "source"),
    [
        ({"test": 3, "train": 4}, {"test_split": "test", "training_split": "train", "fewshot_split": "test"}, "train"),
        ({"test": 3, "val": 4}, {"test_split": "test", "validation_split": "val", "fewshot_split": "test"}, "val"),
        ({"test": 3, "train": 0, "val": 4}, {"test_split": "test", "training_split": "train",
                                             "validation_split": "val"}, "val"),
        ({"val": 3, "train": 4}, {"validation_split": "val", "training_split": "train",
                                  "fewshot_split": "val"}, "train"),
        ({"test": 3, "dev": 4}, {"test_split": "test", "fewshot_split": "dev"}, "dev"),
    ],
)  # fmt: skip
def test_examples_come_from_another_split_if_one_exists(documents, settings, source):
    note, prompts = note_and_prompts(quiz(documents, **settings), 2)
    assert note is None
    for prompt in prompts:
        assert [part.split()[0] for part in prompt.split("\n\n")] == [source, source, next(iter(documents))]


@pytest.mark.parametrize(
    "settings",
    [
        {"test_split": "only"},
        {"test_split": "only", "fewshot_split": "only"},
        {"validation_split": "only"},
        {"validation_split": "only", "fewshot_split": "only"},  # here lm-eval uses a question as its own example
    ],
)
def test_without_another_split_no_question_is_its_own_example(settings):
    note, prompts = note_and_prompts(quiz({"only": 4}, **settings), 3)
    assert note == (
        "quiz: few-shot examples are other questions of the evaluated split, since there is no train or validation "
        "split; no question is its own example"
    )
    assert [sorted(set(prompt.replace(" yes", "").split("\n\n"))) for prompt in prompts] == [
        [f"only {number}" for number in range(4)]
    ] * 4


def test_too_few_examples_are_an_error():
    for settings, count in (({"test_split": "only"}, 3), ({"test_split": "only", "training_split": "train"}, 2)):
        with pytest.raises(RecipeError, match=f"has {count} few-shot examples, 4 are requested"):
            set_shots(quiz({"only": 4, "train": 2}, **settings), 4)


@pytest.mark.parametrize(
    ("stated", "asked", "used"),
    [(None, None, 0), (None, 2, 2), (1, None, 1), (1, 2, 2), (1, 0, 0), (0, None, 0), (0, 2, 0)],
)
def test_the_number_of_examples(stated, asked, used):
    """--shots replaces the task's own number, but a task that states 0 has none: its prompt is not made for them."""
    settings = {} if stated is None else {"num_fewshot": stated}
    _, prompts = note_and_prompts(
        quiz({"only": 4, "train": 3}, test_split="only", training_split="train", **settings), asked
    )
    assert [prompt.count("train") for prompt in prompts] == [used] * 4


def test_a_task_over_whole_texts_has_no_examples():
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "q"}
    rolling["metric_list"] = [{"metric": "byte_perplexity"}]
    with pytest.raises(RecipeError, match="task quiz scores whole texts, which have no few-shot examples"):
        set_shots(quiz({"only": 4}, test_split="only", **rolling), 1)


def test_the_same_examples_every_time():
    first, second = (
        note_and_prompts(quiz({"test": 3, "train": 9}, test_split="test", training_split="train"), 2) for _ in range(2)
    )
    assert first == second
