"""Manifest of a stage's folder: its outputs, their digests, and the inputs. Written last; a folder without one is
incomplete."""

import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import entries_below, file_digest, is_temporary, write_atomic
from gristmill.foundation.fingerprint import digested_json, fingerprint, read_digested_json

MANIFEST_NAME = "manifest.json"
LOG_FOLDER = "logs"  # times, rates and TensorBoard events: they differ in every run and are in no manifest
CACHE_FOLDER = "cache"  # derived data such as verification results and tables; in no manifest


class Output(Config):
    """One file of the folder; `path` is relative to it, with forward slashes."""

    path: str
    bytes: int
    sha256: str


class Manifest(Config):
    """fingerprint = hash(stage, code version, config, input fingerprints): never a path, a time or a worker count.

    origin: what `reproduce` needs in addition: the whole recipe and (for the stage that reads raw files) the lock."""

    fingerprint: str
    stage: str
    code_version: int
    config: dict[str, Any]
    inputs: dict[str, str]
    libraries: dict[str, str]
    metadata: dict[str, Any]
    origin: dict[str, Any]
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class StageIdentity:
    """Recipe, code and inputs that determine a stage's output. config: JSON. inputs: fingerprints by name."""

    stage: str
    code_version: int
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        return fingerprint(
            {
                "stage": self.stage,
                "code_version": self.code_version,
                "config": dict(self.config),
                "inputs": dict(self.inputs),
            }
        )


def write_manifest(
    folder: Path,
    identity: StageIdentity,
    metadata: Mapping[str, Any],
    origin: Mapping[str, Any],
    libraries: tuple[str, ...] = (),
    digest: Callable[[Path], str] = file_digest,
) -> Manifest:
    """Digest every file below the folder, except logs and cache, and write the manifest; the folder is then
    complete."""
    manifest = Manifest(
        fingerprint=identity.fingerprint,
        stage=identity.stage,
        code_version=identity.code_version,
        config=dict(identity.config),
        inputs=dict(identity.inputs),
        libraries={"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in sorted(libraries)},
        metadata=dict(metadata),
        origin=dict(origin),
        outputs=tuple(describe(folder, path, digest) for path in output_files(folder)),
    )
    write_atomic(folder / MANIFEST_NAME, digested_json(manifest.model_dump(mode="json")))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest. Raises InputError if it is missing, unreadable or altered."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise InputError(f"{folder}: no {MANIFEST_NAME}, so this folder is incomplete; run the stage that writes it")
    try:
        return Manifest.model_validate(read_digested_json(path.read_bytes()))
    except ValueError as error:
        raise InputError(f"{path}: not a manifest ({error}); remove the folder and run its stage again") from error


def output_files(folder: Path) -> list[Path]:
    """The files that the manifest lists, sorted by name."""
    start = len(str(folder)) + 1
    parts_of = {
        entry.path: tuple(entry.path[start:].split(os.sep))
        for entry in entries_below(folder)
        if entry.is_file() and not is_temporary(entry)
    }
    return [
        Path(path)
        for path, parts in sorted(parts_of.items(), key=itemgetter(1))
        if parts != (MANIFEST_NAME,) and LOG_FOLDER not in parts[:-1] and parts[0] != CACHE_FOLDER
    ]


def describe(folder: Path, path: Path, digest: Callable[[Path], str] = file_digest) -> Output:
    return Output(path=path.relative_to(folder).as_posix(), bytes=path.stat().st_size, sha256=digest(path))


def differences(folder: Path, manifest: Manifest, digest: Callable[[Path], str] = file_digest) -> list[str]:
    """One line for each file that is missing, extra or different from the manifest; empty if there are none."""
    return missing_and_extra(folder, manifest) + changed(folder, manifest.outputs, digest)


def missing_and_extra(folder: Path, manifest: Manifest) -> list[str]:
    """One line for each file that is only in the manifest or only in the folder."""
    expected = {output.path for output in manifest.outputs}
    present = {path.relative_to(folder).as_posix() for path in output_files(folder)}
    missing = [f"{folder / name}: missing" for name in sorted(expected - present)]
    return missing + [f"{folder / name}: not in the manifest" for name in sorted(present - expected)]


def changed(folder: Path, outputs: Sequence[Output], digest: Callable[[Path], str] = file_digest) -> list[str]:
    """One line for each of these files that is there with other bytes."""
    problems = []
    for expected in sorted(outputs, key=lambda output: output.path):
        path = folder / expected.path
        if not path.is_file():
            continue
        actual = describe(folder, path, digest)
        if actual.bytes != expected.bytes:
            problems.append(f"{path}: {actual.bytes} bytes, the manifest says {expected.bytes}")
        elif actual.sha256 != expected.sha256:
            problems.append(f"{path}: sha256 {actual.sha256[:16]}..., the manifest says {expected.sha256[:16]}...")
    return problems
