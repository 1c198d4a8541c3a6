"""Rebuilds a stage in another folder from its manifest alone and compares every output byte."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import digest_changes
from gristmill.foundation.lock import LOCK_NAME, Lock, write_lock
from gristmill.foundation.manifest import MANIFEST_NAME, Manifest, read_manifest
from gristmill.pipelines.lease import lease
from gristmill.pipelines.raw_files import pin
from gristmill.pipelines.recipe_file import validate
from gristmill.pipelines.runner import Processes, Runner
from gristmill.pipelines.stage import Stage


@dataclass(frozen=True)
class Reproduction:
    """files: number of outputs. differences: one line per file that differs. libraries: versions that differ."""

    files: int
    differences: tuple[str, ...]
    libraries: tuple[str, ...]


def reproduce(manifest_path: Path, workdir: Path, stages: Sequence[Stage], engine: Engine) -> Reproduction:
    """Runs the manifest's recipe up to its stage on the raw files that its lock pins.

    Raises InputError if a raw file is missing or differs, or if another process writes to the work folder."""
    folder = manifest_path.parent if manifest_path.name == MANIFEST_NAME else manifest_path
    original = read_manifest(folder)
    stage = next((stage for stage in stages if stage.name == original.stage), None)
    if stage is None:
        raise InputError(f"{folder}: {original.stage!r} is not a stage of this version of gristmill")
    recipe = validate(original.origin["recipe"], str(folder / MANIFEST_NAME))
    lock = Lock(sources=())
    if recipe.sources:
        lock = Lock.model_validate(_manifest_with_lock(folder, original).origin["lock"])
    needed = stages[: stages.index(stage) + 1]  # the recipe may have no sections for those after it
    runner = Runner(recipe, workdir, needed, lock, engine.reporter, Processes(engine))
    with lease(workdir):
        write_lock(workdir / LOCK_NAME, lock)
        pin(recipe, workdir, engine)
        runner.run_leased(to=stage.name)
    return compare_outputs(original, read_manifest(workdir / stage.name))


def compare_outputs(original: Manifest, rebuilt: Manifest) -> Reproduction:
    differences = digest_changes(
        {output.path: output.sha256 for output in original.outputs},
        {output.path: output.sha256 for output in rebuilt.outputs},
    )
    if original.fingerprint != rebuilt.fingerprint:
        differences.append(f"fingerprint: {original.fingerprint} became {rebuilt.fingerprint}")
    versions = [
        f"{name}: {original.libraries.get(name)} then, {rebuilt.libraries.get(name)} now"
        for name in sorted(original.libraries.keys() | rebuilt.libraries.keys())
        if original.libraries.get(name) != rebuilt.libraries.get(name)
    ]
    return Reproduction(len(original.outputs), tuple(differences), tuple(versions))


def _manifest_with_lock(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest itself if it holds a lock, else that of the stage curate in the same work folder."""
    if "lock" in manifest.origin:
        return manifest
    curate = folder.parent / "curate"
    if not (curate / MANIFEST_NAME).is_file():
        raise InputError(f"{folder}: its raw files are pinned in {curate / MANIFEST_NAME}, which does not exist")
    return read_manifest(curate)
