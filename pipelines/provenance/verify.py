"""Verifies a work folder or one stage's folder against its manifests: files, fingerprints, links between stages."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.data_pipeline.annotate.tombstones import TOMBSTONES_NAME, read_tombstones, write_tombstones
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import digest_changes, is_address, is_temporary, stubs_below
from gristmill.foundation.lock import LOCK_NAME, Lock, read_lock, write_lock
from gristmill.foundation.manifest import (
    CACHE_FOLDER,
    LOG_FOLDER,
    MANIFEST_NAME,
    Manifest,
    StageIdentity,
    differences,
    read_manifest,
)
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.provenance.forget.statement import STATEMENTS_FOLDER, wrong_with_statements
from gristmill.pipelines.recipes.recipe_file import validate
from gristmill.pipelines.stages.runner import RunContext, Runner
from gristmill.pipelines.stages.stage import Stage
from gristmill.pipelines.stages.stage_list import with_report
from gristmill.pipelines.workdir.raw_files import lock_raw_files
from gristmill.pipelines.workdir.remote import LEASE_NAME, MARK_NAME, RemoteWork, lease, local_mirror
from gristmill.training.config.train import STEPS_WITHOUT_REPLICAS

PAPERS_FOLDER, CROISSANT_NAME = "summary", "croissant.json"  # of `gristmill summary`, whose --check compares them
# of a work folder, in no manifest
OTHER_NAMES = (
    LOCK_NAME,
    LEASE_NAME,
    LOG_FOLDER,
    CACHE_FOLDER,
    MARK_NAME,
    PAPERS_FOLDER,
    CROISSANT_NAME,
    TOMBSTONES_NAME,
    STATEMENTS_FOLDER,
)
INCOMPLETE = re.compile(r"\.[a-z]+-([0-9a-f]{32}|old)")
ASIDE = ".superseded-"  # in the name of a stage's folder that another recipe made
RAW = "raw:"  # prefix of inputs that are raw files of a source, not a stage


@dataclass
class Verification:
    """lines: one summary per folder. wrong: one message per file, fingerprint or link that differs from a manifest."""

    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def verify(folder: Path) -> Verification:
    """folder: a stage's folder or a work folder. Raises InputError if it holds no manifest."""
    verification = Verification()
    if (folder / MANIFEST_NAME).is_file():
        _verify_stage(folder, verification)
        return verification
    stages = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))
    if not stages:
        raise InputError(f"{folder}: no {MANIFEST_NAME} here or one level below; nothing to verify")
    for stage in stages:
        _verify_stage(stage, verification)
    verification.wrong += _wrong_with_lock(folder)
    verification.wrong += wrong_with_statements(folder, verification.lines)
    for path in sorted(set(folder.iterdir()) - set(stages)):
        if INCOMPLETE.fullmatch(path.name) and path.is_dir():
            verification.lines.append(
                f"{path}: incomplete stage, in no manifest; `gristmill run` resumes or removes it"
            )
        elif path.name not in OTHER_NAMES:
            verification.wrong.append(f"{path}: in no manifest; move it out of {folder}")
    return verification


def _verify_stage(folder: Path, verification: Verification) -> None:
    try:
        manifest = read_manifest(folder)
        wrong = [*differences(folder, manifest), *_temporary_files(folder), *_wrong_with_inputs(folder, manifest)]
    except InputError as error:
        verification.lines.append(f"{folder}: the manifest is damaged")
        verification.wrong.append(str(error))
        return
    verification.lines.append(
        f"{folder}: {len(manifest.outputs)} files, {'identical' if not wrong else f'{len(wrong)} differ'}"
    )
    if stubs := list(stubs_below(folder)):
        remote = RemoteWork.of_mirror(folder)
        if remote is None:
            verification.wrong.append(
                f"{folder}: {len(stubs)} files are stubs of objects in a store, without content; copy them from there"
            )
        else:
            verification.lines.append(
                f"{folder}: {len(stubs)} of these files are in the store and were not read; `gristmill verify "
                f"{remote.store.address}` reads them"
            )
    verification.wrong += wrong


def _temporary_files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if is_temporary(path) and path.is_file():
            yield f"{path}: in no manifest, temporary file of a process that was stopped; `gristmill run` removes it"


