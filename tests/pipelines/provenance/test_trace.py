"""From a step of a real run to its documents and back; a planted document behind a spike."""

import json
from pathlib import Path

import pytest

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.cli.provenance import parse_steps
from gristmill.pipelines.provenance.trace import (
    StepLog,
    Tracer,
    in_common,
    read_steps,
    samples_of_steps,
    spikes,
    step_of,
    was_left_out,
)
from gristmill.pipelines.python_api import run as run_recipe
from gristmill.pipelines.recipes.recipe_file import validate
from gristmill.tokenizers.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[dict, Path]:
    """60 steps of 2 samples on 300 sentences, with one document of noise."""
    folder = tmp_path_factory.mktemp("trace")
    texts = [f"Sack {number} of the miller holds flour, and sack {number} is full." for number in range(300)]
    texts[123] = "§¤ " + " ".join(chr(0x4E00 + 7 * (number * number % 11)) for number in range(60))
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    recipe = {
        "name": "traced",
        "seed": 3,
        "sources": [{"name": "s", "format": "jsonl", "paths": [str(folder / "a.jsonl")]}],
        "curate": {"filters": [], "near_dedup": None, "splits": {"validation": 0.0, "test": 0.0}},
        "tokenizer": {"vocab_size": 320},
        "model": {"layers": 1, "width": 32, "heads": 2, "sequence_length": 32},
        "train": {
            "tokens": 60 * 64,
            "batch_tokens": 64,
            "seed": 11,
            "precision": "fp32",
            "optimizer": {"learning_rate": 1e-2},
            "monitoring": {"trackers": []},
        },
    }
    return recipe, run_recipe(recipe, folder / "work", "train")


def test_the_documents_of_every_step_are_those_of_its_batch(run):
    recipe, workdir = run
    tracer = Tracer(validate(recipe, "recipe"), workdir)
    steps = StepLog(workdir / "train")
    tokenizer = load_tokenizer(workdir / "tokenizer")
    for step in (1, 2, 30, 60):
        numbers = samples_of_steps(steps, step, step, 32)
        assert len(numbers) == 2
        batch = tracer.samples.batch(list(numbers))
        for row, k in enumerate(numbers):
            tokens = [*batch["tokens"][row].tolist(), int(batch["targets"][row][-1])]
            read = []
            for span in tracer.documents_of(range(k, k + 1)):
                ids = [*tokenizer.encode(tracer.text_of(span)), tokenizer.end_of_document]
                read += ids[span.start : span.stop]
            assert read == tokens


def test_a_document_names_the_steps_that_read_it(run):
    recipe, workdir = run
    tracer = Tracer(validate(recipe, "recipe"), workdir)
    steps = StepLog(workdir / "train")
    doc_id = tracer.documents_of(range(40, 41))[0].doc_id
    read_by = {k: {span.doc_id for span in tracer.documents_of(range(k, k + 1))} for k in range(tracer.num_samples)}
    expected = [k for k, documents in read_by.items() if doc_id in documents]
    assert 40 in expected
    assert [k for _, k, _ in tracer.samples_of(doc_id)] == expected
    assert step_of(steps, 40, 32) == 21 and step_of(steps, 10**6, 32) is None
    with pytest.raises(InputError, match="no document 'nowhere' in the train split"):
        tracer.samples_of("nowhere")


def test_a_planted_document_is_behind_the_spikes(run, call):
    recipe, workdir = run
    tracer = Tracer(validate(recipe, "recipe"), workdir)
    steps = [step for step in read_steps(workdir / "train") if step["step"] > 20]  # after the fall of the first steps
    worst = [step for step, _ in spikes(steps, "loss", 2)]
    read_by = [tracer.documents_of(samples_of_steps(StepLog(workdir / "train"), step, step, 32)) for step in worst]
    texts = {span.doc_id: tracer.text_of(span) for spans in read_by for span in spans}
    assert any(text.startswith("§¤") for text in texts.values())
    assert in_common([read_by[0], read_by[0]])[0][1] == 2
    path = workdir.parent / "traced.yaml"
    path.write_text(json.dumps(recipe))
    code, said = call("trace", path, "--step", "20-21", "--text", "--workdir", workdir)
    assert code == 0 and "s 100.0%" in said
    assert call("trace", path, "--spike", "--workdir", workdir)[0] == 0
    assert call("trace", path, "--document", read_by[0][0].doc_id, "--workdir", workdir)[0] == 0


