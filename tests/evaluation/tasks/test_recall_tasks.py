"""Questions of needle and phonebook: what they ask, and that they fit their lengths."""

import re

import pytest

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.tasks.recall_tasks import recall_lengths, recall_questions, recall_tasks
from gristmill.foundation.errors import RecipeError

CONFIG = EvaluateConfig(tasks=("needle", "phonebook"), recall_items=40, recall_choices=4)


def by_words(texts):
    """A tokenizer of words, single digits and all else."""
    return [len(re.findall(r"\d|[A-Za-z]+|\s|[^\w\s]", text)) for text in texts]


def by_bytes(texts):
    return [len(text.encode()) for text in texts]


@pytest.mark.parametrize("name", ["needle", "phonebook"])
@pytest.mark.parametrize("count_tokens", [by_words, by_bytes])
@pytest.mark.parametrize("length", [300, 1024])
def test_questions_fill_their_length_and_their_answers_stand_in_the_text(name, count_tokens, length):
    questions = recall_questions(name, length, CONFIG, count_tokens)
    assert questions == recall_questions(name, length, CONFIG, count_tokens)
    assert len({question.context for question in questions}) == 40
    for question in questions:
        (tokens,) = count_tokens([f"{question.context} {question.choices[question.gold]}"])
        assert 0.8 * length < tokens <= length
        assert len(set(question.choices)) == 4
        asked = question.context.rsplit("\n", 1)[-1].rsplit(". ", 1)[-1]
        assert f"{asked} {question.choices[question.gold]}" in question.context
        assert all(choice in question.context for choice in question.choices)
    assert {question.gold for question in questions} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["needle", "phonebook"])
def test_answers_are_spread_over_the_text(name):
    for question in recall_questions(name, 1024, CONFIG, by_words):
        place = question.context.index(question.choices[question.gold]) / len(question.context)
        assert abs(place - question.depth) < 0.1
    depths = sorted(question.depth for question in recall_questions(name, 1024, CONFIG, by_words))
    assert depths == pytest.approx([(item + 0.5) / 40 for item in range(40)])


def test_one_task_for_each_length():
    assert recall_lengths(CONFIG, 1024) == (128, 256, 512, 1024)
    tasks = recall_tasks(CONFIG, by_words, 256)
    assert [task["task"] for task in tasks] == ["needle_128", "phonebook_128", "needle_256", "phonebook_256"]
    tasks = recall_tasks(CONFIG, by_bytes, 256)  # 128 bytes hold no needle
    assert [task["task"] for task in tasks] == ["phonebook_128", "needle_256", "phonebook_256"]
    assert recall_tasks(EvaluateConfig(tasks=("cloze",)), by_words, 256) == []
    assert recall_lengths(EvaluateConfig(recall_lengths=(512, 100)), 1024) == (100, 512)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ((2048,), "recall_lengths: 2048 is above the model's sequence length of 1024 tokens; leave it out"),
        ((16,), "16 tokens are too few for a question of needle; take 32 or more"),
    ],
)
def test_lengths_that_no_question_has_are_refused(lengths, said):
    with pytest.raises(RecipeError, match=said):
        recall_tasks(EvaluateConfig(tasks=("needle",), recall_lengths=lengths), by_words, 1024)


def copies(question) -> str:
    """A reader with perfect recall."""
    asked = question.context.rsplit("\n", 1)[-1].rsplit(". ", 1)[-1]
    return re.search(re.escape(asked) + r" (\d+)", question.context).group(1)


@pytest.mark.parametrize("name", ["needle", "phonebook"])
def test_a_reader_with_perfect_recall_answers_all(name):
    questions = recall_questions(name, 512, CONFIG, by_words)
    assert all(copies(question) == question.choices[question.gold] for question in questions)
