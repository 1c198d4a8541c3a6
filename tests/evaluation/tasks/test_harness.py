"""Running tasks through lm-eval, and the form of its results."""

import json
import math

import huggingface_hub.constants
import pytest
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.results.table import markdown, score_rows, write_results
from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter
from gristmill.evaluation.tasks.corpus_tasks import ClozeQuestion, HeldOutDocument, bits_per_byte_task, cloze_task
from gristmill.evaluation.tasks.harness import run_tasks, set_num_fewshot
from gristmill.evaluation.tasks.task_index import TaskSources
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter


@pytest.fixture
def model(small_causal_lm, byte_tokenizer) -> LmEvalAdapter:
    return LmEvalAdapter(small_causal_lm(sequence_length=128), byte_tokenizer, 2000, Reporter.silent())


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


# Few-shot examples: their number, their split, and the errors.


def note_and_prompts(task, shots: int) -> tuple[str | None, list[str]]:
    note = set_num_fewshot(task, shots)
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
            set_num_fewshot(quiz({"only": 4, "train": 2}, **settings), 4)


@pytest.mark.parametrize(
    ("stated", "asked", "used"),
    [(None, None, 0), (None, 2, 2), (1, None, 1), (1, 2, 2), (1, 0, 0), (0, None, 0), (0, 2, 0)],
)
def test_the_number_of_examples(stated, asked, used):
    """--num-fewshot replaces the task's own number, but a task that states 0 has none, as its prompt is made."""
    settings = {} if stated is None else {"num_fewshot": stated}
    _, prompts = note_and_prompts(
        quiz({"only": 4, "train": 3}, test_split="only", training_split="train", **settings), asked
    )
    assert [prompt.count("train") for prompt in prompts] == [used] * 4


def test_a_task_over_whole_texts_has_no_examples():
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "q"}
    rolling["metric_list"] = [{"metric": "byte_perplexity"}]
    with pytest.raises(RecipeError, match="task quiz scores whole texts, which have no few-shot examples"):
        set_num_fewshot(quiz({"only": 4}, test_split="only", **rolling), 1)


def test_the_same_examples_every_time():
    first, second = (
        note_and_prompts(quiz({"test": 3, "train": 9}, test_split="test", training_split="train"), 2) for _ in range(2)
    )
    assert first == second


# Bits per byte of right answers, of choices, of continuations and of generated text.

METRIC = "answer_bits_per_byte"
GENERATES = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: {folder}/sums.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}} ="
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def bits_of(model: LmEvalAdapter, pairs: list[tuple[str, str]]) -> float:
    """pairs: context, answer with its delimiter."""
    scored = model.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    size = sum(len(answer.strip().encode()) for _, answer in pairs)
    return -sum(logprob for logprob, _ in scored) / math.log(2) / size


def test_of_choices(model):
    results = run_tasks(model, [cloze_task(QUESTIONS)], EvaluateConfig())
    arguments = [sample["arguments"] for sample in results.samples["cloze"]]
    expected = bits_of(model, [tuple(arguments[0][0]), tuple(arguments[1][1])])
    found = results.summary["results"]["cloze"]
    assert found[f"{METRIC},none"] == pytest.approx(expected)
    assert found[f"{METRIC}_stderr,none"] > 0
    assert results.summary["higher_is_better"]["cloze"][METRIC] is False


def test_of_generated_text(model, tmp_path):
    """The prompts are those that were generated from; an answer too long for the model is left out."""
    records = [{"question": "1 + 1", "answer": "two"}, {"question": "2 + 2", "answer": "four"},
               {"question": "all", "answer": "x" * 300}]  # fmt: skip
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "sums.yaml").write_text(GENERATES.replace("{folder}", str(tmp_path)))
    results = run_tasks(model, [str(tmp_path / "sums.yaml")], EvaluateConfig(), TaskSources(tmp_path))
    found = results.summary["results"]["sums"]
    assert found[f"{METRIC},none"] == pytest.approx(bits_of(model, [("1 + 1 =", " two"), ("2 + 2 =", " four")]))
    assert [METRIC in sample for sample in results.samples["sums"]] == [True, True, False]
    assert found["sample_len"] == 3 and found["exact_match,none"] == 0.0
