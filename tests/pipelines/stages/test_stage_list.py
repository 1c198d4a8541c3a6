"""Recipes that end early: the sections model and train are needed by the stages that read them, and by no other."""

import json

import pytest

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages import curate, index, tokenizer
from gristmill.pipelines.stages.stage_list import STAGES, runnable_stages, stages_up_to

CURATION = {
    "name": "curation",
    "sources": [{"name": "notes", "format": "text", "paths": ["raw/*.txt"]}],
    "curate": {"filters": [], "near_dedup": None},
}
MODEL = {"layers": 1, "width": 8, "heads": 2, "sequence_length": 8}
TRAIN = {"tokens": 64, "batch_tokens": 16}


def recipe(**sections):
    return Recipe.model_validate(CURATION | sections)


def names(stages):
    return [stage.name for stage in stages]


def test_a_recipe_for_curation_ends_with_curate_and_says_why():
    stages, said = runnable_stages(recipe(), STAGES)
    assert names(stages) == ["curate", "report"] and stages[-1].inputs == ("curate",)
    assert "the sections `model` and `train` are missing" in said
    assert said.endswith("not run: tokenizer, index, train, evaluate")


def test_a_section_that_is_written_is_run():
    stages, _ = runnable_stages(recipe(tokenizer={"vocab_size": 400}), STAGES)
    assert names(stages) == ["curate", "tokenizer", "report"]


def test_a_full_recipe_runs_everything():
    assert runnable_stages(recipe(model=MODEL, train=TRAIN), STAGES) == (STAGES, "")


@pytest.mark.parametrize(("sections", "missing"), [({"model": MODEL}, "train"), ({"train": TRAIN}, "model")])
def test_one_of_the_two_sections_alone_is_a_mistake(sections, missing):
    with pytest.raises(RecipeError, match=f"the section `{missing}` is missing.*the stage train reads.*--to index"):
        runnable_stages(recipe(**sections), STAGES)


def test_a_stage_that_reads_a_missing_section_is_refused():
    with pytest.raises(RecipeError, match="the sections `model` and `train` are missing, which the stage train reads"):
        stages_up_to(recipe(), STAGES, "evaluate")
    assert names(stages_up_to(recipe(), STAGES, "index")) == ["curate", "tokenizer", "index"]


def test_what_decides_the_first_stages_does_not_change_with_the_sections_after_them():
    short, full = recipe(), recipe(model=MODEL, train=TRAIN)
    for stage in (curate, tokenizer, index):
        assert stage.config(short) == stage.config(full)


@pytest.fixture
def curation(tmp_path):
    (tmp_path / "raw").mkdir()
    for number in range(30):
        (tmp_path / f"raw/{number}.txt").write_text(f"note {number}: the miller grinds sack {number * 7} of {number}")
    path = tmp_path / "curation.yaml"
    path.write_text(json.dumps(CURATION))
    return path


def test_curate_plan_and_run_work_with_name_sources_and_curate_alone(call, curation):
    code, said = call("plan", curation)
    assert code == 0
    assert "curate" in said and "the sections `model` and `train` are missing" in said
    for arguments in (("curate", curation), ("run", curation, "--to", "curate"), ("run", curation)):
        assert call(*arguments)[0] == 0
    assert (curation.parent / "work/curation/curate/manifest.json").is_file()
    assert not (curation.parent / "work/curation/tokenizer").exists()


def test_the_report_is_on_the_stages_that_ran(call, curation):
    """None: an error that says what to run. Curation alone: its half, which can be rebuilt from its manifest."""
    code, said = call("report", curation)
    assert code == 1 and "no stage is complete; `gristmill run" in said
    assert call("curate", curation)[0] == 0
    code, said = call("report", curation)
    assert code == 0 and "report.html" in said
    work = curation.parent / "work/curation"
    page = (work / "report/report.md").read_text()
    headings = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    assert headings[0] == "Documents read, kept and removed" and headings[-1] == "Provenance"
    assert "Training" not in headings and "Scores" not in headings
    assert "30 documents read, 30 kept (100.0 %)" in page
    code, said = call("reproduce", work / "report", "--workdir", curation.parent / "again")
    assert code == 0 and "identical" in said
    assert call("verify", work)[0] == 0


def test_plan_writes_nothing(call, curation):
    assert call("plan", curation)[0] == 0
    assert sorted(path.name for path in curation.parent.iterdir()) == ["curation.yaml", "raw"]


@pytest.mark.parametrize("arguments", [("train",), ("evaluate",), ("run", "--to", "train"), ("layout", "--gpus", "2")])
def test_commands_that_need_a_section_name_it(call, curation, arguments):
    command, *options = arguments
    code, said = call(command, curation, *options)
    assert code == 2
    assert "the sections `model` and `train` are missing" in said
    assert not (curation.parent / "work").exists()


def test_null_is_a_missing_section(tmp_path):
    path = tmp_path / "null.yaml"
    path.write_text(json.dumps(CURATION | {"model": None, "train": None}))
    assert load_recipe(str(path)).missing_sections(("model", "train")) == ["model", "train"]
