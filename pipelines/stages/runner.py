"""Runs the stages in order: skips complete stages, resumes incomplete ones, and reports the reason for each action.

A complete stage's folder is WORKDIR/NAME. One that is made again from another recipe moves aside, to
WORKDIR/NAME.superseded-FINGERPRINT, and comes back when its recipe does. A running stage writes to
WORKDIR/.NAME-FINGERPRINT, so an incomplete folder is only resumed with the same config and inputs. The manifest is
written last, then the folder is renamed."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.foundation.checksums import check_against
from gristmill.foundation.errors import InputError, explain_disk_error
from gristmill.foundation.files import DigestCache, remove_tree, sweep, sync, sync_tree, write_atomic
from gristmill.foundation.fingerprint import differing_fields
from gristmill.foundation.lock import Lock
from gristmill.foundation.manifest import (
    LOG_FOLDER,
    MANIFEST_NAME,
    Manifest,
    StageIdentity,
    read_manifest,
    write_manifest,
)
from gristmill.foundation.progress import Reporter, raise_lost_interrupt
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages.stage import Stage, StageContext, check_stage_folder
from gristmill.pipelines.workdir.remote import Uploader, lease

POLL_SECONDS = 0.5
TIMES_NAME = "times.jsonl"
# The largest outputs (indexed data, checkpoint files): their readers verify the digests.
VERIFIED_BY_READER = (".bin", ".idx", ".distcp")


@dataclass(frozen=True)
class StagePlan:
    """action: skip (complete), resume (incomplete), run (no output yet), rebuild (other config or inputs) or restore
    (complete, and set aside when another recipe ran)."""

    stage: Stage
    fingerprint: str
    config: dict[str, Any]
    inputs: dict[str, str]
    action: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class RunContext:
    """engine: runs the tasks of the stages; None: this process. rank: of this process under torchrun; only rank 0
    writes the stages' folders. publisher: of a work folder in a store. overwrite: what another recipe made is deleted
    instead of set aside. several_recipes: it stays beside this one's on purpose, and nothing is said of it."""

    engine: Engine | None = None
    rank: int = 0
    publisher: Uploader | None = None
    overwrite: bool = False
    several_recipes: bool = False


