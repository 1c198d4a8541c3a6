"""The right answer of each question."""

import json

import pytest
import zstandard

from gristmill.evaluation.tasks.harness import right_answers
from gristmill.evaluation.tasks.task_index import TaskSources
from gristmill.foundation.errors import InputError, RecipeError


def test_the_right_choice_behind_its_question(shared_data):
    path = shared_data("benchmarks/openbook_qa.jsonl.zst")
    content = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())
    records = [json.loads(line) for line in content.splitlines()[:5]]
    answers = right_answers(["openbookqa"], 5, TaskSources(path.parents[1]))["openbookqa"]
    assert [answer.strip() for _, answer in answers] == [record["choices"][record["gold"]] for record in records]


def test_tasks_are_checked(tmp_path):
    sources = TaskSources(tmp_path)
    with pytest.raises(RecipeError, match="no task 'openbook'; the nearest is 'openbookqa'"):
        right_answers(["openbook"], 2, sources)
    with pytest.raises(InputError, match=r"piqa.*absent"):
        right_answers(["piqa"], 2, sources)
