"""Whether a work folder, or one stage's folder, is as its manifests say: every file, every fingerprint, every link."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import is_temporary
from gristmill.foundation.lock import LOCK_NAME, Lock, read_lock
from gristmill.foundation.manifest import (
    CACHE_FOLDER,
    LOG_FOLDER,
    MANIFEST_NAME,
    Manifest,
    differences,
    read_manifest,
    stage_fingerprint,
)
from gristmill.pipelines.lease import LEASE_NAME

BESIDE_STAGES = (LOCK_NAME, LEASE_NAME, LOG_FOLDER, CACHE_FOLDER)  # of a work folder, known and in no manifest
HALF_DONE = re.compile(r"\.[a-z]+-([0-9a-f]{32}|old)")
RAW = "raw:"  # an input that is a source's raw files, not a stage


@dataclass
class Verification:
    """lines: one a folder, for people. wrong: one a file, fingerprint or link that is not as a manifest says."""

    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def verify(folder: Path) -> Verification:
    """folder: a stage's, or a work folder. Raises InputError if it holds no manifest."""
    found = Verification()
    if (folder / MANIFEST_NAME).is_file():
        _verify_stage(folder, found)
        return found
    stages = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))
    if not stages:
        raise InputError(f"{folder}: no {MANIFEST_NAME} here or one level below; nothing to verify")
    for stage in stages:
        _verify_stage(stage, found)
    found.wrong += _wrong_with_lock(folder)
    for path in sorted(set(folder.iterdir()) - set(stages)):
        if HALF_DONE.fullmatch(path.name) and path.is_dir():
            found.lines.append(f"{path}: half done, in no manifest; `gristmill run` goes on with it or removes it")
        elif path.name not in BESIDE_STAGES:
            found.wrong.append(f"{path}: in no manifest; move it out of {folder}")
    return found


def _verify_stage(folder: Path, found: Verification) -> None:
    try:
        manifest = read_manifest(folder)
        wrong = [*differences(folder, manifest), *_left_behind(folder), *_wrong_with_inputs(folder, manifest)]
    except InputError as error:
        found.lines.append(f"{folder}: its manifest is damaged")
        found.wrong.append(str(error))
        return
    found.lines.append(
        f"{folder}: {len(manifest.outputs)} files, {'identical' if not wrong else f'{len(wrong)} differ'}"
    )
    found.wrong += wrong


def _left_behind(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if is_temporary(path) and path.is_file():
            yield f"{path}: in no manifest, left behind by a writer that was killed; `gristmill run` removes it"


def _wrong_with_inputs(folder: Path, manifest: Manifest) -> Iterator[str]:
    """The fingerprint, computed again, and that of every input that stands beside the folder or is in its lock."""
    path = folder / MANIFEST_NAME
    computed = stage_fingerprint(manifest.stage, manifest.code_version, manifest.config, manifest.inputs)
    if computed != manifest.fingerprint:
        yield f"{path}: fingerprint {manifest.fingerprint}, but its stage, config and inputs give {computed}"
    for name, wanted in sorted(manifest.inputs.items()):
        if name.startswith(RAW):
            continue
        beside = folder.parent / name
        if not (beside / MANIFEST_NAME).is_file():
            continue
        stands = _fingerprint_of(beside)
        if stands not in (None, wanted):
            yield f"{path}: made from {name} {wanted}, but {beside} is {stands}; `gristmill run` makes it again"
    if "lock" in manifest.origin:
        pinned = {
            RAW + name: digest for name, digest in Lock.model_validate(manifest.origin["lock"]).identity().items()
        }
        if pinned != {name: digest for name, digest in manifest.inputs.items() if name.startswith(RAW)}:
            yield f"{path}: its inputs are not the raw files that its lock pins"


def _pinned(lock: Lock) -> dict[str, str]:
    return {RAW + name: digest for name, digest in lock.identity().items()}


def _fingerprint_of(folder: Path) -> str | None:
    """None where the manifest is damaged, which is said of its own folder."""
    try:
        return read_manifest(folder).fingerprint
    except InputError:
        return None


def _wrong_with_lock(workdir: Path) -> Iterator[str]:
    """lock.json is readable, and pins the raw files that the stages were made from."""
    path = workdir / LOCK_NAME
    try:
        lock = read_lock(path)
    except InputError as error:
        yield str(error)
        return
    if lock is None:
        return
    pinned = _pinned(lock)
    for manifest_path in sorted(workdir.glob(f"*/{MANIFEST_NAME}")):
        try:
            inputs = read_manifest(manifest_path.parent).inputs
        except InputError:
            continue
        for name, wanted in sorted(inputs.items()):
            if name.startswith(RAW) and pinned.get(name) != wanted:
                yield f"{path}: source {name.removeprefix(RAW)}: pins other raw files than {manifest_path} names"