class Runner:
    """Runs the stages of a recipe in a work folder, skipping those that are complete."""

    def __init__(
        self,
        recipe: Recipe,
        workdir: Path,
        stages: Sequence[Stage],
        lock: Lock,
        reporter: Reporter,
        processes: RunContext = RunContext(),
    ):
        self.recipe, self.workdir, self.stages, self.lock = recipe, workdir, stages, lock
        self.reporter, self.rank, self.publisher = reporter, processes.rank, processes.publisher
        self.engine: Engine = processes.engine or LocalEngine(1, reporter)
        self.overwrite, self.several_recipes = processes.overwrite, processes.several_recipes

    def folder(self, stage: Stage) -> Path:
        return self.workdir / stage.name

    def incomplete_folder(self, stage: Stage, fingerprint: str) -> Path:
        return self.workdir / f".{stage.name}-{fingerprint}"

    def plan(self) -> list[StagePlan]:
        """The action for each stage and the reasons for it. Writes nothing."""
        fingerprints: dict[str, str] = {}
        plans = []
        for stage in self.stages:
            config = stage.config(self.recipe)
            inputs = {name: fingerprints[name] for name in stage.inputs}
            if stage.reads_raw:
                inputs |= {f"raw:{name}": digest for name, digest in self.lock.identity().items()}
            fingerprints[stage.name] = StageIdentity(stage.name, stage.code_version, config, inputs).fingerprint
            action, reasons = self._action(stage, fingerprints[stage.name], config, inputs)
            plans.append(StagePlan(stage, fingerprints[stage.name], config, inputs, action, tuple(reasons)))
        return plans

    def run(self, to: str | None = None, only: str | None = None) -> None:
        """Runs the stages up to `to`, or `only` the named one, whose inputs must be complete."""
        if self.rank != 0:
            self._run_worker_rank(to, only)
            return
        try:
            with lease(self.workdir):
                self.run_leased(to, only)
        finally:
            if self.publisher is not None:
                self.publisher.close()

    def run_leased(self, to: str | None = None, only: str | None = None) -> None:
        """Like `run` on rank 0, for a caller that holds the lease of the work folder."""
        self._recover_renames()
        self._remove_temporary_files()
        for plan in self.plan():
            raise_lost_interrupt()
            if only is None or plan.stage.name == only:
                with self._reporting_failures(plan.stage):
                    self._run_stage(plan)
            if plan.stage.name in (to, only):
                return

    @contextmanager
    def _reporting_failures(self, stage: Stage) -> Iterator[None]:
        """On failure or interrupt: removes temporary files and reports what is kept."""
        try:
            with self._cleanup_on_failure():
                yield
        except OSError as error:
            message = explain_disk_error(error, str(self.workdir))
            if message is None:
                raise
            raise InputError(f"{stage.name}: {message}") from error
        except KeyboardInterrupt:
            complete = [
                candidate.name for candidate in self.stages if (self.folder(candidate) / MANIFEST_NAME).is_file()
            ]
            self.reporter.info(
                f"{stage.name}: interrupted; kept: complete stages ({', '.join(complete) or 'none'}) and the finished "
                f"files of {stage.name}"
            )
            raise

    @contextmanager
    def _cleanup_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._remove_temporary_files()
            raise

    def _remove_temporary_files(self, folder: Path | None = None) -> None:
        """folder: below which; None: of the whole work folder."""
        for path in sweep(folder or self.workdir):
            self.reporter.info(f"removed {path}, left by a process that was stopped")

    def _action(
        self, stage: Stage, fingerprint: str, config: Mapping[str, Any], inputs: Mapping[str, str]
    ) -> tuple[str, list[str]]:
        folder = self.folder(stage)
        resumable = self.incomplete_folder(stage, fingerprint).is_dir()
        if not (folder / MANIFEST_NAME).is_file():
            if not folder.exists() and self._is_aside(stage, fingerprint):
                return "restore", ["complete, and set aside"]
            if resumable:
                return "resume", ["incomplete; finished files are kept"]
            return "run", [f"{folder} has no manifest"] if folder.exists() else ["not run yet"]
        manifest = read_manifest(folder)
        if manifest.fingerprint == fingerprint:
            return "skip", ["complete"]
        reasons = change_reasons(manifest, stage, config, inputs) or ["the fingerprint differs"]
        if self._is_aside(stage, fingerprint):
            return "restore", reasons
        return ("resume" if resumable else "rebuild"), reasons

    def _run_stage(self, plan: StagePlan) -> None:
        stage, folder = plan.stage, self.folder(plan.stage)
        if plan.action == "skip":
            check_sizes(folder, read_manifest(folder))
            self.reporter.info(f"{stage.name}: complete, skipped")
            self._publish(stage)
            return
        check_stage_folder(stage, self.workdir)
        self.reporter.info(f"{stage.name}: {plan.action} ({'; '.join(plan.reasons[:3])})")
        if plan.action == "restore":
            self._replace(stage, self.aside(stage, plan.fingerprint))
            self._publish(stage)
            return
        started = time.monotonic()
        if self.publisher is not None and not stage.by_tasks:
            self.publisher.fill(stage.inputs)
        incomplete = self.incomplete_folder(stage, plan.fingerprint)
        self._remove_outdated(stage, incomplete)
        incomplete.mkdir(parents=True, exist_ok=True)
        digests = DigestCache()
        metadata = self._execute(plan, incomplete, digests)
        self._finish(plan, incomplete, metadata, digests)
        self._log_time(stage.name, time.monotonic() - started)
        self._publish(stage)  # before the files of its tasks are removed from the store
        self.engine.close()  # training needs the memory of idle workers

    def _publish(self, stage: Stage) -> None:
        if self.publisher is not None:
            self.publisher.publish(stage.name)

    def _execute(self, plan: StagePlan, folder: Path, digests: DigestCache) -> dict[str, Any]:
        context = StageContext(
            recipe=self.recipe,
            folder=folder,
            inputs=self._input_folders(plan),
            cache=self.workdir / "cache",
            lock=self.lock,
            engine=self.engine,
            reporter=self.reporter,
            digests=digests,
        )
        return plan.stage.run(context)

    def _input_folders(self, plan: StagePlan) -> dict[str, Path]:
        """The verified folders of the plan's input stages, by name."""
        folders = {}
        for name in plan.stage.inputs:
            folder = self.workdir / name
            manifest = read_manifest(folder)
            if manifest.fingerprint != plan.inputs[name]:
                raise InputError(
                    f"{folder}: made from another recipe or inputs than {plan.stage.name} needs; "
                    "run `gristmill run` first"
                )
            check_sizes(folder, manifest)
            if self.rank == 0:
                check_against(folder, manifest, lambda path: not path.endswith(VERIFIED_BY_READER))
            folders[name] = folder
        return folders

    def _finish(self, plan: StagePlan, incomplete: Path, metadata: Mapping[str, Any], digests: DigestCache) -> None:
        """Writes the manifest once all outputs and their names are on disk, then renames the folder.
        `_recover_renames` handles a kill between the two renames."""
        stage = plan.stage
        origin: dict[str, Any] = {"recipe": self.recipe.model_dump(mode="json")}
        if stage.reads_raw:
            origin["lock"] = self.lock.model_dump(mode="json")
        for folder in (incomplete, self.workdir / "cache"):
            self._remove_temporary_files(folder)  # of workers that were lost while the driver went on
        sync_tree(incomplete)
        identity = StageIdentity(stage.name, stage.code_version, plan.config, plan.inputs)
        write_manifest(incomplete, identity, metadata, origin, stage.libraries, digests)
        sync(incomplete)
        self._replace(stage, incomplete)

    def _replace(self, stage: Stage, made: Path) -> None:
        """Gives `made` the stage's name. What had it moves aside, under its own fingerprint. `_recover_renames` handles
        a kill between the renames."""
        folder, old = self.folder(stage), self._old(stage)
        if folder.exists():
            folder.rename(old)
        made.rename(folder)
        sync(self.workdir)
        if old.exists():
            self._set_aside(stage, old)

    def aside(self, stage: Stage, fingerprint: str) -> Path:
        """Where the stage's folder of another recipe is kept."""
        return self.workdir / f"{stage.name}.superseded-{fingerprint[:12]}"

    def _is_aside(self, stage: Stage, fingerprint: str) -> bool:
        folder = self.aside(stage, fingerprint)
        return (folder / MANIFEST_NAME).is_file() and read_manifest(folder).fingerprint == fingerprint

    def _set_aside(self, stage: Stage, old: Path) -> None:
        """Nothing complete is deleted without being asked: it takes days to make, and a dial to ask for it again."""
        kept = self.aside(stage, read_manifest(old).fingerprint)
        if self.overwrite or kept.exists():
            shutil.rmtree(old, ignore_errors=True)
            return
        old.rename(kept)
        sync(self.workdir)
        if not self.several_recipes:
            self.reporter.info(
                f"{stage.name}: what the other recipe made is kept in {kept}; remove it, or run with --overwrite to "
                "replace"
            )

    def _old(self, stage: Stage) -> Path:
        return self.workdir / f".{stage.name}-old"

    def _recover_renames(self) -> None:
        """After a kill between the renames of `_replace`: restores the previous folder, or sets it aside."""
        for stage in self.stages:
            if self._old(stage).exists():
                if self.folder(stage).exists():
                    self._set_aside(stage, self._old(stage))
                else:
                    self._old(stage).rename(self.folder(stage))

    def _remove_outdated(self, stage: Stage, keep: Path) -> None:
        """Incomplete folders of other recipes; those of training hold checkpoints, and stay for when it goes on."""
        if stage.parallel and not self.overwrite:
            return
        for path in sorted(self.workdir.glob(f".{stage.name}-*")):
            if path != keep:
                self.reporter.info(f"{stage.name}: removing {path.name}, an incomplete run of another recipe")
                remove_tree(path)

    def _log_time(self, stage: str, seconds: float) -> None:
        """Times go to logs/, not to the manifests: equal inputs give equal manifests."""
        path = self.workdir / LOG_FOLDER / TIMES_NAME
        before = path.read_bytes() if path.exists() else b""
        write_atomic(path, before + json.dumps({"stage": stage, "seconds": round(seconds, 3)}).encode() + b"\n")

    def _run_worker_rank(self, to: str | None, only: str | None) -> None:
        """Ranks other than 0: run parallel stages, and wait for rank 0 to finish the others."""
        for plan in self.plan():
            stage = plan.stage
            if only is None or stage.name == only:
                if plan.action not in ("skip", "restore") and stage.parallel:
                    while not self.incomplete_folder(stage, plan.fingerprint).is_dir():
                        time.sleep(POLL_SECONDS)
                    self._execute(plan, self.incomplete_folder(stage, plan.fingerprint), DigestCache())
                self._wait_until_complete(stage, plan.fingerprint)
            if stage.name in (to, only):
                return

    def _wait_until_complete(self, stage: Stage, fingerprint: str) -> None:
        folder = self.folder(stage)
        while not (folder / MANIFEST_NAME).is_file() or read_manifest(folder).fingerprint != fingerprint:
            time.sleep(POLL_SECONDS)


def change_reasons(manifest: Manifest, stage: Stage, config: Mapping[str, Any], inputs: Mapping[str, str]) -> list[str]:
    """Differences between a complete stage and the planned one: one line per field."""
    reasons = []
    if manifest.code_version != stage.code_version:
        reasons.append(f"code version of the stage: {manifest.code_version} -> {stage.code_version}")
    reasons += differing_fields(manifest.config, json.loads(json.dumps(config)))
    reasons += [
        f"input {name}"
        for name in sorted(manifest.inputs.keys() | inputs.keys())
        if manifest.inputs.get(name) != inputs.get(name)
    ]
    return reasons


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises InputError unless every file exists with its size; `gristmill verify` compares the bytes too."""
    for output in manifest.outputs:
        path = folder / output.path
        size = path.stat().st_size if path.is_file() else None
        if size != output.bytes:
            state = "missing" if size is None else f"{size} bytes"
            raise InputError(
                f"{path}: {state}, its manifest says {output.bytes} bytes; `gristmill verify {folder}` lists "
                f"all differences; remove {folder} to run the stage again"
            )
