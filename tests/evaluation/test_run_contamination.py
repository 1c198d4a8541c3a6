"""Scores on clean and contaminated questions, from the files that the stage `curate` writes."""

import json
from types import SimpleNamespace

import pytest

from gristmill.data_pipeline.decontamination.decontaminate import DECONTAMINATION_FOLDER, QUESTIONS_NAME, REPORT_JSON
from gristmill.evaluation.run import contaminated_questions, contamination_rows
from gristmill.evaluation.tasks.harness import TaskResults
from gristmill.foundation.errors import InputError


@pytest.fixture
def curate(tmp_path):
    """Writes decontamination/ with these questions: (benchmark, example, outcomes of the documents that hold it)."""

    def write(*questions: tuple[str, str, list[str]]):
        folder = tmp_path / DECONTAMINATION_FOLDER
        folder.mkdir(exist_ok=True)
        (folder / REPORT_JSON).write_text(json.dumps({"quiz": {}, "rivers": {}}))
        lines = [
            {"benchmark": name, "example": example, "documents": [{"outcome": outcome} for outcome in outcomes]}
            for name, example, outcomes in questions
        ]
        (folder / QUESTIONS_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path

    return write


def test_questions_found_in_the_corpus(curate):
    """A question is still in the corpus if one of its documents is only annotated. Examples of local benchmark files
    have names instead of numbers and no task."""
    folder = curate(
        ("quiz", "1", ["removed", "annotated"]), ("quiz", "4", ["split"]), ("mine", "rivers.txt", ["split"])
    )
    assert contaminated_questions(folder) == {"quiz": {1: True, 4: False}, "rivers": {}}


def test_without_decontamination_nothing_is_known(tmp_path):
    assert contaminated_questions(tmp_path) == {}


@pytest.mark.parametrize("damage", ["{", "[]\n", '{"benchmark": "quiz"}\n'])
def test_a_damaged_file_is_an_error(curate, damage):
    folder = curate()
    path = folder / DECONTAMINATION_FOLDER / QUESTIONS_NAME
    path.write_text(damage)
    with pytest.raises(InputError, match=r"questions\.jsonl: damaged .*; run the stage `curate` again"):
        contaminated_questions(folder)


def results() -> TaskResults:
    """Five questions of two choices, the answers of 0, 1 and 2 are right."""
    samples = [
        {
            "doc_id": k,
            "filter": "none",
            "metrics": ["acc"],
            "acc": float(k < 3),
            "target": 0,
            "arguments": [["", ""]] * 2,
        }
        for k in range(5)
    ]
    summary = {
        "results": {"gristmill_quiz": {"acc,none": 0.6, "alias": "gristmill_quiz"}},
        "configs": {"gristmill_quiz": {"output_type": "multiple_choice"}},
        "higher_is_better": {"gristmill_quiz": {"acc": True}},
        "n-shot": {"gristmill_quiz": 0},
    }
    return TaskResults(
        summary, {"gristmill_quiz": samples}, {"gristmill_quiz": SimpleNamespace(aggregation=lambda: {})}
    )


def test_scores_of_clean_and_contaminated_questions():
    """Contaminated: 1 (right) and 4 (wrong), 1/2; clean: 0 and 2 (right), 3 (wrong), 2/3. Question 9 is skipped."""
    found = results()
    rows = contamination_rows(found, {"quiz": {1: True, 4: False, 9: True}})
    assert [(row.task, row.count, row.score, row.chance) for row in rows] == [
        ("gristmill_quiz, clean", 3, pytest.approx(2 / 3), 0.5),
        ("gristmill_quiz, contaminated", 2, 0.5, 0.5),
    ]
    assert [row.error for row in rows] == [pytest.approx(1 / 3), pytest.approx(0.5)]
    assert found.notes == [
        "gristmill_quiz: 2 of 5 questions were found in the corpus (contaminated): 1 were removed from it before "
        "training, 1 are still in it"
    ]
    written = found.summary["contamination"]["gristmill_quiz"]
    assert written["left_in_corpus"] == 1 and written["clean"]["sample_len"] == 3
    assert written["contaminated"]["acc,none"] == 0.5


def test_a_task_that_was_searched_for_in_vain_has_only_a_note():
    found = results()
    assert contamination_rows(found, {"quiz": {}}) == [] and "contamination" not in found.summary
    assert found.notes[0].startswith("gristmill_quiz: 0 of 5 questions were found in the corpus")


def test_a_task_that_was_not_searched_for_is_not_mentioned():
    found = results()
    assert contamination_rows(found, {"rivers": {0: True}}) == [] and found.notes == []
