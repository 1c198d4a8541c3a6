"""A task with lm-eval's name makes the same requests as lm-eval's own task on the same records."""

import json
from pathlib import Path

import lm_eval.tasks
import pytest
from datasets import Dataset
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from gristmill.evaluation.tasks.task_index import TASK_FOLDER

THEIRS = Path(lm_eval.tasks.__file__).parent
PLACES = {
    "anli_r1": "anli/anli_r1.yaml",
    "anli_r2": "anli/anli_r2.yaml",
    "anli_r3": "anli/anli_r3.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "blimp_adjunct_island": "blimp/adjunct_island.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "copa": "super_glue/copa/default.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "race": "race/race.yaml",
    "wic": "super_glue/wic/default.yaml",
    "winogrande": "winogrande/default.yaml",
}
LETTERED = {"choices": {"text": ["grain", "flour"], "label": ["A", "B"]}, "answerKey": "B"}
# Two records of each task with the fields of the hub's copy, as lm-eval's YAML reads them.
RECORDS = {
    "anli_r1": [
        {"premise": "The mill stands.", "hypothesis": "It is old.", "label": 1},
        {"premise": "The mill fell.", "hypothesis": "It stands.", "label": 2},
    ],
    "arc_easy": [{"question": "What comes out of a mill?", **LETTERED}, {"question": "What is baked?", **LETTERED}],
    "blimp_adjunct_island": [
        {"sentence_good": "Who ran?", "sentence_bad": "Ran who?"},
        {"sentence_good": "She ground.", "sentence_bad": "She grinded."},
    ],
    "boolq": [
        {"passage": "A mill turns.", "question": "does a mill turn", "label": 1},
        {"passage": "A mill stands.", "question": "does a mill fly", "label": 0},
    ],
    "copa": [
        {"premise": "The wind blew.", "choice1": "The mill turned.", "choice2": "The mill fell.", "question": "effect",
         "label": 0},
        {"premise": "The mill burnt.", "choice1": "It rained.", "choice2": "A spark flew.", "question": "cause",
         "label": 1},
    ],
    "gsm8k": [
        {"question": "Two mills and two mills?", "answer": "2 + 2 = 4\n#### 4"},
        {"question": "Three sacks and one?", "answer": "3 + 1 = 4\n#### 4"},
    ],
    "hellaswag": [
        {"activity_label": "Milling", "ctx_a": "A man lifts a sack.", "ctx_b": "he", "label": "1",
         "endings": ["sings [title] loud", "pours it out", "sleeps", "flies"]},
        {"activity_label": "Baking", "ctx_a": "[header] How to bake", "ctx_b": "", "label": "0",
         "endings": ["Heat  the oven", "Cool it", "Leave", "Sit"]},
    ],
    "lambada_openai": [{"text": "The miller ground the grain"}, {"text": "She baked the\n\nbread"}],
    "openbookqa": [{"question_stem": "Flour is made of", **LETTERED}, {"question_stem": "Bread is", **LETTERED}],
    "piqa": [
        {"goal": "Grind grain", "sol1": "Use a mill", "sol2": "Use a hat", "label": 0},
        {"goal": "Bake bread", "sol1": "Use a pond", "sol2": "Use an oven", "label": 1},
    ],
    "race": [
        {"article": "Grain goes in.", "problems": repr([
            {"question": "What goes in?", "answer": "B", "options": ["Flour", "Grain", "Water", "Bread"]},
            {"question": "The mill is  _  .", "answer": "A", "options": ["old", "new", "far", "red"]},
            {"question": "What comes out?", "answer": "A", "options": ["Flour", "Grain", "Water", "Bread"]},
        ])},
        {"article": "It rains.", "problems": repr([
            {"question": "Does it?", "answer": "D", "options": ["no", "never", "once", "yes"]},
        ])},
    ],
    "wic": [
        {"sentence1": "An old mill.", "sentence2": "He works in a mill.", "start1": 7, "end1": 11, "label": 1},
        {"sentence1": "Mill the grain.", "sentence2": "The mill burnt.", "start1": 0, "end1": 4, "label": 0},
    ],
    "winogrande": [
        {"sentence": "The sack fell off the cart as the _ was full.", "option1": "sack", "option2": "cart",
         "answer": "2"},
        {"sentence": "The _ was loud.", "option1": "mill", "option2": "sack", "answer": "1"},
    ],
}  # fmt: skip
RECORDS |= {"arc_challenge": RECORDS["arc_easy"], "anli_r2": RECORDS["anli_r1"], "anli_r3": RECORDS["anli_r1"]}
FILES = {"hellaswag": "hellaswag_validation", "race": "race_high"} | {
    f"anli_r{n}": f"anli_r{n}_test" for n in (1, 2, 3)
}


def built(config: dict, records: list[dict], shots: int):
    """lm-eval's task over the records: every split it names has them."""
    splits = {config[name] for name in ("training_split", "validation_split", "test_split") if config.get(name)}
    config = {**config, "custom_dataset": lambda **stated: {name: Dataset.from_list(records) for name in splits}}
    config.pop("dataset_kwargs", None)
    config["num_fewshot"] = config.get("num_fewshot") if config.get("num_fewshot") == 0 else shots
    task = TaskManager(include_path=None, include_defaults=False).load([config])["tasks"][config["task"]]
    task.set_fewshot_seed(1234)
    return task


