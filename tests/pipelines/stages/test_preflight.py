"""All errors that can be known before work starts are reported at once, also by `run` before it writes."""

import json

import pytest
from bad_input import NOTES, small

from gristmill.foundation.errors import InputError
from gristmill.pipelines.stages import preflight
from gristmill.tokenizers.pretrained import is_hub_name


@pytest.fixture
def write(tmp_path):
    """Writes small.yaml with changed fields, and the text it reads."""

    def write_recipe(*changes):
        (tmp_path / "raw").mkdir(exist_ok=True)
        (tmp_path / "raw/notes.txt").write_text(NOTES)
        (tmp_path / "small.yaml").write_text(small(*changes))

    return write_recipe


def test_a_recipe_with_nothing_wrong(call, write, tmp_path):
    write("train.layout: {data: 2}")
    code, said = call("check", "small.yaml")
    assert code == 0
    assert "no errors found; checked curate, tokenizer, index, train, evaluate, report" in said
    assert "train needs 2 processes" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "small.yaml"]


def test_all_problems_are_listed_at_once(call, write):
    write(
        "sources.0.paths: [nowhere/*.txt]",
        "tokenizer: {pretrained: nowhere/tokenizer.json}",
        "train.layout: {hardware: h10}",
        "train.batch_tokens: 100",
        "curate.splits: {validation: 0.1, test: 0}",
    )
    code, said = call("run", "small.yaml")
    assert code == 2
    for words in (
        "source notes: nowhere/*.txt: no file matches",
        "nowhere/tokenizer.json: no such file",
        "did you mean h100?",
        "bits_per_byte, cloze need held-out documents, but curate.splits.test is 0",
    ):
        assert words in said


def test_a_teacher_is_checked_before_any_work(call, write, tmp_path):
    write("train.teacher: {checkpoint: taught}", "train.objective: distillation")
    assert "train.teacher: taught is not a checkpoint (no manifest.json)" in call("run", "small.yaml")[1]
    (tmp_path / "taught").mkdir()
    (tmp_path / "taught/manifest.json").write_text("{}")
    (tmp_path / "taught/model.json").write_text('{"vocab_size": 7}')
    code, said = call("run", "small.yaml")
    assert code == 2 and "train.teacher: its vocabulary has 7 tokens, the recipe asks for" in said
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("arguments", [("run",), ("train",)])
def test_the_layout_against_the_processes(call, write, tmp_path, arguments):
    write("train.layout: {data: 4}")
    code, said = call(*arguments, "small.yaml")
    assert code == 2
    assert "= 4 processes, but 1 run; start 4 (torchrun --nproc-per-node 4)" in said
    assert not (tmp_path / "work").exists()


def test_stages_that_do_not_run_are_not_looked_at(call, write):
    write("train.layout: {data: 4}")
    assert call("curate", "small.yaml")[0] == 0


def test_a_stage_that_is_complete_is_not_looked_at_again(call, write, tmp_path):
    write()
    assert call("curate", "small.yaml")[0] == 0
    write("train.layout: {data: 4}", "sources.0.paths: [raw/n*.txt]")
    assert preflight.is_complete(preflight_stage("curate"), loaded(tmp_path), tmp_path / "work/small")
    write("curate.near_dedup: {}")
    assert not preflight.is_complete(preflight_stage("curate"), loaded(tmp_path), tmp_path / "work/small")


def loaded(tmp_path):
    from gristmill.pipelines.recipes.recipe_file import load_recipe

    return load_recipe(str(tmp_path / "small.yaml"))


def preflight_stage(name):
    from gristmill.pipelines.stages.stage_list import STAGES

    return next(stage for stage in STAGES if stage.name == name)


def test_a_small_source_that_is_seen_often_is_a_warning_with_numbers(call, write, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/few.jsonl").write_text(json.dumps({"text": "w" * 3987}) + "\n")
    tokens = (tmp_path / "raw/few.jsonl").stat().st_size // 4
    write("sources.0.weight: 0.5", "train.tokens: 16384")
    text = (tmp_path / "small.yaml").read_text()
    assert "curate:" in text
    few = "- {name: few, format: jsonl, paths: [raw/few.jsonl], weight: 0.5}\n"
    (tmp_path / "small.yaml").write_text(text.replace("curate:", f"{few}curate:", 1))
    code, said = call("check", "small.yaml")
    assert code == 0
    assert f"source 'few' has {tokens:,} tokens and is seen {8192 / tokens:.1f} times" in said
    assert "estimated from the raw files at 4 bytes per token" in said
    assert "source 'notes'" not in said


@pytest.mark.parametrize(("moe", "warned"), [("top_k: 1", True), ("top_k: 1, normalize_gates: false", False)])
def test_a_router_that_the_loss_does_not_teach_is_a_warning(call, write, moe, warned):
    write(f"model.moe: {{experts: 4, {moe}}}")
    code, said = call("check", "small.yaml")
    assert code == 0
    assert ("the loss teaches the router nothing" in said) == warned


def test_a_read_only_disk_is_refused_before_work(call, write, tmp_path, monkeypatch):
    write()
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    code, said = call("run", "small.yaml")
    assert code == 1
    assert "is not writable (read-only disk or permissions)" in said


def test_names_of_the_hub_and_paths():
    assert [is_hub_name(name) for name in ("gpt2", "org/name", "org/name.v2")] == [True] * 3
    assert [is_hub_name(name) for name in ("a/b/c", "./x", "~/x", "/x/y", "x.json", "a/x.model", "")] == [False] * 7


def test_one_request_to_an_unreachable_hub(monkeypatch):
    """huggingface_hub would try again for half a minute."""
    from huggingface_hub import constants

    from gristmill.tokenizers import pretrained

    asked = []

    def refuse(address, timeout):
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(pretrained.urllib.request, "urlopen", refuse)
    with pytest.raises(InputError, match="the hub has none"):
        pretrained.require_pretrained("no-such-organization/no-such-tokenizer")
    assert len(asked) == 1
