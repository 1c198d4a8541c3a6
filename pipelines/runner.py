"""Runs the stages in their order: skips what is whole, goes on with what is half done, says why it does what it does.

A stage's folder is WORKDIR/NAME. While it is being filled it is WORKDIR/.NAME-FINGERPRINT, so a half-done folder is
taken up again only by the very same work; the manifest is written last and the folder then renamed."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.foundation.canonical_json import differing_fields
from gristmill.foundation.checked_outputs import check_against
from gristmill.foundation.disk_errors import disk_trouble
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import sweep, sync, write_atomic
from gristmill.foundation.lock import Lock
from gristmill.foundation.manifest import (
    LOG_FOLDER,
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    stage_fingerprint,
    write_manifest,
)
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.config import Recipe
from gristmill.pipelines.lease import lease
from gristmill.pipelines.stage import Stage, StageContext

SECONDS_BETWEEN_LOOKS = 0.5
TIMES_NAME = "times.jsonl"
# Of the largest outputs, which their readers hold to their digests: indexed data, parts of a checkpoint.
CHECKED_WHERE_READ = (".bin", ".idx", ".distcp")


@dataclass(frozen=True)
class StagePlan:
    """action: skip (whole), resume (half done), run (nothing there) or rebuild (whole, but of other inputs)."""

    stage: Stage
    fingerprint: str
    config: dict[str, Any]
    inputs: dict[str, str]
    action: str
    reasons: tuple[str, ...]


class Runner:
    """rank and world_size are this process's place among those of torchrun; rank 0 alone writes."""

    def __init__(
        self,
        recipe: Recipe,
        workdir: Path,
        stages: Sequence[Stage],
        lock: Lock,
        reporter: Reporter,
        workers: int = 1,
        rank: int = 0,
    ):
        self.recipe, self.workdir, self.stages, self.lock = recipe, workdir, stages, lock
        self.reporter, self.workers, self.rank = reporter, workers, rank

    def folder(self, stage: Stage) -> Path:
        return self.workdir / stage.name

    def half_done(self, stage: Stage, fingerprint: str) -> Path:
        return self.workdir / f".{stage.name}-{fingerprint}"

    def plan(self) -> list[StagePlan]:
        """What would be done to each stage, and why. Writes nothing."""
        fingerprints: dict[str, str] = {}
        plans = []
        for stage in self.stages:
            config = stage.config(self.recipe)
            inputs = {name: fingerprints[name] for name in stage.inputs}
            if stage.reads_raw:
                inputs |= {f"raw:{name}": digest for name, digest in self.lock.identity().items()}
            fingerprints[stage.name] = stage_fingerprint(stage.name, stage.code_version, config, inputs)
            action, reasons = self._state(stage, fingerprints[stage.name], config, inputs)
            plans.append(StagePlan(stage, fingerprints[stage.name], config, inputs, action, tuple(reasons)))
        return plans

    def run(self, to: str | None = None, only: str | None = None) -> None:
        """Runs the stages up to `to`, or `only` the one named (its inputs must be whole)."""
        if self.rank != 0:
            self._run_beside(to, only)
            return
        with lease(self.workdir):
            self._restore()
            self._sweep_temporaries()
            for plan in self.plan():
                if only is None or plan.stage.name == only:
                    with self._stopping(plan.stage):
                        self._bring_about(plan)
                if plan.stage.name in (to, only):
                    return

    @contextmanager
    def _stopping(self, stage: Stage) -> Iterator[None]:
        """Of a stage that ends early: says what is kept, and removes what was being written."""
        try:
            with self._swept():
                yield
        except OSError as error:
            said = disk_trouble(error, str(self.workdir))
            if said is None:
                raise
            raise InputError(f"{stage.name}: {said}") from error
        except KeyboardInterrupt:
            whole = [each.name for each in self.stages if (self.folder(each) / MANIFEST_NAME).is_file()]
            self.reporter.say(
                f"{stage.name}: interrupted; kept: {', '.join(whole) or 'no stage'} whole, and the finished files of "
                f"{stage.name}"
            )
            raise

    @contextmanager
    def _swept(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._sweep_temporaries()
            raise

    def _sweep_temporaries(self) -> None:
        for path in sweep(self.workdir):
            self.reporter.say(f"removed {path}, which a writer that was stopped left behind")

    def _state(
        self, stage: Stage, fingerprint: str, config: Mapping[str, Any], inputs: Mapping[str, str]
    ) -> tuple[str, list[str]]:
        folder = self.folder(stage)
        resumable = self.half_done(stage, fingerprint).is_dir()
        if not (folder / MANIFEST_NAME).is_file():
            if resumable:
                return "resume", ["half done; whole shards are kept"]
            return "run", [f"{folder} has no manifest"] if folder.exists() else ["not there yet"]
        manifest = read_manifest(folder)
        if manifest.fingerprint == fingerprint:
            return "skip", ["whole"]
        reasons = changes(manifest, stage, config, inputs) or ["its fingerprint differs"]
        return ("resume" if resumable else "rebuild"), reasons

    def _bring_about(self, plan: StagePlan) -> None:
        stage, folder = plan.stage, self.folder(plan.stage)
        if plan.action == "skip":
            check_sizes(folder, read_manifest(folder))
            self.reporter.say(f"{stage.name}: whole, skipped")
            return
        if folder.exists() and not (folder / MANIFEST_NAME).is_file():
            raise InputError(f"{folder}: a folder without a manifest stands where {stage.name} would be; move it away")
        self.reporter.say(f"{stage.name}: {plan.action} ({'; '.join(plan.reasons[:3])})")
        started = time.monotonic()
        half_done = self.half_done(stage, plan.fingerprint)
        self._sweep(stage, half_done)
        half_done.mkdir(parents=True, exist_ok=True)
        facts = self._execute(plan, half_done)
        self._seal(plan, half_done, facts)
        self._note_time(stage.name, time.monotonic() - started)

    def _execute(self, plan: StagePlan, half_done: Path) -> dict[str, Any]:
        context = StageContext(
            recipe=self.recipe,
            folder=half_done,
            inputs=self._whole_inputs(plan),
            cache=self.workdir / "cache",
            lock=self.lock,
            workers=self.workers,
            reporter=self.reporter,
        )
        return plan.stage.run(context)

    def _whole_inputs(self, plan: StagePlan) -> dict[str, Path]:
        folders = {}
        for name in plan.stage.inputs:
            folder = self.workdir / name
            manifest = read_manifest(folder)
            if manifest.fingerprint != plan.inputs[name]:
                raise InputError(
                    f"{folder}: made from another recipe than {plan.stage.name} asks for; run `gristmill run` first"
                )
            check_sizes(folder, manifest)
            if self.rank == 0:
                check_against(folder, manifest, lambda path: not path.endswith(CHECKED_WHERE_READ))
            folders[name] = folder
        return folders

    def _seal(self, plan: StagePlan, half_done: Path, facts: Mapping[str, Any]) -> None:
        """Manifest last, then the rename. A kill between the two renames is mended by `_restore`."""
        stage = plan.stage
        origin: dict[str, Any] = {"recipe": self.recipe.model_dump(mode="json")}
        if stage.reads_raw:
            origin["lock"] = self.lock.model_dump(mode="json")
        write_manifest(
            half_done, stage.name, stage.code_version, plan.config, plan.inputs, facts, origin, stage.libraries
        )
        folder, old = self.folder(stage), self._old(stage)
        if folder.exists():
            folder.rename(old)
        half_done.rename(folder)
        sync(self.workdir)
        shutil.rmtree(old, ignore_errors=True)

    def _old(self, stage: Stage) -> Path:
        return self.workdir / f".{stage.name}-old"

    def _restore(self) -> None:
        """After a kill in the middle of a swap of folders, the old one stands again or is swept away."""
        for stage in self.stages:
            if self._old(stage).exists():
                if self.folder(stage).exists():
                    shutil.rmtree(self._old(stage))
                else:
                    self._old(stage).rename(self.folder(stage))

    def _sweep(self, stage: Stage, keep: Path) -> None:
        for path in sorted(self.workdir.glob(f".{stage.name}-*")):
            if path != keep:
                self.reporter.say(f"{stage.name}: removing {path.name}, half-done work of another recipe")
                shutil.rmtree(path)

    def _note_time(self, stage: str, seconds: float) -> None:
        """Times stand in logs/, beside the manifests and outside them."""
        path = self.workdir / LOG_FOLDER / TIMES_NAME
        before = path.read_bytes() if path.exists() else b""
        write_atomic(path, before + json.dumps({"stage": stage, "seconds": round(seconds, 3)}).encode() + b"\n")

    def _run_beside(self, to: str | None, only: str | None) -> None:
        """What a rank other than 0 does: takes part in parallel stages, waits for rank 0 in the others."""
        for plan in self.plan():
            stage = plan.stage
            if only is None or stage.name == only:
                if plan.action != "skip" and stage.parallel:
                    while not self.half_done(stage, plan.fingerprint).is_dir():
                        time.sleep(SECONDS_BETWEEN_LOOKS)
                    self._execute(plan, self.half_done(stage, plan.fingerprint))
                self._wait_until_whole(stage, plan.fingerprint)
            if stage.name in (to, only):
                return

    def _wait_until_whole(self, stage: Stage, fingerprint: str) -> None:
        folder = self.folder(stage)
        while not (folder / MANIFEST_NAME).is_file() or read_manifest(folder).fingerprint != fingerprint:
            time.sleep(SECONDS_BETWEEN_LOOKS)


def changes(manifest: Manifest, stage: Stage, config: Mapping[str, Any], inputs: Mapping[str, str]) -> list[str]:
    """What differs between a whole stage and the one wanted now, a line a field."""
    said = []
    if manifest.code_version != stage.code_version:
        said.append(f"the stage's code: version {manifest.code_version} -> {stage.code_version}")
    said += differing_fields(manifest.config, json.loads(json.dumps(config)))
    said += [
        f"input {name}"
        for name in sorted(manifest.inputs.keys() | inputs.keys())
        if manifest.inputs.get(name) != inputs.get(name)
    ]
    return said


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """A cheap look before a whole stage is used: every file is there and has its size. `verify` reads the bytes too."""
    for output in manifest.outputs:
        path = folder / output.path
        size = path.stat().st_size if path.is_file() else None
        if size != output.bytes:
            state = "missing" if size is None else f"{size} bytes"
            raise InputError(
                f"{path}: {state}, its manifest says {output.bytes} bytes; `gristmill verify {folder}` lists all, "
                f"and without {folder} the stage is built again"
            )
