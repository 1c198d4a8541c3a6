"""Every local task on small records, suites, and the errors of unknown and absent tasks."""

import json

import pytest
import yaml

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.results.table import score_rows
from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter
from gristmill.evaluation.tasks.harness import run_tasks
from gristmill.evaluation.tasks.suites import SUITES
from gristmill.evaluation.tasks.task_index import TASK_FOLDER, TaskSources
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter


@pytest.fixture
def model(small_causal_lm, byte_tokenizer) -> LmEvalAdapter:
    return LmEvalAdapter(small_causal_lm(sequence_length=256), byte_tokenizer, 2000, Reporter.silent())


@pytest.fixture
def data(tmp_path):
    """Hand-made files in the published forms of the sets that are not pinned."""
    files = {
        "anli_r1_test.jsonl": [
            {"context": "The mill stands.", "hypothesis": "The mill is old.", "label": "n"},
            {"context": "The mill stands.", "hypothesis": "The mill fell.", "label": "c"},
        ],
        "hans_evaluation.jsonl": [
            {"sentence1": "The miller saw the baker.", "sentence2": "The miller saw.", "gold_label": "entailment"},
            {"sentence1": "The baker by the mill ran.", "sentence2": "The mill ran.", "gold_label": "non-entailment"},
        ],
        "race_high.jsonl": [
            {
                "article": "Grain goes in.",
                "questions": ["What goes in?"],
                "options": [["Flour", "Grain", "Water", "Bread"]],
                "answers": ["B"],
                "id": "high1.txt",
            }
        ],
    }
    (tmp_path / "benchmarks").mkdir()
    for name, records in files.items():
        (tmp_path / "benchmarks" / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_the_sets_that_are_not_pinned_take_their_published_forms(model, data):
    names = ["anli_r1", "gristmill_hans", "race"]
    results = run_tasks(model, names, EvaluateConfig(), TaskSources(data))
    asked = {
        name: [(sample["arguments"][0][0], sample["target"]) for sample in results.samples[name]] for name in names
    }
    prompt = "The mill stands.\nQuestion: The mill fell. True, False, or Neither?\nAnswer:"
    assert asked["anli_r1"][1] == (prompt, "False")
    assert [target for _, target in asked["anli_r1"]] == ["Neither", "False"]
    assert [target for _, target in asked["gristmill_hans"]] == [0, 1]
    assert asked["race"] == [("Article: Grain goes in.\n\nWhat goes in?", 1)]
    rows = score_rows(results.summary, results.samples, {})
    chances = {row.task: row.chance for row in rows if row.metric == "acc"}
    assert chances == {names[0]: pytest.approx(1 / 3), names[1]: 0.5, names[2]: 0.25}


def test_a_suite_says_what_it_leaves_out_and_a_named_task_is_not_left_out(model, data):
    results = run_tasks(model, ["mtnlg"], EvaluateConfig(), TaskSources(data))
    assert sorted(results.samples) == ["anli_r1", "gristmill_hans", "race"]
    said = [note for note in results.notes if "was skipped" in note]
    assert len(said) == len(SUITES["mtnlg"]) - 3
    assert said[0] == ("lambada_openai of the suite mtnlg was skipped: benchmarks/lambada_openai.jsonl is absent")
    with pytest.raises(InputError, match=r"piqa\.jsonl: absent"):
        run_tasks(model, ["piqa"], EvaluateConfig(), TaskSources(data))
    with pytest.raises(RecipeError, match="nothing to evaluate: lambada_openai of the suite small"):
        run_tasks(model, ["small"], EvaluateConfig(), TaskSources(data))


def test_every_task_says_where_it_is_from_and_what_guessing_gives():
    class Loader(yaml.SafeLoader):
        """Reads `!function name` as the name."""

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    for path in sorted(TASK_FOLDER.glob("*.yaml")):
        config = yaml.load(path.read_text("utf-8"), Loader)
        if "task" in config:
            stated = config["metadata"]
            assert stated["source"] and 0 <= stated["chance"] < 1, path.name


def test_pinned_files_are_the_ones_we_have(model, shared_data):
    """Two documents of each task; chance as the YAML states it."""
    root = shared_data("benchmarks/copa.jsonl.zst").parents[1]
    results = run_tasks(model, ["copa", "gristmill_hellaswag", "wic"], EvaluateConfig(limit=2), TaskSources(root))
    for row in score_rows(results.summary, results.samples, {}):
        chance = results.summary["configs"][row.task]["metadata"]["chance"]
        assert row.chance == (None if row.metric == "answer_bits_per_byte" else chance)
