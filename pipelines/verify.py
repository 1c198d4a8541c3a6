"""Verifies a work folder or one stage's folder against its manifests: files, fingerprints, links between stages."""

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
    StageIdentity,
    differences,
    read_manifest,
)
from gristmill.pipelines.lease import LEASE_NAME
from gristmill.pipelines.remote_work import MARK_NAME

OTHER_NAMES = (LOCK_NAME, LEASE_NAME, LOG_FOLDER, CACHE_FOLDER, MARK_NAME)  # of a work folder, in no manifest
INCOMPLETE = re.compile(r"\.[a-z]+-([0-9a-f]{32}|old)")
RAW = "raw:"  # prefix of inputs that are raw files of a source, not a stage


@dataclass
class Verification:
    """lines: one summary per folder. wrong: one message per file, fingerprint or link that differs from a manifest."""

    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def verify(folder: Path) -> Verification:
    """folder: a stage's folder or a work folder. Raises InputError if it holds no manifest."""
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
        if INCOMPLETE.fullmatch(path.name) and path.is_dir():
            found.lines.append(f"{path}: incomplete stage, in no manifest; `gristmill run` resumes or removes it")
        elif path.name not in OTHER_NAMES:
            found.wrong.append(f"{path}: in no manifest; move it out of {folder}")
    return found


def _verify_stage(folder: Path, found: Verification) -> None:
    try:
        manifest = read_manifest(folder)
        wrong = [*differences(folder, manifest), *_temporary_files(folder), *_wrong_with_inputs(folder, manifest)]
    except InputError as error:
        found.lines.append(f"{folder}: the manifest is damaged")
        found.wrong.append(str(error))
        return
    found.lines.append(
        f"{folder}: {len(manifest.outputs)} files, {'identical' if not wrong else f'{len(wrong)} differ'}"
    )
    found.wrong += wrong


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
        if name.startswith(RAW):
            continue
        input_folder = folder.parent / name
        if not (input_folder / MANIFEST_NAME).is_file():
            continue
        actual = _fingerprint_of(input_folder)
        if actual not in (None, expected):
            yield f"{path}: made from {name} {expected}, but {input_folder} is {actual}; `gristmill run` rebuilds it"
    if "lock" in manifest.origin:
        pinned = _pinned(Lock.model_validate(manifest.origin["lock"]))
        if pinned != {name: digest for name, digest in manifest.inputs.items() if name.startswith(RAW)}:
            yield f"{path}: its inputs differ from the raw files that its lock pins"


def _pinned(lock: Lock) -> dict[str, str]:
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
    pinned = _pinned(lock)
    for manifest_path in sorted(workdir.glob(f"*/{MANIFEST_NAME}")):
        try:
            inputs = read_manifest(manifest_path.parent).inputs
        except InputError:
            continue
        for name, expected in sorted(inputs.items()):
            if name.startswith(RAW) and pinned.get(name) != expected:
                yield f"{path}: source {name.removeprefix(RAW)}: it pins other raw files than {manifest_path}"