def _wrong_with_inputs(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Compares the recomputed fingerprint, and those of the input stages and of the locked raw files."""
    path = folder / MANIFEST_NAME
    computed = StageIdentity(manifest.stage, manifest.code_version, manifest.config, manifest.inputs).fingerprint
    if computed != manifest.fingerprint:
        yield f"{path}: fingerprint {manifest.fingerprint}, but stage, config and inputs give {computed}"
    for name, expected in sorted(manifest.inputs.items()):
        if name.startswith(RAW) or ASIDE in folder.name:  # what was set aside was made from other inputs
            continue
        input_folder = folder.parent / name
        if not (input_folder / MANIFEST_NAME).is_file():
            continue
        actual = _fingerprint_of(input_folder)
        if actual not in (None, expected):
            yield f"{path}: made from {name} {expected}, but {input_folder} is {actual}; `gristmill run` rebuilds it"
    if "lock" in manifest.origin:
        locked_digests = _locked_digests(Lock.model_validate(manifest.origin["lock"]))
        if locked_digests != {name: digest for name, digest in manifest.inputs.items() if name.startswith(RAW)}:
            yield f"{path}: its inputs differ from the raw files that its lock pins"


def _locked_digests(lock: Lock) -> dict[str, str]:
    return {RAW + name: digest for name, digest in lock.identity().items()}


def _fingerprint_of(folder: Path) -> str | None:
    """None if the manifest is damaged, which `_verify_stage` reports for that folder."""
    try:
        return read_manifest(folder).fingerprint
    except InputError:
        return None


def _wrong_with_lock(workdir: Path) -> Iterator[str]:
    """Checks that lock.json is readable and pins the raw files that the stages were made from."""
    path = workdir / LOCK_NAME
    try:
        lock = read_lock(path)
    except InputError as error:
        yield str(error)
        return
    if lock is None:
        return
    locked_digests = _locked_digests(lock)
    for manifest_path in sorted(workdir.glob(f"*/{MANIFEST_NAME}")):
        try:
            inputs = read_manifest(manifest_path.parent).inputs
        except InputError:
            continue
        for name, expected in sorted(inputs.items()):
            if name.startswith(RAW) and locked_digests.get(name) != expected:
                yield f"{path}: source {name.removeprefix(RAW)}: it pins other raw files than {manifest_path}"


# Rebuilds a stage in another folder from its manifest alone and compares every output byte.


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
    if original.metadata.get(STEPS_WITHOUT_REPLICAS):
        raise InputError(
            f"{folder}: replicas were lost in {original.metadata[STEPS_WITHOUT_REPLICAS]} steps of this run; their "
            "samples were left out (metrics.jsonl lists them); a run that loses none gives other bytes"
        )
    recipe = validate(original.origin["recipe"], str(folder / MANIFEST_NAME))
    lock = Lock(sources=())
    if recipe.sources:
        lock = Lock.model_validate(_manifest_with_lock(folder, original).origin["lock"])
    needed = stages[: stages.index(stage) + 1]  # the recipe may have no sections for those after it
    if stage.name == "report":  # on the stages that were complete
        needed = with_report([candidate for candidate in needed if candidate.name in original.inputs])
    runner = Runner(recipe, workdir, needed, lock, engine.reporter, RunContext(engine))
    with lease(workdir):
        write_lock(workdir / LOCK_NAME, lock)
        _copy_tombstones(folder, workdir)
        lock_raw_files(recipe, workdir, engine)
        runner.run_leased(to=stage.name)
    return compare_outputs(original, read_manifest(workdir / stage.name))


def _copy_tombstones(folder: Path, workdir: Path) -> None:
    """Gives the new work folder the tombstones that the corpus was made with."""
    corpus = folder if (folder / TOMBSTONES_NAME).is_file() else folder.parent / "curate"
    tombstones = read_tombstones(corpus)
    if tombstones is not None:
        write_tombstones(workdir, tombstones)


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


# `verify`, `reproduce` and `plan` of a work folder in a store: of a fresh copy, not of the mirror, which may be in
# use.


def verify_address(location: str) -> Verification:
    """As `verify`, of what is published at the address, every byte of which is downloaded."""
    with _copied(location, with_outputs=True) as (remote, folder):
        verification = verify(folder)
        extra = [f"{remote.store.address}/{name}: in no manifest; delete it" for name in remote.unlisted()]
    here, there = str(remote.mirror), remote.store.address
    return Verification(
        [line.replace(here, there) for line in verification.lines],
        [line.replace(here, there) for line in verification.wrong] + extra,
    )


@contextmanager
def manifest_folder(location: str) -> Iterator[Path]:
    """A folder with the manifest; of an address that is a copy without the stage's other files."""
    if is_address(location):
        with _copied(location, with_outputs=False) as (_, folder):
            yield folder
    else:
        path = Path(location)
        yield path.parent if path.name == MANIFEST_NAME else path


@contextmanager
def plan_folder(folder: Path) -> Iterator[Path]:
    """The work folder; of a mirror a folder with the manifests that are published now, and with its interrupted
    stages."""
    remote = RemoteWork.of_mirror(folder)
    if remote is None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        copy = RemoteWork(Path(name), remote.store)
        copy.fetch(with_outputs=False)
        for path in folder.glob(".*-*"):
            (copy.mirror / path.name).mkdir()
        yield copy.mirror


@contextmanager
def _copied(location: str, with_outputs: bool) -> Iterator[tuple[RemoteWork, Path]]:
    mirror = local_mirror(location)
    behind = RemoteWork.of_mirror(mirror)
    assert behind is not None
    with tempfile.TemporaryDirectory() as name:
        copy = RemoteWork(Path(name), behind.store)
        if not copy.fetch(with_outputs=with_outputs):
            raise InputError(f"{location}: no published stage here (published.json); check the address")
        yield copy, copy.mirror / mirror.relative_to(behind.mirror)
