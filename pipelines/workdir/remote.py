"""Work folders in object stores: `--workdir s3://bucket/run`.

A stage runs in a local folder, the mirror, and is published when it is complete: its files as
STAGE/FINGERPRINT-DIGEST/..., the manifest last, and then the pointer published.json (`publication.py`). A reader goes
by the pointer, so it sees a stage whole or not at all. The mirror is below $GRISTMILL_SCRATCH
(~/.cache/gristmill/remote). The nodes of a cluster do not share it: tasks' files travel through the store
(`runtime/tasks/task_files.py`)."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import orjson
import xxhash

from gristmill.data_pipeline.corpus.corpus_files import RemoteCorpusFiles
from gristmill.data_pipeline.indexed.format import block_mark
from gristmill.foundation.checksums import checksum_path
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import is_address, remove_tree, stub_at, stubs_below, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.lock import LOCK_NAME
from gristmill.foundation.manifest import MANIFEST_NAME, Manifest, output_files, read_manifest
from gristmill.foundation.runtime.store.store import BlockFile, Store, download_stub
from gristmill.foundation.runtime.tasks.task_files import TASKS_FOLDER, scratch_root
from gristmill.pipelines.workdir.publication import POINTER_NAME, STAGE_NAMES, Published, RemoteLease, folder_name

MIN_BLOCKS_BYTES = 64_000_000  # of a file of tokens; smaller ones are downloaded whole, and their digests compared
MARK_NAME = ".remote.json"  # in a mirror: the address behind it


def local_mirror(location: str) -> Path:
    """The local folder of an address, with a mark that names it; of `ADDRESS/STAGE/...` that folder in it.

    Nothing is read from the store."""
    parts = location.rstrip("/").removesuffix(f"/{MANIFEST_NAME}").split("/")
    stage = max((place for place, part in enumerate(parts) if place > 3 and part in STAGE_NAMES), default=len(parts))
    address, inside = "/".join(parts[:stage]), "/".join(parts[stage:])
    name = Path(urlsplit(address).path).name or urlsplit(address).netloc
    folder = scratch_root() / f"{name}-{xxhash.xxh3_64_hexdigest(address.encode())}"
    Store(address)  # refuses credentials before they are written anywhere
    try:
        if not (folder / MARK_NAME).is_file():
            write_atomic(folder / MARK_NAME, canonical_json({"address": address}))
    except OSError as error:
        raise RecipeError(
            f"{folder}: cannot hold the copy of {address} ({error.strerror}); set GRISTMILL_SCRATCH to a folder of "
            "this machine that can be written to"
        ) from error
    return folder / inside


def local_folder(location: str) -> Path:
    """The folder itself, or the mirror of an address."""
    return local_mirror(location) if is_address(location) else Path(location)


@dataclass(frozen=True)
class RemoteWork:
    """mirror: the local folder. store: what is behind it."""

    mirror: Path
    store: Store

    @classmethod
    def of_mirror(cls, folder: Path) -> "RemoteWork | None":
        """The store behind this mirror or the one that this folder is in; None for a folder of its own."""
        for mirror in (folder, *folder.parents):
            if (mirror / MARK_NAME).is_file():
                return cls(mirror, Store(orjson.loads((mirror / MARK_NAME).read_bytes())["address"]))
        return None

    def publish(self, stage: str, writer: RemoteLease) -> None:
        """Uploads the complete stage, unless it is there, and has the pointer name it and the lock.

        Raises InputError if other bytes are published under its fingerprint, and if another writer has taken over."""
        folder = self.mirror / stage
        content = (folder / MANIFEST_NAME).read_bytes()
        manifest = read_manifest(folder)
        name = folder_name(manifest.fingerprint, content)
        writer.check()
        current = Published.read(self.store)[0].stages.get(stage, "")
        if current.startswith(f"{manifest.fingerprint}-"):
            self._check_same(f"{stage}/{current}", content)
        if self.store.read(f"{stage}/{name}/{MANIFEST_NAME}") is None:
            self._upload(folder, f"{stage}/{name}", manifest, content)
        _name_published(folder, f"{stage}/{name}", manifest)
        lock = self._upload_lock()
        writer.publish(
            lambda published: replace(
                published, stages={**published.stages, stage: name}, lock=published.lock if lock is None else lock
            )
        )

    def _check_same(self, prefix: str, manifest: bytes) -> None:
        if self.store.read(f"{prefix}/{MANIFEST_NAME}") not in (None, manifest):
            raise InputError(
                f"{self.store.address}/{prefix}: holds other files for the same recipe and inputs, made with other "
                "versions of libraries; delete it there, or use another --workdir"
            )

    def _upload(self, folder: Path, prefix: str, manifest: Manifest, content: bytes) -> None:
        """The files of a complete stage, the manifest last. What a node wrote is in the store, which copies it."""
        if any(block_mark(path).is_file() for path in output_files(folder)):
            raise InputError(
                f"{self.store.address}/{prefix}: was deleted, and {folder} holds a part of it; remove that folder and "
                "run the stage again"
            )
        written = self.store.list(TASKS_FOLDER)
        for output in manifest.outputs:
            of_task, stub = f"{TASKS_FOLDER}/{output.sha256}", stub_at(folder / output.path)
            if written.get(of_task) == output.bytes:
                self.store.copy(of_task, f"{prefix}/{output.path}")
            elif stub is not None:  # of a stage that was set aside
                self.store.copy(stub.object, f"{prefix}/{output.path}")
            else:
                self.store.put(f"{prefix}/{output.path}", folder / output.path)
        self.store.put_bytes(f"{prefix}/{MANIFEST_NAME}", content)

    def _upload_lock(self) -> str | None:
        """SHA-256 of the mirror's lock, which is in the store; None if there is none."""
        if not (self.mirror / LOCK_NAME).is_file():
            return None
        content = (self.mirror / LOCK_NAME).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if self.store.read(_lock_name(digest)) != content:
            self.store.put_bytes(_lock_name(digest), content)
        return digest

    def fetch(
        self,
        stages: Sequence[str] = STAGE_NAMES,
        with_outputs: bool = True,
        in_blocks: bool = False,
        keep_stubs: bool = False,
    ) -> list[str]:
        """Downloads the published stages that the mirror lacks, and the lock; returns the published stages' names.

        in_blocks: large files of tokens are downloaded as they are read. keep_stubs: what nodes wrote is left where it
        is."""
        published, _ = Published.read(self.store)
        if published.lock and not (self.mirror / LOCK_NAME).exists():
            lock = self.store.read(_lock_name(published.lock))
            if lock is None or hashlib.sha256(lock).hexdigest() != published.lock:
                raise InputError(f"{self.store.address}/{_lock_name(published.lock)}: gone or altered; restore it")
            write_atomic(self.mirror / LOCK_NAME, lock)
        names = [stage for stage in stages if stage in published.stages]
        for stage in names:
            self._fetch_stage(stage, published.stages[stage], with_outputs, in_blocks)
            if with_outputs and not keep_stubs:
                self.fill(stage, in_blocks)
        return names

    def fill(self, stage: str, in_blocks: bool = True) -> None:
        """Downloads what the stage's folder has stubs of."""
        for path, stub in list(stubs_below(self.mirror / stage)):
            if not (in_blocks and self._as_blocks(stage, path, stub.object, path.stat().st_size)):
                download_stub(self.store, path, stub)

    def _as_blocks(self, stage: str, path: Path, name: str, num_bytes: int) -> bool:
        """Whether the file is one of tokens that is downloaded as it is read; then it is so from now on."""
        if stage != "index" or path.suffix != ".bin" or num_bytes < MIN_BLOCKS_BYTES:
            return False
        BlockFile.create(path, block_mark(path), (self.store, name), num_bytes)
        return True

    def check_stubs(self, info: Callable[[str], None]) -> None:
        """Removes stubs of objects that are gone, such as after another machine ran here, and complete stages with such
        stubs that are not the published ones: they are made again."""
        stubs = list(stubs_below(self.mirror))
        objects = self.store.list() if stubs else {}
        for path, stub in stubs:
            folder = self.mirror / path.relative_to(self.mirror).parts[0]
            if stub.object in objects or not path.exists():
                continue
            if not (folder / MANIFEST_NAME).is_file():
                path.unlink()
                checksum_path(path).unlink(missing_ok=True)
            elif not self._is_published(folder):
                info(f"{folder}: removed, since {self.store.address}/{stub.object} is gone; it is made again if needed")
                remove_tree(folder)

    def _is_published(self, folder: Path) -> bool:
        content = (folder / MANIFEST_NAME).read_bytes()
        name = folder_name(read_manifest(folder).fingerprint, content)
        return Published.read(self.store)[0].stages.get(folder.name) == name

    def address_of(self, stage: str) -> str:
        """Address of the published stage's folder. Raises InputError if it is not published."""
        folder = Published.read(self.store)[0].stages.get(stage)
        if folder is None:
            raise InputError(f"{self.store.address}: the stage {stage} is not published here ({POINTER_NAME}); run it")
        return f"{self.store.address}/{stage}/{folder}"

    def stored_files(self, stage: str) -> RemoteCorpusFiles:
        """The published stage's files, to be read where they are. The lock and the manifest are downloaded."""
        self.fetch(())
        prefix = self.address_of(stage).removeprefix(f"{self.store.address}/")
        manifest = self._listed(self.mirror / ".stored" / stage, prefix, stage)
        return RemoteCorpusFiles(self.store, prefix, {file.path: file.bytes for file in manifest.outputs}, self.mirror)

    def _listed(self, folder: Path, prefix: str, stage: str) -> Manifest:
        """The manifest of a stage in the store, written to this local folder. Raises InputError if there is none."""
        content = self.store.read(f"{prefix}/{MANIFEST_NAME}")
        if content is None:
            raise InputError(
                f"{self.store.address}/{POINTER_NAME}: names {prefix}, which has no {MANIFEST_NAME}; run {stage} again"
            )
        write_atomic(folder / MANIFEST_NAME, content)
        manifest: Manifest = read_manifest(folder)
        for output in manifest.outputs:
            if PurePosixPath(output.path).is_absolute() or ".." in PurePosixPath(output.path).parts:
                raise InputError(f"{self.store.address}/{prefix}/{MANIFEST_NAME}: lists {output.path!r}, outside of it")
        return manifest

    def _fetch_stage(self, stage: str, name: str, with_outputs: bool, in_blocks: bool) -> None:
        folder, prefix = self.mirror / stage, f"{stage}/{name}"
        new = self.mirror / f".fetched-{stage}"
        shutil.rmtree(new, ignore_errors=True)
        manifest = self._listed(new, prefix, stage)
        content = (new / MANIFEST_NAME).read_bytes()
        if (folder / MANIFEST_NAME).is_file() and (folder / MANIFEST_NAME).read_bytes() == content:
            shutil.rmtree(new)
            _name_published(folder, prefix, manifest)  # which a kill after the upload left undone
            return
        for output in manifest.outputs if with_outputs else ():
            name, path = f"{prefix}/{output.path}", new / output.path
            if not (in_blocks and self._as_blocks(stage, path, name, output.bytes)):
                self.store.download(name, path, (output.bytes, output.sha256))
        remove_tree(folder)
        new.rename(folder)

    def unlisted(self) -> list[str]:
        """The objects of published stages that are not in their manifests."""
        extra = []
        for stage in STAGE_NAMES:
            if (self.mirror / stage / MANIFEST_NAME).is_file():
                manifest = read_manifest(self.mirror / stage)
                content = (self.mirror / stage / MANIFEST_NAME).read_bytes()
                prefix = f"{stage}/{folder_name(manifest.fingerprint, content)}"
                known = {f"{prefix}/{output.path}" for output in manifest.outputs} | {f"{prefix}/{MANIFEST_NAME}"}
                extra += sorted(set(self.store.list(prefix)) - known)
        return extra