def requests(task) -> list[tuple]:
    task.build_all_requests(rank=0, world_size=1)
    return [(instance.request_type, instance.doc_id, instance.idx, *instance.args) for instance in task.instances]


def scoring(task) -> tuple:
    names = list(task._metric_fn_list)
    filters = [(each.name, [type(part()).__name__ for part in each.filters]) for each in task._filters]
    return (
        {name: (task._aggregation_list[name], task._higher_is_better[name]) for name in names},
        task._metric_fn_kwargs,
        filters,
        [task.doc_to_target(doc) for doc in task.eval_docs],
        task.multiple_input,
        task.config.generation_kwargs,
        task.config.repeats,
    )


@pytest.mark.parametrize("name", sorted(PLACES))
def test_our_prompt_is_lm_evals(name):
    records = RECORDS[name]
    ours = load_yaml(TASK_FOLDER / ("blimp/adjunct_island.yaml" if name.startswith("blimp") else f"{name}.yaml"))
    theirs = load_yaml(THEIRS / PLACES[name])
    assert ours["task"] == theirs["task"] == name
    assert [part for part in ("test_split", "validation_split") if ours.get(part)][:1] == [
        part for part in ("test_split", "validation_split") if theirs.get(part)
    ][:1]
    for shots in (0, 1):
        mine, other = (built(dict(config), records, shots) for config in (ours, theirs))
        assert requests(mine) == requests(other)
        assert scoring(mine) == scoring(other)


def test_every_task_has_lm_evals_prompt_or_our_name():
    names = {load_yaml(path).get("task") for path in TASK_FOLDER.glob("*.yaml")} - {None}
    assert {name for name in names if not name.startswith("gristmill_")} == {
        name for name in PLACES if not name.startswith("blimp")
    }
    for path in (TASK_FOLDER / "blimp").glob("*.yaml"):
        if path.stem not in ("blimp", "defaults"):
            theirs = load_yaml(THEIRS / "blimp" / path.name, resolve_func=False)
            mine = load_yaml(path, resolve_func=False)
            for key in ("task", "output_type", "doc_to_text", "doc_to_choice", "doc_to_target", "num_fewshot"):
                assert mine[key] == theirs[key], (path.name, key)
            assert mine["metric_list"] == theirs["metric_list"] and "target_delimiter" not in mine | theirs
    group, theirs = load_yaml(TASK_FOLDER / "blimp/blimp.yaml"), load_yaml(THEIRS / "blimp/_blimp.yaml")
    assert (group["group"], group["task"]) == (theirs["group"], theirs["task"])
    assert group["aggregate_metric_list"] == theirs["aggregate_metric_list"]


@pytest.mark.parametrize("name", sorted({"hellaswag", "race", "anli_r1"}))
def test_a_file_with_the_hubs_fields_gives_the_records_as_they_are(name, tmp_path):
    path = tmp_path / "benchmarks" / f"{FILES[name]}.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[name]))
    task = TaskManager(include_path=str(TASK_FOLDER), include_defaults=False, metadata={"data": str(tmp_path)}).load(
        [name]
    )["tasks"][name]
    assert requests(task) == requests(built(load_yaml(THEIRS / PLACES[name]), RECORDS[name], 0))


# What llm-foundry's files say of a record of the hub, and the record that must come of it.
FOUNDRY = {
    "arc_easy": {"query": "Question: What comes out of a mill?", "choices": ["grain", "flour"], "gold": 1},
    "openbookqa": {"query": "Flour is made of", "choices": ["grain", "flour"], "gold": 1},
    "boolq": {"query": "Passage: A mill turns.\nQuestion: does a mill turn?", "choices": ["no", "yes"], "gold": 1},
    "copa": {"query": "The wind blew, therefore", "choices": ["the mill turned.", "the mill fell."], "gold": 0},
    "piqa": {"query": "Question: Grind grain\n", "choices": ["Use a mill", "Use a hat"], "gold": 0},
    "winogrande": {
        "context_options": ["The sack fell off the cart as the sack", "The sack fell off the cart as the cart"],
        "continuation": "was full.",
        "gold": 1,
    },
    "lambada_openai": {"context": "The miller ground the", "continuation": "grain"},
    "wic": {**RECORDS["wic"][0], "label": "true"},
}


@pytest.mark.parametrize("name", sorted(FOUNDRY))
def test_the_forms_of_our_files_give_the_hubs_prompts(name, tmp_path):
    config = load_yaml(TASK_FOLDER / f"{name}.yaml")
    kwargs = {key: value for key, value in config["dataset_kwargs"].items() if key != "sha256"}
    path = tmp_path / kwargs["file"]
    path.parent.mkdir()
    path.write_text(json.dumps(FOUNDRY[name]) + "\n")
    records = list(config["custom_dataset"](**kwargs, data=str(tmp_path))[kwargs.get("split", "test")])
    theirs = load_yaml(THEIRS / PLACES[name])
    assert requests(built(dict(theirs), records, 0)) == requests(built(dict(theirs), RECORDS[name][:1], 0))