def test_a_spike_is_above_the_steps_on_either_side():
    values = [9, 7, 5, 4, 3, 3, 8, 3, 3]
    steps = [{"step": number, "tokens": 0, "loss": value} for number, value in enumerate(values, 1)]
    assert spikes(steps, "loss", 1) == [(7, 8 / 4.5)]  # the median of 9 7 5 4 3 3 before it; that of 3 3 behind is 3


def test_what_cannot_be_traced_is_said(run, call, tmp_path):
    recipe, workdir = run
    lines = [
        "from gristmill.training.objectives.objective import Objective",
        "class Mine(Objective):",
        "    data = 'own'",
        *(
            f"    def {call}: pass"
            for call in ("sample(self, k)", "loss(self, model, batch)", "predict(self, model, batch)")
        ),
    ]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    own = recipe | {"train": recipe["train"] | {"objective": f"{tmp_path / 'mine.py'}:Mine"}}
    with pytest.raises(RecipeError, match=r"mine\.py:Mine makes samples of its own, whose documents cannot be traced"):
        Tracer(validate(own, "recipe"), workdir)
    with pytest.raises(InputError, match="curate: not complete"):
        Tracer(validate(recipe, "recipe"), tmp_path)
    with pytest.raises(InputError, match="steps 61 to 61: the run has made steps 1 to 60"):
        samples_of_steps(StepLog(workdir / "train"), 61, 61, 32)
    with pytest.raises(RecipeError, match="--step last: write a step"):
        parse_steps("last")
    assert parse_steps("7") == (7, 7) and parse_steps("7-9") == (7, 9)
    path = tmp_path / "traced.yaml"
    path.write_text(json.dumps(recipe))
    code, said = call("trace", path, "--workdir", workdir)
    assert code == 2 and "give one of --step N, --document ID and --spike" in said


def test_steps_are_found_by_bisection_whatever_the_lengths_of_lines(tmp_path):
    lines = [json.dumps({"step": step, "tokens": 10 * step, "note": "x" * (step * step % 50)}) for step in range(5, 90)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 90, "tok')
    log = StepLog(tmp_path)
    assert [log.at(step)["step"] for step in range(5, 90)] == list(range(5, 90))
    assert log.at(4) is None and log.at(90) is None and (log.first["step"], log.last["step"]) == (5, 89)
    assert [step_of(log, sample, 1) for sample in (0, 49, 50, 59, 889, 890)] == [5, 5, 6, 6, 89, None]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    with pytest.raises(InputError, match="no complete line"):
        StepLog(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        StepLog(tmp_path / "none")


def test_samples_of_lost_replicas_are_no_part_of_a_step(tmp_path):
    lines = [{"step": step, "tokens": 40 * step} for step in range(1, 5)]
    lines[1] |= {"replicas": [0], "left_out_samples": [[6, 8]]}  # of the samples 4 to 7
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = StepLog(tmp_path)
    assert list(samples_of_steps(log, 2, 2, 10)) == [4, 5]
    assert list(samples_of_steps(log, 1, 4, 10)) == [*range(6), *range(8, 16)]
    assert list(samples_of_steps(log, 3, 4, 10)) == list(range(8, 16))
    assert [was_left_out(log, sample, step_of(log, sample, 10)) for sample in (5, 6, 7, 8)] == [
        False,
        True,
        True,
        False,
    ]
