"""Running tasks through lm-eval, and the form of its results."""

import json
import math

import huggingface_hub.constants
import pytest
from lm_eval.utils import make_table

from gristmill.evaluation.config import EvaluateConfig
from gristmill.evaluation.results.table import markdown, score_rows
from gristmill.evaluation.results.write import write_results
from gristmill.evaluation.scoring.language_model import LanguageModel
from gristmill.evaluation.tasks.corpus_task_configs import bits_per_byte_task, cloze_task
from gristmill.evaluation.tasks.corpus_tasks import ClozeQuestion, HeldOutDocument
from gristmill.evaluation.tasks.harness import run_tasks
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter


@pytest.fixture
def model(small_causal_lm, byte_codec) -> LanguageModel:
    return LanguageModel(small_causal_lm(sequence_length=128), byte_codec, 2000, Reporter.silent())


TEXTS = [
    HeldOutDocument("0", "notes", "Grain goes in.\nFlour comes out.\n"),
    HeldOutDocument("1", "notes", "The mill turns.\n"),
]
QUESTIONS = [
    ClozeQuestion("0", "notes", "Grain goes in.", ("Flour comes out.", "Water comes in.", "Bread is baked.", "So."), 0),
    ClozeQuestion("1", "notes", "The mill", ("no", "turns", "stands", "sleeps"), 1),
]


def test_both_held_out_tasks_through_lm_eval(model):
    results = run_tasks(model, [bits_per_byte_task("notes", TEXTS), cloze_task(QUESTIONS)], EvaluateConfig())
    found = results.summary["results"]
    bits = sum(-model.loglikelihood_rolling([_Request(text.text)])[0] / math.log(2) for text in TEXTS)
    size = sum(len(text.text.encode()) for text in TEXTS)
    assert found["bits_per_byte_notes"]["bits_per_byte,none"] == pytest.approx(bits / size)
    assert found["bits_per_byte_notes"]["bits_per_byte_stderr,none"] > 0
    assert found["cloze"]["sample_len"] == 2
    rows = {
        (row.task, row.metric): row
        for row in score_rows(results.summary, results.samples, {"bits_per_byte_notes": [5.0, 5.0]})
    }
    assert rows["cloze", "acc"].chance == 0.25
    row = rows["bits_per_byte notes", "bits_per_byte"]
    assert row.chance == pytest.approx(10 / size) and str(row.verdict) == "like chance (p = 0.5)"
    assert row.verdict.side == "worse"
    assert results.summary["configs"]["cloze"]["metadata"]["version"] == 1.0


def test_the_same_scores_are_the_same_bytes(model, tmp_path):
    for name in ("first", "second"):
        results = run_tasks(model, [cloze_task(QUESTIONS)], EvaluateConfig())
        rows = score_rows(results.summary, results.samples, {})
        write_results(tmp_path / name, results.summary, results.samples, rows, ["a note"])
    first = {path.name: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()}
    second = {path.name: path.read_bytes() for path in (tmp_path / "second").rglob("*") if path.is_file()}
    assert first == second
    assert first.keys() == {"results.json", "table.md", "table.html", "cloze.jsonl"}
    assert b"0x" not in first["results.json"] and str(tmp_path).encode() not in first["results.json"]


def test_an_unknown_task_names_the_nearest(model):
    with pytest.raises(RecipeError, match="no task 'cloz'"):
        run_tasks(model, ["cloz"], EvaluateConfig())


def test_the_table_reads_well(model):
    results = run_tasks(model, [cloze_task(QUESTIONS)], EvaluateConfig())
    text = markdown(score_rows(results.summary, results.samples, {}), ["one note"])
    lines = text.splitlines()
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[0].split() == [
        "|",
        "task",
        "|",
        "shots",
        "|",
        "n",
        "|",
        "not",
        "evaluated",
        "|",
        "metric",
        "|",
        "score",
        "|",
        "±",
        "s.e.",
        "|",
        "chance",
        "|",
        "verdict",
        "|",
    ]
    assert lines[-1] == "- one note"


def test_lm_evals_own_table_reads_our_results(model, tmp_path):
    results = run_tasks(model, [bits_per_byte_task("notes", TEXTS), cloze_task(QUESTIONS)], EvaluateConfig())
    write_results(tmp_path, results.summary, results.samples, [], [])
    printed = make_table(json.loads((tmp_path / "results.json").read_text()))
    assert "cloze" in printed and "acc_mutual_info" in printed and "bits_per_byte" in printed


def test_the_network_is_off_while_tasks_are_run(model, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    fetched = {
        "task": "from_the_hub",
        "dataset_path": "nobody/nothing",
        "output_type": "loglikelihood",
        "test_split": "t",
    }
    with pytest.raises(InputError, match="could not be fetched"):
        run_tasks(model, [fetched], EvaluateConfig())
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False


class _Request:
    def __init__(self, text: str):
        self.args = (text,)


def test_a_task_in_lm_evals_own_words_reads_local_files(model, tmp_path, monkeypatch):
    """dataset_path and data_files go through lm-eval's and datasets' own loading; nothing is fetched."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rivers.json"
    path.write_text(
        "".join(json.dumps({"q": f"River {i} is", "a": ["long", "short"], "y": i % 2}) + "\n" for i in range(4))
    )
    task = {
        "task": "rivers",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "q",
        "doc_to_choice": "a",
        "doc_to_target": "y",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    results = run_tasks(model, [task], EvaluateConfig(limit=3))
    assert results.summary["results"]["rivers"]["sample_len"] == 3
    assert [sample["target"] for sample in results.samples["rivers"]] == [0, 1, 0]


def test_a_name_of_lm_evals_own_says_how_it_is_reached(model):
    with pytest.raises(RecipeError, match="use --download for lm-eval's own tasks"):
        run_tasks(model, ["mmlu"], EvaluateConfig())
