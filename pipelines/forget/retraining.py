"""Training again from the last checkpoint that has not seen the documents that were taken out."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from gristmill.foundation.files import atomic_path, remove_tree, write_atomic
from gristmill.foundation.fingerprint import canonical_json, digested_json, fingerprint
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.pipelines.forget.places import CHECKPOINTS, TRAIN
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.runner import Runner
from gristmill.pipelines.stages.training_data import form_of, open_form

CONTINUED_NAME = "continued_from.json"  # of a train folder


def tokenizer_digest(workdir: Path) -> str:
    """Digest of the tokenizer's files; "" where there is none."""
    folder = workdir / "tokenizer"
    if not (folder / MANIFEST_NAME).is_file():
        return ""
    return fingerprint({output.path: output.sha256 for output in read_manifest(folder).outputs})


def prepare_training(workdir: Path, pending: Mapping[str, Any], runner: Runner, recipe: Recipe) -> dict[str, Any]:
    """Puts the clean checkpoint where the stage train resumes from it. Returns what the statement says of it.

    Training starts from step 0 if there is no clean checkpoint, or if the tokenizer is another one: the checkpoint's
    embeddings are of the old tokens."""
    plan = next(plan for plan in runner.plan() if plan.stage.name == TRAIN)
    folder = runner.incomplete_folder(plan.stage, plan.fingerprint)
    clean = pending["places"]["training"]["clean"]
    made = folder if folder.is_dir() else workdir / TRAIN
    if plan.action == "skip" or (made == folder and (folder / CONTINUED_NAME).is_file()):
        continued = made / CONTINUED_NAME
        return {"from_step": _step_in(continued) if continued.is_file() else 0}
    if clean is None or tokenizer_digest(workdir) != pending["tokenizer"]:
        return {"from_step": 0, "tokenizer_changed": tokenizer_digest(workdir) != pending["tokenizer"]}
    source = workdir / TRAIN / CHECKPOINTS / f"step-{clean:08d}"
    copy_checkpoint(source, folder, clean_fingerprint(workdir, recipe))
    continued_from = {
        "step": clean,
        "checkpoint": read_manifest(source).fingerprint,
        "train": pending["before"][TRAIN],
        "index": pending["before"]["index"],
    }
    write_atomic(folder / CONTINUED_NAME, canonical_json(continued_from) + b"\n")
    return {"from_step": clean}


def clean_fingerprint(workdir: Path, recipe: Recipe) -> str:
    """Fingerprint of the samples of the new index, which a checkpoint of this run names."""
    samples = open_form(form_of(recipe.training().train.objective), workdir / "index", "train", recipe)
    return str(samples.fingerprint)


def copy_checkpoint(source: Path, folder: Path, data: str) -> None:
    """A copy of the checkpoint in the folder of a run, as one that was trained on this data."""
    target = folder / CHECKPOINTS / source.name
    remove_tree(target)
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        copies = [] if path.name == MANIFEST_NAME else [target / path.name]
        if path.suffix == ".jsonl":  # of the metrics up to its step
            copies.append(folder / path.name)
        for copy in copies:
            with atomic_path(copy) as temporary:
                shutil.copyfile(path, temporary)
    manifest = read_manifest(source).model_dump(mode="json")
    manifest["metadata"] = {**manifest["metadata"], "data": data}
    write_atomic(target / MANIFEST_NAME, digested_json(manifest))  # last: its presence says that it is whole


def _step_in(path: Path) -> int:
    return int(orjson.loads(path.read_bytes())["step"])
