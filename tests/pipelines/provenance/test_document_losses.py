"""A planted document behind a loss spike is ranked first by a checkpoint's losses; tokens by source in the metrics."""

import json
import random
from pathlib import Path

import pytest

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.provenance.document_losses import checkpoint_before, document_losses, ranked
from gristmill.pipelines.provenance.trace import StepLog, Tracer, read_steps, samples_of_steps, spikes
from gristmill.pipelines.python_api import run as run_recipe
from gristmill.pipelines.recipes.recipe_file import validate
from gristmill.training.checkpoint.checkpoint import step_folder

BATCH_TOKENS, LENGTH = 128, 32


def planted_run(folder: Path, seed: int, **index) -> tuple[dict, Path]:
    """(recipe, work folder) of a run on two sources of sentences, of which one has a document of noise."""
    drawn = random.Random(seed)
    for name in ("a", "b"):
        texts = [f"Sack {number} of the miller holds flour, and sack {number} is full." for number in range(200)]
        if name == "a":
            texts[drawn.randrange(200)] = "§¤ " + " ".join(chr(0x4E00 + 7 * drawn.randrange(11)) for _ in range(60))
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    recipe = {
        "name": "planted",
        "seed": seed,
        "sources": [{"name": name, "format": "jsonl", "paths": [str(folder / f"{name}.jsonl")]} for name in ("a", "b")],
        "curate": {"filters": [], "exact_dedup": None, "near_dedup": None, "splits": {"validation": 0.0, "test": 0.0}},
        "tokenizer": {"vocab_size": 320},
        "index": index,
        "model": {"layers": 1, "width": 32, "heads": 2, "sequence_length": LENGTH},
        "train": {
            "tokens": 120 * BATCH_TOKENS,
            "batch_tokens": BATCH_TOKENS,
            "seed": seed,
            "precision": "fp32",
            "optimizer": {"learning_rate": 1e-2},
            "checkpoint": {"every": 15, "keep_last": 20},
            "monitoring": {"trackers": []},
        },
    }
    return recipe, run_recipe(recipe, folder / "work", "train")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[dict, Path]:
    return planted_run(tmp_path_factory.mktemp("planted"), 3)


def first_document(recipe: dict, workdir: Path) -> str:
    """The beginning of the document that is ranked first in the five steps of worst loss."""
    tracer, steps = Tracer(validate(recipe, "recipe"), workdir), read_steps(workdir / "train")
    worst = [step for step, _ in spikes(steps, "loss", 5)]
    numbers = sorted({k for step in worst for k in samples_of_steps(StepLog(workdir / "train"), step, step, LENGTH)})
    losses = document_losses(tracer, numbers, checkpoint_before(workdir / "train", min(worst)))
    spans = {span.doc_id: span for k in numbers for span in tracer.documents_of(range(k, k + 1))}
    assert {loss.doc_id for loss in losses} <= spans.keys()  # a window's first token alone has no loss
    return tracer.text_of(spans[losses[0].doc_id])


def test_the_planted_document_is_ranked_first(run):
    assert first_document(*run).startswith("§¤")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_planted_documents_are_ranked_first(tmp_path, seed):
    index = {"packing": "best_fit", "mask_documents": True} if seed % 2 else {}
    assert first_document(*planted_run(tmp_path, seed, **index)).startswith("§¤")


def test_losses_by_document_add_up_to_the_loss_of_the_step(run):
    """A checkpoint's losses on the samples of a step soon after it, against the loss that training measured there."""
    recipe, workdir = run
    tracer, steps = Tracer(validate(recipe, "recipe"), workdir), read_steps(workdir / "train")
    last = steps[-1]["step"]
    losses = document_losses(
        tracer,
        list(samples_of_steps(StepLog(workdir / "train"), last, last, LENGTH)),
        step_folder(workdir / "train" / "checkpoints", last - last % 15 if last % 15 else last - 15),
    )
    assert sum(loss.tokens for loss in losses) == steps[-1]["valid_tokens"]
    mean = sum(loss.loss * loss.tokens for loss in losses) / sum(loss.tokens for loss in losses)
    assert mean == pytest.approx(steps[-1]["loss"], abs=0.15)  # the model has made 15 steps since


def test_tokens_by_source_are_those_of_the_documents(run):
    recipe, workdir = run
    tracer, steps = Tracer(validate(recipe, "recipe"), workdir), read_steps(workdir / "train")
    for step in (1, 60, 120):
        spans = tracer.documents_of(samples_of_steps(StepLog(workdir / "train"), step, step, LENGTH))
        expected: dict[str, int] = {}
        for sample, source in {(span.sample, span.source) for span in spans}:
            assert sample >= 0
            expected[source] = expected.get(source, 0) + LENGTH
        assert steps[step - 1]["source_tokens"] == expected


def test_excess_by_hand():
    losses = ranked({("a", "s"): [4, 2], ("b", "s"): [30, 5], ("c", "s"): [2, 1], ("d", "s"): [0, 0]})
    assert [(loss.doc_id, loss.loss, loss.excess) for loss in losses] == [("b", 6, 20), ("a", 2, 0), ("c", 2, 0)]


def test_the_command_ranks_documents_and_says_what_it_cannot(run, call, tmp_path):
    recipe, workdir = run
    path = tmp_path / "planted.yaml"
    path.write_text(json.dumps(recipe))
    code, said = call("trace", path, "--spike", "--losses", "--workdir", workdir)
    assert code == 0 and "documents by step-" in said
    assert call("trace", path, "--spike", "--by", "grad_norm", "--workdir", workdir)[0] == 0
    with pytest.raises(InputError, match="no checkpoint; name one with --checkpoint"):
        checkpoint_before(tmp_path, 1)
    tracer = Tracer(validate(recipe, "recipe"), workdir)
    tracer.recipe = validate(recipe | {"index": {"fim_rate": 0.5}, "tokenizer": {"fim": True}}, "recipe")
    with pytest.raises(RecipeError, match=r"index\.fim_rate moves tokens"):
        document_losses(tracer, [0], tmp_path)
