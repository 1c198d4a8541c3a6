"""Models beside each other in a work folder: two recipes trained in turn, listed, and one of them removed."""

import json
from pathlib import Path

import pytest

from gristmill.foundation.errors import InputError
from gristmill.pipelines.cli.runs import alias_of, name_run, remove_runs, run_of, trained_runs
from gristmill.pipelines.python_api import run as run_recipe


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    """Trained at a rate of .001, then at .002; the start of a third run."""
    folder = tmp_path_factory.mktemp("runs")
    texts = [f"The miller fills sack number {number} with flour of the last harvest." for number in range(200)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": " ".join(texts[k : k + 9])}) for k in range(190)))
    recipe = {
        "name": "runs",
        "sources": [{"name": "s", "format": "jsonl", "paths": [str(folder / "a.jsonl")]}],
        "curate": {"filters": [], "near_dedup": None, "splits": {"validation": 0.05, "test": 0.05}},
        "tokenizer": {"vocab_size": 300},
        "model": {"layers": 1, "width": 16, "heads": 2, "sequence_length": 32},
        "train": {"tokens": 2048, "batch_tokens": 512, "precision": "fp32", "monitoring": {"trackers": []}},
        "evaluate": {"tasks": ["bits_per_byte"], "num_continuations": 0},
    }
    for rate in (1e-3, 2e-3):
        recipe["train"]["optimizer"] = {"learning_rate": rate}
        run_recipe(recipe, folder / "work", "evaluate")
    unfinished = folder / "work" / ".train-0123456789abcdef"
    unfinished.mkdir()
    (unfinished / "metrics.jsonl").write_text('{"step": 1, "tokens": 512, "loss": 5.5}\n{"step": 2, "tok')
    return folder / "work"


def test_each_run_with_what_differs_and_what_it_reached(workdir):
    current, aside, unfinished = trained_runs(workdir)
    assert (current.state, aside.state, unfinished.state) == ("current", "set aside", "not finished")
    assert current.differences == ()
    assert aside.differences == ("train.optimizer.learning_rate: 0.002 -> 0.001",)
    assert current.tokens == aside.tokens == 2048 and current.loss != aside.loss
    assert (unfinished.tokens, unfinished.loss) == (512, 5.5)
    for run in (current, aside):
        assert run.scores["bits_per_byte_s"] > 0
        assert run.num_bytes > 10_000
    assert current.scores != aside.scores


def test_the_command_lists_them(workdir, call):
    code, said = call("runs", "--workdir", workdir)
    assert code == 0 and "set aside" in said and "not finished" in said
    code, said = call("runs")
    assert code == 1 and "work/*: no trained models" in said


def test_a_run_has_a_readable_alias_and_takes_another(workdir, call):
    current, aside, unfinished = trained_runs(workdir)
    assert (current.alias, aside.alias, unfinished.alias) == ("", "learning_rate=0.001", "")
    code, said = call("runs", "name", "learning_rate=0.001", "slow", "--workdir", workdir)
    assert code == 0 and "is slow" in said
    assert [run.alias for run in trained_runs(workdir)] == ["", "slow", ""]
    assert run_of(workdir, "slow").name == aside.name
    code, said = call("runs", "name", current.name, "slow", "--workdir", workdir)
    assert code == 1 and f"'slow' already names {aside.name}" in said
    with pytest.raises(InputError, match="alias '-x y': write up to 64 letters"):
        name_run(workdir, "slow", "-x y")


@pytest.mark.parametrize(("content", "said"), [("[1]", "not a mapping of runs to aliases"), ("{", "not JSON")])
def test_a_damaged_file_of_aliases_is_said(tmp_path, content, said):
    (tmp_path / "run_aliases.json").write_text(content)
    with pytest.raises(InputError, match=f"run_aliases.json: {said}.*; remove it, and give the aliases again"):
        trained_runs(tmp_path)


def test_aliases_say_what_differs():
    assert alias_of(["train.optimizer.learning_rate: 0.002 -> 0.001"]) == "learning_rate=0.001"
    assert alias_of(['model.pattern: null -> "a b"', "model.width: 16 -> 32", "train.tokens: 1 -> 2"]) == (
        "pattern=a-b,width=32,…"
    )
    assert alias_of([]) == ""


def test_only_what_is_named_is_removed_and_never_the_current_model(workdir, call):
    current, aside, unfinished = trained_runs(workdir)
    with pytest.raises(InputError, match=f"{current.name} is the current model"):
        remove_runs(workdir, [unfinished.name, current.name])
    assert len(trained_runs(workdir)) == 3
    with pytest.raises(InputError, match=f"no run 'else'; its runs are {current.name}, {aside.name}"):
        remove_runs(workdir, ["else"])
    code, said = call("runs", "remove", aside.name, unfinished.name, "--workdir", workdir)
    assert code == 0 and f"removed {aside.name}" in said
    assert [run.name for run in trained_runs(workdir)] == [current.name]
    assert not any(folder.exists() for folder in aside.folders)
    assert all(folder.is_dir() for folder in current.folders)
