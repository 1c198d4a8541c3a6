"""Removal of documents from a work folder: plan, tombstones, rebuild, statement.

What is planned is written first (`statements/pending.json`), then the tombstones, then the stages are built again, and
the statement last: a kill at any moment loses nothing, and `--resume` goes on."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gristmill.data_pipeline.annotate.tombstones import (
    Tombstones,
    read_tombstones,
    write_tombstones,
)
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import atomic_path, remove_tree, write_atomic
from gristmill.foundation.fingerprint import canonical_json, digested_json, fingerprint
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.provenance.forget.places import CHECKPOINTS, TRAIN, DocumentPlaces, find_places
from gristmill.pipelines.provenance.forget.selection import ReadDocuments, Selected, Selector, ids_by_reason, select
from gristmill.pipelines.provenance.forget.statement import (
    PENDING_NAME,
    STATEMENTS_FOLDER,
    described_places,
    fingerprints,
    write_statement,
    wrong_with_statements,
)
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import validate
from gristmill.pipelines.stages.runner import Runner
from gristmill.pipelines.workdir.data_forms import open_format, sample_format
from gristmill.pipelines.workdir.raw_files import lock_raw_files
from gristmill.pipelines.workdir.remote import lease

REBUILT = ("curate", "tokenizer", "index")  # in this order, where the work folder has them
LEARNED_FROM_TEXT = ("curate", "tokenizer", "index", "report")  # their folders that were set aside are deleted


@dataclass(frozen=True)
class ForgetPlan:
    """Documents to take out, where they are, and the stages to build again."""

    selector: Selector
    documents: Sequence[Selected]
    places: DocumentPlaces
    stages: tuple[str, ...]
    statistics: tuple[str, ...]


def recipe_of(workdir: Path) -> Recipe:
    """The recipe of the newest complete stage. Raises InputError if the folder holds no corpus."""
    for name in ("report", "evaluate", "train", "index", "tokenizer", "curate"):
        folder = workdir / name
        if (folder / MANIFEST_NAME).is_file() and (workdir / "curate" / MANIFEST_NAME).is_file():
            return validate(read_manifest(folder).origin["recipe"], str(folder / MANIFEST_NAME))
    raise InputError(f"{workdir}: no corpus here (curate/{MANIFEST_NAME}); name the work folder of a recipe")


def make_plan(workdir: Path, recipe: Recipe, selector: Selector, threshold: float | None, engine: Engine) -> ForgetPlan:
    """Finds the documents and their places. Writes only to the cache.

    Raises InputError if the raw files are not those that the lock pins, or another process writes to the folder."""
    with lease(workdir):
        lock = lock_raw_files(recipe, workdir, engine, write=False)
        documents = ReadDocuments.of(recipe, workdir, lock, engine)
        selected = select(selector, documents, threshold)
        places = find_places(frozenset(document.doc_id for document in selected), recipe, workdir, engine)
    stages = tuple(name for name in REBUILT if (workdir / name / MANIFEST_NAME).is_file())
    return ForgetPlan(selector, selected, places, stages, changed_statistics(recipe, places))


def changed_statistics(recipe: Recipe, places: DocumentPlaces) -> tuple[str, ...]:
    """Statistics of the recipe over all documents, computed without these from now on: other documents may change by
    them."""
    statistics = []
    if any(source.extracted_by_blocks and source.blocks.site_boilerplate is not None for source in recipe.sources):
        statistics.append("site_boilerplate: blocks that many pages of a site repeat")
    if recipe.curate.quality is not None:
        statistics.append("quality: the classifier and the ranks that its shares are of")
    if recipe.curate.span_dedup or recipe.curate.substring_dedup is not None:
        statistics.append("span and substring counts: text that these documents repeated may come back elsewhere")
    if places.in_sample:
        statistics.append(f"tokenizer: {places.in_sample} of the documents are in its sample")
    return tuple(statistics)


def begin(workdir: Path, plan: ForgetPlan, retrain: bool) -> None:
    """Records the plan and writes the tombstones."""
    tombstones = read_tombstones(workdir) or Tombstones.empty()
    after = tombstones.with_request(
        plan.selector.kind,
        (document.doc_id for document in plan.documents),
        (document.text_key for document in plan.documents if document.text_key is not None),
    )
    if retrain and not (workdir / "train" / MANIFEST_NAME).is_file():
        raise RecipeError(f"--retrain: {workdir} has no finished model; leave the option out")
    if after == tombstones:
        raise InputError(f"{workdir}: these documents have a tombstone already; `gristmill curate` applies it")
    request = after.requests[-1]
    pending = {
        "number": request.number,
        "request": request.digest,
        "selector": plan.selector.kind,
        "documents": len(plan.documents),
        "by_reason": dict(sorted(ids_by_reason(plan.documents).items())),
        "places": described_places(plan.places),
        "statistics": list(plan.statistics),
        "stages": list(plan.stages),
        "retrain": retrain,
        "tokenizer": tokenizer_digest(workdir),
        "before": fingerprints(workdir),
    }
    with lease(workdir):
        content = {"pending": pending, "tombstones": after.model_dump(mode="json")}
        write_atomic(workdir / STATEMENTS_FOLDER / PENDING_NAME, canonical_json(content))
        write_tombstones(workdir, after)


def read_pending(workdir: Path) -> dict[str, Any] | None:
    """The removal that was interrupted; None if there is none. Writes its tombstones, if they are missing."""
    path = workdir / STATEMENTS_FOLDER / PENDING_NAME
    if not path.is_file():
        return None
    content = orjson.loads(path.read_bytes())
    tombstones = Tombstones.model_validate(content["tombstones"])
    if read_tombstones(workdir) != tombstones:
        write_tombstones(workdir, tombstones)
    return dict(content["pending"])


def finish(workdir: Path, recipe: Recipe, pending: Mapping[str, Any], open_runner: Callable[[str], Runner]) -> Path:
    """Builds the stages of a removal again, deletes what older builds left, checks the result and writes the statement.

    open_runner: last stage -> runner. Raises InputError if a document is still in the corpus."""
    open_runner(pending["stages"][-1]).run(to=pending["stages"][-1])
    retrained = _retrain(workdir, recipe, pending, open_runner) if pending["retrain"] else None
    removed = remove_older_builds(workdir)
    lines: list[str] = []
    after = fingerprints(workdir)
    results = {
        "after": {name: digest for name, digest in after.items() if name in pending["stages"]},
        "retrained": retrained,
        "stale": stale_stages(workdir),
        "deleted": [path.name for path in removed],
    }
    path = write_statement(workdir, pending, results)
    (workdir / STATEMENTS_FOLDER / PENDING_NAME).unlink()
    wrong = list(wrong_with_statements(workdir, lines, reads_texts=False))  # by text they were dropped before any rule
    if wrong:
        raise InputError("\n".join(wrong))
    return path


def _retrain(
    workdir: Path, recipe: Recipe, pending: Mapping[str, Any], open_runner: Callable[[str], Runner]
) -> dict[str, Any]:
    runner = open_runner("train")
    started = prepare_training(workdir, pending, runner, recipe)
    runner.run(to="train")
    return started | {"train": fingerprints(workdir)["train"]}


def remove_older_builds(workdir: Path) -> list[Path]:
    """Deletes folders of earlier builds that were made of the text of documents: those set aside, and the report."""
    folders = [path for name in LEARNED_FROM_TEXT for path in sorted(workdir.glob(f"{name}.superseded-*"))]
    if (workdir / "report").is_dir():
        folders.append(workdir / "report")
    for folder in folders:
        remove_tree(folder)
    return folders


def stale_stages(workdir: Path) -> list[str]:
    """Complete stages that were made from other inputs than stand in the work folder now."""
    made = fingerprints(workdir)
    stale: list[str] = []
    for name in made:
        inputs = read_manifest(workdir / name).inputs
        if any(made.get(stage, digest) != digest for stage, digest in inputs.items() if ":" not in stage):
            stale.append(name)
    return stale


# Training again from the last checkpoint that has not seen the documents that were taken out.


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
    samples = open_format(sample_format(recipe.training().train.objective), workdir / "index", "train", recipe)
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
