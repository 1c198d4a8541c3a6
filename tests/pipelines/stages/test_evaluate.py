"""Which changes rerun the stage `evaluate` and the evaluations during training."""

import json
from pathlib import Path

import pytest

from gristmill.foundation.errors import InputError
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.evaluate import config
from gristmill.pipelines.stages.train import config as train_config

TASK = """
include: base.yaml
task: rivers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
"""
BASE = "output_type: multiple_choice\ntest_split: test\n"


def write_task(folder: Path, question: str = "Is it long?", base: str = BASE, comment: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rivers.jsonl").write_text(json.dumps({"question": question}) + "\n")
    (folder / "base.yaml").write_text(base)
    path = folder / "rivers.yaml"
    path.write_text(comment + TASK.replace("DATA", str(folder / "rivers.jsonl")))
    return path


def decided(path: Path) -> tuple[str, str]:
    """What the stages `evaluate` and `train` make their fingerprints from, where both name the task file."""
    tasks = f"[cloze, {path}]"
    recipe = load_recipe(
        "demo", [f"evaluate.tasks={tasks}", f"train.evaluation.tasks={tasks}", "train.evaluation.every=10"]
    )
    return json.dumps(config(recipe), sort_keys=True), json.dumps(train_config(recipe), sort_keys=True)


def test_a_task_file_enters_by_content(tmp_path: Path) -> None:
    first = decided(write_task(tmp_path / "mine"))
    assert decided(write_task(tmp_path / "mine", comment="# the same task\n")) == first
    assert decided(write_task(tmp_path / "elsewhere")) == first
    for changed in ({"question": "Is it short?"}, {"base": BASE.replace("multiple_choice", "generate_until")}):
        for before, after in zip(first, decided(write_task(tmp_path / "mine", **changed)), strict=True):
            assert before != after
    assert decided(write_task(tmp_path / "mine")) == first


def test_an_absent_task_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.yaml: no such task file"):
        decided(tmp_path / "absent.yaml")