def _name_published(folder: Path, prefix: str, manifest: Manifest) -> None:
    """Stubs of a published stage name its objects: those that its tasks wrote are removed."""
    for output in manifest.outputs:
        target, stub = f"{prefix}/{output.path}", stub_at(folder / output.path)
        if stub is not None and stub.object != target:
            replace(stub, object=target).rewrite(folder / output.path)


def _lock_name(digest: str) -> str:
    return f"lock/{digest}.json"


@dataclass(frozen=True)
class Uploader:
    """Publishes the stages of a mirror while it holds the store's lease."""

    remote: RemoteWork
    lease: RemoteLease
    info: Callable[[str], None]

    def publish(self, stage: str) -> None:
        self.remote.publish(stage, self.lease)
        self.info(f"{stage}: published at {self.remote.store.address}")

    def fill(self, stages: Iterable[str]) -> None:
        for stage in stages:
            self.remote.fill(stage)

    def close(self) -> None:
        self.lease.release()


def fetched(folder: Path, stages: Sequence[str] = STAGE_NAMES) -> Path:
    """The folder; a mirror is filled first. Raises InputError if nothing is published behind it."""
    remote = RemoteWork.of_mirror(folder)
    if remote is not None and not remote.fetch(stages, in_blocks=True):
        raise InputError(f"{remote.store.address}: no published stage here (published.json); check the address")
    return folder


# A file lock so that only one process writes to a work folder; the kernel releases it when the process ends.

LEASE_NAME = ".lease"


@contextmanager
def lease(workdir: Path) -> Iterator[None]:
    """Raises InputError naming the process that holds the lease, if another one writes to this folder, and if the lease
    is not a file or the folder cannot be made."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:  # in a file system of the kernel, such as /proc
        raise InputError(f"--workdir {workdir}: no folder can be made there; name another one") from None
    if (workdir / LEASE_NAME).exists() and not (workdir / LEASE_NAME).is_file():
        raise InputError(f"{workdir / LEASE_NAME}: not a file; move it away")
    with (workdir / LEASE_NAME).open("a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise InputError(
                f"{workdir}: another gristmill (process {holder}) writes here; wait for it, or use another --workdir"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
