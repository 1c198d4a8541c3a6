"""lm-eval's multilingual tasks over local files: its requests on the same records, FLORES, and the transfer table."""

import json
from pathlib import Path

import lm_eval.tasks
import pytest
from datasets import Dataset
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from gristmill.evaluation.results.table import ScoreRow, transfer_markdown, transfer_table
from gristmill.evaluation.tasks.suites import FAMILIES, expand, family_of, flores_files, multilingual_suites
from gristmill.evaluation.tasks.task_index import task_manager
from gristmill.foundation.errors import InputError

THEIRS = Path(lm_eval.tasks.__file__).parent
STORY = {f"input_sentence_{number}": f"Die Mühle steht {number}." for number in (1, 2, 3, 4)}
RECORDS = {
    "xnli_de": [
        {"premise": "Die Mühle steht", "hypothesis": "sie ist alt", "label": 1},
        {"premise": "Die Mühle fiel", "hypothesis": "sie steht", "label": 2},
    ],
    "xcopa_th": [
        {"premise": "ลมพัด.", "choice1": "โรงสีหมุน", "choice2": "โรงสีล้ม", "question": "effect", "label": 0},
        {"premise": "ไฟไหม้.", "choice1": "ฝนตก", "choice2": "ประกายไฟ", "question": "cause", "label": 1},
    ],
    "xstorycloze_es": [
        {**STORY, "sentence_quiz1": "Es dreht sich.", "sentence_quiz2": "Es fliegt.", "answer_right_ending": 1},
        {**STORY, "sentence_quiz1": "Es fliegt.", "sentence_quiz2": "Es dreht sich.", "answer_right_ending": 2},
    ],
    "xwinograd_jp": [
        {"sentence": "袋は_から落ちた。", "option1": "車", "option2": "袋", "answer": "1"},
        {"sentence": "_は古い。", "option1": "袋", "option2": "水車", "answer": "2"},
    ],
    "paws_fr": [
        {"sentence1": "Le moulin tourne .", "sentence2": "Il tourne .", "label": 1},
        {"sentence1": "Le moulin tourne .", "sentence2": "Le blé pousse .", "label": 0},
    ],
}
PLACES = {
    "xnli_de": "xnli/xnli_de.yaml",
    "xcopa_th": "xcopa/default_th.yaml",
    "xstorycloze_es": "xstorycloze/default_es.yaml",
    "xwinograd_jp": "xwinograd/xwinograd_jp.yaml",
    "paws_fr": "paws-x/paws_fr.yaml",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with two questions of each benchmark, and three languages of FLORES."""
    (tmp_path / "benchmarks" / "flores").mkdir(parents=True)
    for name, records in RECORDS.items():
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (tmp_path / "benchmarks" / f"{name}.jsonl").write_text(lines)
    for name, text in (
        ("eng_Latn.devtest", "The mill turns.\n\nIt is old.\n"),
        ("arb_Arab.devtest", "الطاحونة قديمة\n"),
    ):
        (tmp_path / "benchmarks" / "flores" / name).write_text(text)
    (tmp_path / "benchmarks" / "flores" / "eng_Latn.dev").write_text("not read\n")
    return tmp_path


def requests(task) -> list[tuple]:
    task.build_all_requests(rank=0, world_size=1)
    return [(each.request_type, each.doc_id, each.idx, *each.args) for each in task.instances]


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_task_makes_lm_evals_requests_on_the_same_records(data, name):
    ours = task_manager(data, download=False).load([name])["tasks"][name]
    theirs = load_yaml(THEIRS / PLACES[name])
    splits = {theirs[key] for key in ("training_split", "validation_split", "test_split") if theirs.get(key)}
    config = {**theirs, "custom_dataset": lambda **stated: {each: Dataset.from_list(RECORDS[name]) for each in splits}}
    other = TaskManager(include_defaults=False).load([config])["tasks"][name]
    assert requests(ours) == requests(other)
    assert [ours.doc_to_target(doc) for doc in ours.eval_docs] == [other.doc_to_target(doc) for doc in other.eval_docs]
    assert list(ours._metric_fn_list) == list(other._metric_fn_list)


def test_every_language_of_lm_eval_is_there():
    for family in FAMILIES:
        found = {path.stem.rpartition("_")[2] for path in (THEIRS / family.folder).glob(f"{family.file_prefix}_*.yaml")}
        assert found == set(family.languages)


def test_sentences_of_flores_are_documents(data):
    assert flores_files(data) == {
        "arb_Arab": "benchmarks/flores/arb_Arab.devtest",
        "eng_Latn": "benchmarks/flores/eng_Latn.devtest",
    }
    manager = task_manager(data, download=False)
    task = manager.load(["flores_eng_Latn"])["tasks"]["flores_eng_Latn"]
    assert [args for _, _, _, args in requests(task)] == ["The mill turns.", "It is old."]
    assert sorted(manager.load(["flores"])["tasks"]) == ["flores_arb_Arab", "flores_eng_Latn"]


def test_a_suite_skips_absent_languages_and_a_named_task_does_not(data):
    manager = task_manager(data, download=False)
    tasks, notes = expand(["xnli"], manager.task_index, data)
    assert tasks == ["xnli_de"]
    assert (
        len(notes) == 1
        and "14 tasks of the suite xnli were skipped, whose files are absent: xnli_ar, xnli_bg" in notes[0]
    )
    tasks, notes = expand(["xwinograd"], manager.task_index, data)
    assert tasks == ["xwinograd_jp"] and len(notes) == 5
    assert notes[0] == "xwinograd_en of the suite xwinograd was skipped: benchmarks/xwinograd_en.jsonl is absent"
    assert set(RECORDS) <= set(multilingual_suites()["multilingual"])
    with pytest.raises(InputError, match=r"xnli_fr\.jsonl: absent; this task reads .* premise, hypothesis, label"):
        manager.load(["xnli_fr"])


def row(task: str, score: float, metric: str = "acc", chance: float | None = 0.5) -> ScoreRow:
    return ScoreRow(task, 0, 10, metric, score, None, True, chance)


def test_the_transfer_table_by_hand():
    rows = [
        row("xstorycloze_en", 0.7), row("xstorycloze_ar", 0.5), row("xstorycloze_sw", 0.4), row("xnli_de", 0.4),
        row("flores_eng_Latn", 1.0, "bits_per_byte", None), row("flores_arb_Arab", 0.75, "bits_per_byte", None),
        row("flores_arb_Arab", 9.0, "word_perplexity", None), row("piqa", 0.9), row("paws_fr", 0.5),
        row("paws_ja", 0.6),
    ]  # fmt: skip
    table = transfer_table(rows, family_of)
    assert table == [
        ["language", "xstorycloze", "flores", "paws"],
        ["ar", "0.5000 (-0.2000)", "", ""],
        ["arb_Arab", "", "0.7500 (-0.2500)", ""],
        ["en", "0.7000", "", ""],
        ["eng_Latn", "", "1.0000", ""],
        ["fr", "", "", "0.5000"],
        ["ja", "", "", "0.6000"],
        ["sw", "0.4000 (-0.3000)", "", ""],
        ["mean without English", "0.4500", "0.7500", "0.5500"],
        ["chance", "0.5000", "", "0.5000"],
    ]
    assert transfer_markdown(table).splitlines()[2] == "| ar | 0.5000 (-0.2000) |  |  |"
    assert transfer_table(rows[3:4], family_of) == []
