"""`gristmill forget --retrain`: a model is trained again from the last checkpoint that has not read the documents."""

import json
import shutil
from pathlib import Path

import pytest

from gristmill.foundation.errors import InputError
from gristmill.pipelines.cli.main import main
from gristmill.pipelines.provenance.forget.places import checkpoint_steps
from gristmill.pipelines.provenance.forget.statement import read_statement, statement_path
from gristmill.pipelines.provenance.trace import StepLog, Tracer, samples_of_steps, step_of
from gristmill.pipelines.provenance.verify import verify
from gristmill.pipelines.python_api import run as run_recipe
from gristmill.pipelines.recipes.recipe_file import validate

LENGTH = 32


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[dict, Path]:
    """24 steps of 2 samples on 200 sentences, with a checkpoint every 4 steps and a tokenizer made elsewhere."""
    folder = tmp_path_factory.mktemp("retrain")
    texts = [f"Sack {number} of the miller holds flour, and sack {number} is full." for number in range(200)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    recipe = {
        "name": "retrained",
        "seed": 3,
        "sources": [{"name": "s", "format": "jsonl", "paths": [str(folder / "a.jsonl")]}],
        "curate": {"filters": [], "near_dedup": None, "splits": {"validation": 0.0, "test": 0.0}},
        "tokenizer": {"vocab_size": 320},
        "model": {"layers": 1, "width": 32, "heads": 2, "sequence_length": LENGTH},
        "train": {
            "tokens": 24 * 64,
            "batch_tokens": 64,
            "seed": 11,
            "precision": "fp32",
            "optimizer": {"learning_rate": 1e-2},
            "checkpoint": {"every": 4, "keep_last": 100},
            "monitoring": {"trackers": []},
        },
    }
    run_recipe(recipe, folder / "first", "tokenizer", workers=1)
    recipe["tokenizer"] = {"pretrained": str(folder / "first" / "tokenizer")}
    return recipe, run_recipe(recipe, folder / "work", "train", workers=1)


def forget(work: Path, doc_id: str, *options: str) -> int:
    (work.parent / "ids.txt").write_text(doc_id)
    with pytest.raises(SystemExit) as ended:
        main(["forget", str(work), "--ids", str(work.parent / "ids.txt"), "--workers", "1", *options])
    return int(ended.value.code or 0)


def document_read_at(recipe: dict, work: Path, step: int) -> str:
    """A document that this step reads first."""
    tracer, steps = Tracer(validate(recipe, "recipe"), work), StepLog(work / "train")
    for span in tracer.documents_of(samples_of_steps(steps, step, step, LENGTH)):
        if min(sample for _, sample, _ in tracer.samples_of(span.doc_id)) == span.sample:
            assert step_of(steps, span.sample, LENGTH) == step
            return span.doc_id
    raise AssertionError(f"step {step} reads no document first")


def test_training_goes_on_from_the_last_checkpoint_before_the_document(trained, tmp_path):
    recipe, original = trained
    work = Path(shutil.copytree(original, tmp_path / "work"))
    doc_id = document_read_at(recipe, work, 11)
    assert forget(work, doc_id, "--retrain") == 0
    statement = read_statement(statement_path(work, 1))
    training = statement["places"]["training"]
    assert (training["first_step"], training["clean"], training["seen"]) == (11, 8, [12, 16, 20, 24])
    assert statement["retrained"]["from_step"] == 8
    assert checkpoint_steps(work / "train") == [8, 12, 16, 20, 24]
    before, after = ((folder / "train" / "metrics.jsonl").read_text().splitlines() for folder in (original, work))
    assert after[:8] == before[:8]
    assert after[10:] != before[10:]
    assert len(after) == len(before)
    with pytest.raises(InputError, match="no document"):
        Tracer(validate(recipe, "recipe"), work).samples_of(doc_id)
    assert verify(work).wrong == []


def test_without_the_option_the_model_is_named_as_stale(trained, tmp_path):
    recipe, original = trained
    work = Path(shutil.copytree(original, tmp_path / "work"))
    assert forget(work, document_read_at(recipe, work, 11)) == 0
    statement = read_statement(statement_path(work, 1))
    assert statement["stale"] == ["train"]
    assert statement["retrained"] is None
    assert [line for line in verify(work).wrong if "train/manifest.json: made from index" in line]
