"""The batches that training really reads, hashed on each rank, against the documents that trace names: over layouts,
packings and resumes."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from recorded_batches import digest

from gristmill.pipelines.provenance.trace import StepLog, Tracer, samples_of_steps
from gristmill.pipelines.python_api import run as run_recipe
from gristmill.pipelines.recipes.recipe_file import validate
from gristmill.tokenizers.tokenizer import load_tokenizer

LAYOUTS = ({}, {"data": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2})
PACKINGS = ({}, {"packing": "best_fit", "mask_documents": True})
SETTINGS = tuple(itertools.product(LAYOUTS, PACKINGS, (False, True)))
STEPS, LENGTH = 12, 32


@pytest.fixture(scope="module")
def indexed(tmp_path_factory) -> tuple[dict, Path]:
    """Recipe and work folder of two sources, indexed."""
    folder = tmp_path_factory.mktemp("indexed")
    for name in ("a", "b"):
        texts = [f"Sack {number} of {name} holds flour{', much of it' * (number % 5)}." for number in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    recipe = {
        "name": "recorded",
        "sources": [{"name": name, "format": "jsonl", "paths": [str(folder / f"{name}.jsonl")]} for name in ("a", "b")],
        "curate": {"filters": [], "near_dedup": None, "splits": {"validation": 0.0, "test": 0.0}},
        "tokenizer": {"vocab_size": 320},
        "model": {"layers": 2, "width": 32, "heads": 2, "sequence_length": LENGTH},
        "train": {"tokens": STEPS * 4 * LENGTH, "batch_tokens": 4 * LENGTH, "precision": "fp32"},
    }
    return recipe, run_recipe(recipe, folder / "work", "index")


@pytest.fixture(scope="module")
def launcher():
    program = Path(__file__).parents[1] / "support" / "recorded_batches.py"
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "index", "resumes"), SETTINGS)
def test_documents_of_every_step_are_the_batches_that_were_read(indexed, launcher, tmp_path, layout, index, resumes):
    recipe, source = indexed
    workdir = tmp_path / "work"
    for stage in ("curate", "tokenizer", "index", "lock.json"):
        (shutil.copytree if (source / stage).is_dir() else shutil.copyfile)(source / stage, workdir / stage)
    recipe = recipe | {"index": index, "train": recipe["train"] | {"layout": layout}}
    path = tmp_path / "recorded.yaml"
    path.write_text(json.dumps(recipe))
    arguments = ["train", str(path), "--workdir", str(workdir)]
    order = {"arguments": arguments, "processes": 2 if layout else 1, "folder": str(tmp_path)}
    if resumes:
        stop = ["--set", "train.checkpoint.stop_after_seconds=0.000001"]
        run(launcher, order | {"arguments": [*arguments, *stop]})
        assert not (workdir / "train" / "manifest.json").is_file()
    assert run(launcher, order) == [0] * order["processes"], (tmp_path / "rank-0.log").read_text()[-2000:]
    compare(validate(recipe, "recipe"), workdir, tmp_path)


def run(launcher, order: dict) -> list[int]:
    launcher.stdin.write(json.dumps(order) + "\n")
    launcher.stdin.flush()
    return json.loads(launcher.stdout.readline())


def compare(recipe, workdir: Path, folder: Path) -> None:
    """Every sample of the run was read, and each time with the tokens of the documents that the trace names."""
    tracer, tokenizer = Tracer(recipe, workdir), load_tokenizer(workdir / "tokenizer")
    recorded: dict[int, set[str]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["samples"] == tracer.samples.fingerprint:
                recorded.setdefault(record["sample"], set()).add(record["sha256"])
    with StepLog(workdir / "train") as log:
        samples = samples_of_steps(log, 1, STEPS, LENGTH)
    assert len(samples) == STEPS * 4 and set(samples) <= recorded.keys()
    for k in samples:
        tokens: list[int] = []
        for span in tracer.documents_of(range(k, k + 1)):
            tokens += [*tokenizer.encode(tracer.text_of(span)), tokenizer.end_of_document][span.start : span.stop]
        tokens += [tokenizer.end_of_document] * (LENGTH + 1 - len(tokens))
        assert recorded[k] == {digest(np.array(tokens))}
