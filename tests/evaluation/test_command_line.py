"""The commands on checkpoints as a user calls them: output files, messages and errors."""

import json
import sys

import pytest
import torch

from gristmill.pipelines.cli.main import main
from gristmill.training.checkpoint.checkpoint import load_model

TASK = ("--tasks", "gristmill_hans")


@pytest.fixture
def call(monkeypatch, capfd, tmp_path):
    """Runs the command line in this process: (exit code, what it said). A traceback would be an exception here."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gristmill", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


def test_evaluate_compare_export_and_import(tmp_path, call, hans, random_checkpoint, tokenizer_folder):
    first, second = random_checkpoint(), random_checkpoint("gpt2", name="other")
    for checkpoint, name in ((first, "a"), (second, "b")):
        code, said = call("evaluate", "--checkpoint", checkpoint, *TASK, "--data", hans, "--output", tmp_path / name)
        assert code == 0 and "| gristmill_hans |" in said and "like chance" in said
    code, said = call("compare", tmp_path / "a", tmp_path / "b")
    assert code == 0 and "gristmill_hans" in said and "95 %" in said
    code, said = call("export", "--checkpoint", first, "--output", tmp_path / "out")
    assert code == 0 and "LlamaForCausalLM" in said
    code, said = call("import", tmp_path / "out", "--output", tmp_path / "in")
    assert code == 0
    again, _ = load_model(tmp_path / "in" / "checkpoints" / "step-00000000")
    tokens = torch.arange(20).unsqueeze(0)
    assert torch.equal(load_model(first)[0](tokens), again(tokens))
    code, said = call("export", "--checkpoint", first, "--output", tmp_path / "out")
    assert code == 1 and "not empty; name a new folder" in said


def test_generate_streams_what_it_draws(call, random_checkpoint, tokenizer_folder, monkeypatch):
    """Greedy twice the same; pieces arrive before the end; a stop string ends the text before it."""
    checkpoint = random_checkpoint()
    pieces = []
    monkeypatch.setattr(sys.stdout, "flush", lambda: pieces.append(1), raising=False)
    said = [call("generate", "--checkpoint", checkpoint, "--prompt", "The mill", "--tokens", 30)[1] for _ in range(2)]
    assert said[0] == said[1] and said[0].startswith("The mill") and len(said[0]) > len("The mill\n")
    assert len(pieces) > 2
    stop = said[0].strip()[-3:]
    code, stopped = call("generate", "--checkpoint", checkpoint, "--prompt", "The mill", "--tokens", 30, "--stop", stop)
    assert code == 0 and stop not in stopped[len("The mill") :] and said[0].startswith(stopped.rstrip("\n"))


def test_generate_from_a_file(call, tmp_path, random_checkpoint, tokenizer_folder):
    checkpoint, prompts, output = random_checkpoint(), tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "The mill"}\n{"prompt": 3}\n')
    options = ("--prompts", prompts, "--output", output, "--tokens", 9)
    code, said = call("generate", "--checkpoint", checkpoint, *options)
    assert code == 1 and "prompts.jsonl: 1 records have errors" in said
    first, second = map(json.loads, output.read_text().splitlines())
    expected = call("generate", "--checkpoint", checkpoint, "--prompt", "The mill", "--tokens", 9)[1]
    assert "The mill" + first["completions"][0]["text"] == expected.removesuffix("\n")
    assert "line 2: prompt: Input should be a valid string" in second["error"]


def test_errors_of_generate(call, random_checkpoint, tokenizer_folder):
    checkpoint = random_checkpoint()
    assert call("generate", "--checkpoint", checkpoint, "--prompt", "")[0] == 2
    code, said = call("generate", "--checkpoint", checkpoint, "--prompt", "y" * 200)
    assert code == 1 and "has 201 tokens, the model takes 127; shorten it" in said
    code, said = call("generate", "--checkpoint", checkpoint, "--prompt", "y", "--top-p", "0")
    assert code == 2 and "top_p" in said


def test_a_tokenizer_of_another_vocabulary(call, hans, random_checkpoint, tokenizer_folder):
    code, said = call("evaluate", "--checkpoint", random_checkpoint(vocab_size=300), *TASK, "--data", hans)
    assert code == 1 and "has 257 tokens and the checkpoint was trained on 300" in said


def test_a_question_longer_than_the_model_is_not_evaluated_and_counted(
    tmp_path, call, hans, random_checkpoint, tokenizer_folder
):
    """Four of the nine premises are a word longer: 97 bytes of prompt and answer, and 101."""
    path = hans / "benchmarks" / "hans_evaluation.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records[:4]:
        record["sentence1"] += " Far and wide."
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    common = ("evaluate", *TASK, "--data", hans)
    code, said = call(*common, "--checkpoint", random_checkpoint(sequence_length=100), "--output", tmp_path / "some")
    assert code == 0 and "gristmill_hans: 4 of 9 questions were not evaluated and are in no score" in said
    results = json.loads((tmp_path / "some" / "results.json").read_text())
    assert results["verdicts"]["gristmill_hans"]["acc"]["n"] == results["results"]["gristmill_hans"]["sample_len"] == 5
    assert results["n-samples"]["gristmill_hans"]["not_evaluated"] == 4
    samples = [json.loads(line) for line in (tmp_path / "some/samples/gristmill_hans.jsonl").read_text().splitlines()]
    kept = [sample["acc"] for sample in samples[4:]]
    assert results["results"]["gristmill_hans"]["acc,none"] == sum(kept) / 5
    assert all(sample["metrics"] == [] and "acc" not in sample for sample in samples[:4])
    code, said = call(
        *common, "--checkpoint", random_checkpoint(name="small", sequence_length=40), "--output", tmp_path / "none"
    )
    assert code == 0 and "9 of 9 questions were not evaluated" in said and "| not evaluated |" in said
    code, said = call("compare", tmp_path / "some", tmp_path / "none")
    assert code == 1 and "gristmill_hans" in said and "no question that both evaluated" in said


def test_an_unknown_task_names_the_nearest(call, hans, random_checkpoint, tokenizer_folder):
    code, said = call("evaluate", "--checkpoint", random_checkpoint(), "--tasks", "gristmill_hens", "--data", hans)
    assert code == 2 and "no task 'gristmill_hens'; the nearest is 'gristmill_hans'" in said


def test_a_half_written_checkpoint(call, hans, random_checkpoint, tokenizer_folder):
    checkpoint = random_checkpoint()
    part = next(checkpoint.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:100])
    code, said = call("evaluate", "--checkpoint", checkpoint, *TASK, "--data", hans)
    assert code == 1 and "this checkpoint is damaged" in said
    (checkpoint / "manifest.json").unlink()
    code, said = call("evaluate", "--checkpoint", checkpoint, *TASK, "--data", hans)
    assert code == 1 and "no manifest.json" in said


def test_an_empty_and_an_absent_benchmark_file(call, hans, random_checkpoint, tokenizer_folder):
    checkpoint, path = random_checkpoint(), hans / "benchmarks" / "hans_evaluation.jsonl"
    path.write_text("")
    code, said = call("evaluate", "--checkpoint", checkpoint, *TASK, "--data", hans)
    assert code == 1 and "has no record; download the file again" in said
    path.unlink()
    code, said = call("evaluate", "--checkpoint", checkpoint, *TASK, "--data", hans)
    assert code == 1 and "absent; this task reads benchmarks/hans_evaluation.jsonl" in said


def test_logits_that_are_not_numbers(call, hans, broken_checkpoint, tokenizer_folder):
    code, said = call("evaluate", "--checkpoint", broken_checkpoint, *TASK, "--data", hans)
    assert code == 1 and "the model's logits are not numbers" in said
    code, said = call("generate", "--checkpoint", broken_checkpoint, "--prompt", "The mill")
    assert code == 1 and "logits are not numbers" in said
