"""Builds a stage again, in another folder, from nothing but its manifest, and compares every byte."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import digest_changes
from gristmill.foundation.lock import LOCK_NAME, Lock, write_lock
from gristmill.foundation.manifest import MANIFEST_NAME, Manifest, read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.raw_files import pin
from gristmill.pipelines.recipe_file import validate
from gristmill.pipelines.runner import Runner
from gristmill.pipelines.stage import Stage


@dataclass(frozen=True)
class Verdict:
    """differences: one line for each file that is not as the manifest says; libraries: versions that differ."""

    files: int
    differences: tuple[str, ...]
    libraries: tuple[str, ...]


def reproduce(manifest_path: Path, workdir: Path, stages: Sequence[Stage], workers: int, reporter: Reporter) -> Verdict:
    """Runs the recipe in the manifest up to its stage, on the raw files its lock pins.

    Raises InputError if a raw file is gone or differs, or if the work folder already holds something else."""
    folder = manifest_path.parent if manifest_path.name == MANIFEST_NAME else manifest_path
    original = read_manifest(folder)
    stage = next((stage for stage in stages if stage.name == original.stage), None)
    if stage is None:
        raise InputError(f"{folder}: {original.stage!r} is no stage of this version of gristmill")
    recipe = validate(original.origin["recipe"], str(folder / MANIFEST_NAME))
    lock = Lock.model_validate(_manifest_with_lock(folder, original).origin["lock"])
    workdir.mkdir(parents=True, exist_ok=True)
    write_lock(workdir / LOCK_NAME, lock)
    pin(recipe, workdir, reporter, workers)
    Runner(recipe, workdir, stages, lock, reporter, workers).run(to=stage.name)
    return compare(original, read_manifest(workdir / stage.name))


def compare(original: Manifest, again: Manifest) -> Verdict:
    said = digest_changes(
        {output.path: output.sha256 for output in original.outputs},
        {output.path: output.sha256 for output in again.outputs},
    )
    if original.fingerprint != again.fingerprint:
        said.append(f"fingerprint: {original.fingerprint} became {again.fingerprint}")
    versions = [
        f"{name}: {original.libraries.get(name)} then, {again.libraries.get(name)} now"
        for name in sorted(original.libraries.keys() | again.libraries.keys())
        if original.libraries.get(name) != again.libraries.get(name)
    ]
    return Verdict(len(original.outputs), tuple(said), tuple(versions))


def _manifest_with_lock(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest itself, or that of the stage beside it which reads the raw files."""
    if "lock" in manifest.origin:
        return manifest
    beside = folder.parent / "curate"
    if not (beside / MANIFEST_NAME).is_file():
        raise InputError(f"{folder}: its raw files are pinned in {beside / MANIFEST_NAME}, which is not there")
    return read_manifest(beside)
