"""Users' task files: by path, from a folder, and the errors of files that would run code."""

import json
from pathlib import Path

import lm_eval.utils
import pytest

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter
from gristmill.evaluation.tasks.harness import run_tasks
from gristmill.evaluation.tasks.task_index import TaskSources, known_tasks, read_task_file, sandboxed, task_files_below
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter

RIVERS = """
include: multiple_choice_defaults.yaml
task: rivers
dataset_kwargs: {file: benchmarks/rivers.jsonl, fields: [query, choices, gold]}
doc_to_text: "{{query}}\\nAnswer:"
"""
PLAIN = """
task: lakes
tag: waters
dataset_path: json
dataset_kwargs: {data_files: {test: DATA/benchmarks/rivers.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{query}}?"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def model(small_causal_lm, byte_tokenizer) -> LmEvalAdapter:
    return LmEvalAdapter(small_causal_lm(sequence_length=128), byte_tokenizer, 2000, Reporter.silent())


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "benchmarks" / "rivers.jsonl"
    path.parent.mkdir()
    records = [{"query": f"River {number} is", "choices": ["long", "short"], "gold": number % 2} for number in range(4)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def written(folder: Path, text: str, name: str = "task.yaml") -> str:
    path = folder / "mine" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("DATA", str(folder)))
    return str(path)


def test_a_task_is_named_by_the_path_of_its_file(model, data):
    for text, name, prompt in ((RIVERS, "rivers", "River 0 is\nAnswer:"), (PLAIN, "lakes", "River 0 is?")):
        results = run_tasks(model, [written(data, text)], EvaluateConfig(), TaskSources(data))
        assert results.summary["results"][name]["sample_len"] == 4
        assert results.samples[name][0]["arguments"][0] == (prompt, " long")


def test_a_folder_of_tasks_is_known_by_names_groups_and_tags(model, data):
    written(data, RIVERS, "deep/rivers.yaml")
    written(data, PLAIN, "lakes.yml")
    written(data, "group: both\ntask: [rivers, lakes]\naggregate_metric_list: [{metric: acc}]\n", "both.yaml")
    written(data, RIVERS.replace("task: rivers", "task: piqa"), "piqa.yaml")
    sources = TaskSources(data, include_path=data / "mine")
    for asked, found in ((["rivers"], ["rivers"]), (["both"], ["lakes", "rivers"]), (["waters"], ["lakes"])):
        assert sorted(run_tasks(model, asked, EvaluateConfig(limit=1), sources).samples) == found
    results = run_tasks(model, ["piqa"], EvaluateConfig(limit=1), sources)
    assert "piqa is the user's task of that name, not that of gristmill or lm-eval" in results.notes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("doc_to_text: !function utils.doc_to_text", "!function can run code"),
        ("process_docs: !function os.system", "!function can run code"),
        ("class: !function evil.Task", "!function can run code"),
        ("class: evil.Task", "class can run code"),
        ("unsafe_code: true", "unsafe_code can run code"),
        ("use_prompt: promptsource:all", "use_prompt can run code"),
        ("metric_list: [{metric: ./evil.py}]", "metric_list.0: './evil.py' is no metric of lm-eval's own; there are"),
        ("metric_list: [{metric: acc, hf_evaluate: true}]", "metric_list.0: 'acc' is no metric"),
        ("dataset_path: pandas", "dataset_path: 'pandas' is not read; name one of csv, json, parquet, text"),
        ("dataset_path: ./mine", "dataset_path: './mine' is not read"),
        ("include: other.yaml", "other.yaml: no such task file"),
        ("include: task.yaml", "includes itself"),
        ("doc_to_choice: !!python/object/apply:os.system [ls]", "tag"),
    ],
)
def test_what_could_run_code_or_is_not_there_is_refused(data, change, said):
    key = change.split(":")[0]
    lines = [line for line in PLAIN.splitlines() if not line.startswith(f"{key}:")]
    path = written(data, "\n".join([*lines, change]))
    (data / "mine" / "utils.py").write_text("raise SystemExit('it was run')\n")
    with pytest.raises((InputError, RecipeError)) as error:
        read_task_file(Path(path))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_loader_beside_the_file_is_not_ours(data):
    """lm-eval looks for a module beside the YAML first; ours is named by our own files alone."""
    name = "gristmill/evaluation/tasks/loaders.py"
    written(data, "raise SystemExit('it was run')\n", name)
    assert read_task_file(Path(written(data, RIVERS)))["custom_dataset"].__module__ == name[:-3].replace("/", ".")


def test_templates_run_in_a_sandbox(model, data):
    evil = PLAIN.replace('"{{query}}?"', "\"{{ ''.__class__.__mro__[1].__subclasses__() }}\"")
    with pytest.raises(InputError, match=r"lm-eval cannot load it as a task .*SecurityError"):
        run_tasks(model, [written(data, evil)], EvaluateConfig(), TaskSources(data))
    before = lm_eval.utils.env
    with sandboxed():
        assert lm_eval.utils.apply_template("{{a | regex_replace('b', 'c')}}\n", {"a": "abc"}) == "acc\n"
    assert lm_eval.utils.env is before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "holds no fields"),
        ("doc_to_text: q", "names no `task`"),
        ("task: 7", "names no `task`"),
        ("task: [", "task.yaml"),
        ("", "holds no fields"),
    ],
)
def test_what_is_no_task_is_named(data, text, said):
    with pytest.raises((InputError, RecipeError)) as error:
        read_task_file(Path(written(data, text)))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_the_error_of_a_bad_file_in_a_folder_comes_with_its_task(data):
    written(data, RIVERS)
    written(data, PLAIN + "process_docs: !function utils.f\n", "lakes.yaml")
    found, wrong = task_files_below(data / "mine")
    assert list(found) == ["rivers"] and len(wrong) == 1
    known_tasks(["rivers"], TaskSources(data, include_path=data / "mine")).require(False)
    with pytest.raises(RecipeError, match=r"no task 'lakes'; .*lakes\.yaml: !function can run code"):
        known_tasks(["lakes"], TaskSources(data, include_path=data / "mine")).require(False)
    with pytest.raises(InputError, match="no such folder; name one that holds task files"):
        known_tasks(["rivers"], TaskSources(data, include_path=data / "nowhere"))


@pytest.mark.parametrize(
    "change",
    [
        "output_type: guess",
        "test_split: nowhere",
        'doc_to_text: "{{question}}"',
        "filter_list: [{name: a, filter: [{function: b}]}]",
        "fewshot_config: {sampler: fair}",
        'doc_to_choice: "{{query}}"',
        "metric_list: [{metric: acc, aggregation: 3}]",
        "dataset_kwargs: 3",
    ],
)
def test_a_task_that_lm_eval_cannot_make_is_one_sentence(model, data, change):
    key = change.split(":")[0]
    lines = [line for line in PLAIN.splitlines() if not line.startswith(f"{key}:")]
    with pytest.raises((InputError, RecipeError)) as error:
        run_tasks(model, [written(data, "\n".join([*lines, change]))], EvaluateConfig(), TaskSources(data))
    assert "\n" not in str(error.value)


def test_a_record_that_the_template_does_not_fit_is_one_sentence(model, data):
    path = data / "benchmarks" / "rivers.jsonl"
    path.write_text(path.read_text().replace('"choices": ["long", "short"], "gold": 1', '"choices": [], "gold": 1'))
    with pytest.raises(InputError, match="a task file uses fields that its records do not have"):
        run_tasks(model, [written(data, PLAIN)], EvaluateConfig(), TaskSources(data))
