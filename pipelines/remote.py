"""Work folders in object stores: `--workdir s3://bucket/run`.

A stage runs in a local folder, the mirror, and is published when it is complete: its files as
STAGE/FINGERPRINT/..., the manifest last, and then STAGE.json, a pointer that names the fingerprint. A reader goes by
the pointer, so it sees a stage whole or not at all. The mirror is below $GRISTMILL_SCRATCH (~/.cache/gristmill/remote).
The nodes of a cluster do not share it: tasks' files travel through the store (`runtime/tasks/task_files.py`)."""

import fcntl
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import orjson
import xxhash

from gristmill.data_pipeline.indexed.format import block_mark
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import remove_tree, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.lock import LOCK_NAME
from gristmill.foundation.manifest import MANIFEST_NAME, Manifest, output_files, read_manifest
from gristmill.foundation.runtime.store.addresses import is_address
from gristmill.foundation.runtime.store.store import BlockFile, Store
from gristmill.foundation.runtime.tasks.task_files import scratch_root

# A lease in an object store: one writer a work folder, decided by objects that are created only if there is none.
#
# `lease/N` is the lease of holder N and counts its beats; who sees no new beat for a while creates N + 1, and of two
# who do only one succeeds. No clocks are compared, so they may differ.

BEAT_SECONDS = 4.0
SILENT_BEATS = 4  # without a new one the holder is taken for dead
FOLDER = "lease"


def _fields(address: str, content: bytes, names: Sequence[str]) -> dict[str, Any]:
    """The JSON object of a store, which has these fields. Raises InputError naming the address."""
    try:
        fields = json.loads(content)
        missing = [name for name in names if name not in fields] if isinstance(fields, dict) else list(names)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{address}: not JSON ({error}); delete the object and run the command again") from error
    if missing:
        raise InputError(f"{address}: has no field {missing[0]!r}, so it is damaged; delete it and run the same again")
    return fields


class RemoteLease:
    """Held from construction to `release`; a thread renews it.

    Raises InputError, after SILENT_BEATS beats at most, if another process holds it."""

    def __init__(self, store: Store, say: Callable[[str], None], beat_seconds: float = BEAT_SECONDS):
        self._store, self._beat_seconds, self._beats = store, beat_seconds, 0
        self._number = self._taken(say)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises InputError if another process took the lease, because this one was silent for too long."""
        if _numbers(self._store)[-1:] != [self._number]:
            raise InputError(
                f"{self._store.address}: another gristmill took this work folder over, since this process was silent "
                f"for {SILENT_BEATS * self._beat_seconds:.0f} s; nothing of it was published since; run it again when "
                "the other has ended"
            )

    def release(self) -> None:
        if not self._released.is_set():
            self._released.set()
            self._thread.join()
            with suppress(InputError):  # the store is gone: the lease ends by itself
                self._write(is_released=True)

    def _taken(self, say: Callable[[str], None]) -> int:
        before = _numbers(self._store)
        if before:
            self._wait_for(before[-1], say)
        number = before[-1] + 1 if before else 1
        if not self._store.put_new(_name(number), self._content(False)):
            raise self._held(number)
        for old in before:
            with suppress(InputError):
                self._store.delete(_name(old))
        return number

    def _wait_for(self, number: int, say: Callable[[str], None]) -> None:
        """Returns once the holder has released the lease or is silent."""
        first = self._store.read(_name(number))
        if first is None or self._lease(number, first)["released"]:
            return
        say(f"{self._store.address}: waiting whether its last writer is still there")
        for _ in range(SILENT_BEATS):
            time.sleep(self._beat_seconds)
            now = self._store.read(_name(number))
            if now is None or self._lease(number, now)["released"]:
                return
            if now != first:
                raise self._held(number)

    def _lease(self, number: int, content: bytes) -> dict[str, Any]:
        """The fields of a lease's object. Raises InputError if it is damaged."""
        return _fields(f"{self._store.address}/{_name(number)}", content, ("released", "holder"))

    def _held(self, number: int) -> InputError:
        content = self._store.read(_name(number))
        holder = "unknown" if content is None else self._lease(number, content)["holder"]
        return InputError(
            f"{self._store.address}: another gristmill ({holder}) writes here; wait for it, or use another --workdir"
        )

    def _renew(self) -> None:
        while not self._released.wait(self._beat_seconds):
            with suppress(InputError):  # a store that is away for a while; `check` sees whether the lease was lost
                if _numbers(self._store)[-1:] != [self._number]:
                    return
                self._beats += 1
                self._write(is_released=False)

    def _write(self, is_released: bool) -> None:
        self._store.put_bytes(_name(self._number), self._content(is_released))

    def _content(self, is_released: bool) -> bytes:
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        return json.dumps({"holder": holder, "beats": self._beats, "released": is_released}).encode()


def _name(number: int) -> str:
    return f"{FOLDER}/{number:010d}"


def _numbers(store: Store) -> list[int]:
    return sorted(int(name.rpartition("/")[2]) for name in store.list(FOLDER))


MIN_BLOCKS_BYTES = 64_000_000  # of a file of tokens; smaller ones are downloaded whole, and their digests compared
MARK_NAME = ".remote.json"  # in a mirror: the address behind it
STAGE_NAMES = ("curate", "tokenizer", "index", "train", "evaluate", "report")


def mirror_of(location: str) -> Path:
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
    return mirror_of(location) if is_address(location) else Path(location)


@dataclass(frozen=True)
class RemoteWork:
    """mirror: the local folder. store: what is behind it."""

    mirror: Path
    store: Store

    @classmethod
    def behind(cls, folder: Path) -> "RemoteWork | None":
        """The store behind this mirror or the one that this folder is in; None for a folder of its own."""
        for mirror in (folder, *folder.parents):
            if (mirror / MARK_NAME).is_file():
                return cls(mirror, Store(orjson.loads((mirror / MARK_NAME).read_bytes())["address"]))
        return None

    def publish(self, stage: str, check: Callable[[], None]) -> None:
        """Uploads the complete stage, unless it is published. check: raises if another writer has taken over.

        Raises InputError if other bytes were published under its fingerprint."""
        folder = self.mirror / stage
        content = (folder / MANIFEST_NAME).read_bytes()
        manifest = read_manifest(folder)
        prefix = f"{stage}/{manifest.fingerprint}"
        published = self.store.read(f"{prefix}/{MANIFEST_NAME}")
        if published is None:
            if any(block_mark(path).is_file() for path in output_files(folder)):
                raise InputError(
                    f"{self.store.address}/{prefix}: was deleted, and {folder} holds a part of it; remove that folder "
                    "and run the stage again"
                )
            for path in output_files(folder):
                self.store.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path)
            check()
            if not self.store.put_new(f"{prefix}/{MANIFEST_NAME}", content):
                published = self.store.read(f"{prefix}/{MANIFEST_NAME}")
        if published not in (None, content):
            raise InputError(
                f"{self.store.address}/{prefix}: holds other files for the same recipe and inputs, made with other "
                "versions of libraries; delete it there, or use another --workdir"
            )
        check()
        self._put_changed(f"{stage}.json", canonical_json({"fingerprint": manifest.fingerprint, "stage": stage}))
        if (self.mirror / LOCK_NAME).is_file():
            self._put_changed(LOCK_NAME, (self.mirror / LOCK_NAME).read_bytes())

    def _put_changed(self, name: str, content: bytes) -> None:
        if self.store.read(name) != content:
            self.store.put_bytes(name, content)

    def fetch(
        self, stages: Sequence[str] = STAGE_NAMES, with_outputs: bool = True, in_blocks: bool = False
    ) -> list[str]:
        """Downloads the published stages that the mirror lacks, and the lock; returns the published stages' names.

        in_blocks: large files of tokens are downloaded as they are read."""
        if (lock := self.store.read(LOCK_NAME)) is not None and not (self.mirror / LOCK_NAME).exists():
            write_atomic(self.mirror / LOCK_NAME, lock)
        published = []
        for stage in stages:
            pointer = self.store.read(f"{stage}.json")
            if pointer is not None:
                published.append(stage)
                self._fetch_stage(stage, self._pointer(stage, pointer), with_outputs, in_blocks)
        return published

    def address_of(self, stage: str) -> str:
        """Address of the published stage's folder. Raises InputError if it is not published."""
        pointer = self.store.read(f"{stage}.json")
        if pointer is None:
            raise InputError(f"{self.store.address}: the stage {stage} is not published here ({stage}.json); run it")
        return f"{self.store.address}/{stage}/{self._pointer(stage, pointer)}"

    def _pointer(self, stage: str, content: bytes) -> str:
        """The fingerprint that a stage's pointer names. Raises InputError if the object is damaged."""
        return str(_fields(f"{self.store.address}/{stage}.json", content, ("fingerprint",))["fingerprint"])

    def _fetch_stage(self, stage: str, fingerprint: str, with_outputs: bool, in_blocks: bool) -> None:
        folder, prefix = self.mirror / stage, f"{stage}/{fingerprint}"
        content = self.store.read(f"{prefix}/{MANIFEST_NAME}")
        if content is None:
            raise InputError(
                f"{self.store.address}/{stage}.json: names {prefix}, which has no {MANIFEST_NAME}; run the stage again"
            )
        if (folder / MANIFEST_NAME).is_file() and (folder / MANIFEST_NAME).read_bytes() == content:
            return
        new = self.mirror / f".fetched-{stage}"
        shutil.rmtree(new, ignore_errors=True)
        write_atomic(new / MANIFEST_NAME, content)
        manifest: Manifest = read_manifest(new)
        for output in manifest.outputs if with_outputs else ():
            if PurePosixPath(output.path).is_absolute() or ".." in PurePosixPath(output.path).parts:
                raise InputError(f"{self.store.address}/{prefix}/{MANIFEST_NAME}: lists {output.path!r}, outside of it")
            name, path = f"{prefix}/{output.path}", new / output.path
            if in_blocks and stage == "index" and path.suffix == ".bin" and output.bytes >= MIN_BLOCKS_BYTES:
                BlockFile.create(path, block_mark(path), (self.store, name), output.bytes)
            else:
                self.store.download(name, path, (output.bytes, output.sha256))
        remove_tree(folder)
        new.rename(folder)

    def unlisted(self) -> list[str]:
        """The objects of published stages that are not in their manifests."""
        extra = []
        for stage in STAGE_NAMES:
            if (self.mirror / stage / MANIFEST_NAME).is_file():
                manifest = read_manifest(self.mirror / stage)
                prefix = f"{stage}/{manifest.fingerprint}"
                known = {f"{prefix}/{output.path}" for output in manifest.outputs} | {f"{prefix}/{MANIFEST_NAME}"}
                extra += sorted(set(self.store.list(prefix)) - known)
        return extra


@dataclass(frozen=True)
class Publisher:
    """Publishes the stages of a mirror while it holds the store's lease."""

    remote: RemoteWork
    lease: RemoteLease
    say: Callable[[str], None]

    def publish(self, stage: str) -> None:
        self.remote.publish(stage, self.lease.check)
        self.say(f"{stage}: published at {self.remote.store.address}/{stage}.json")

    def close(self) -> None:
        self.lease.release()


def fetched(folder: Path, stages: Sequence[str] = STAGE_NAMES) -> Path:
    """The folder; a mirror is filled first. Raises InputError if nothing is published behind it."""
    remote = RemoteWork.behind(folder)
    if remote is not None and not remote.fetch(stages, in_blocks=True):
        raise InputError(f"{remote.store.address}: no published stage here (STAGE.json); check the address")
    return folder


# A file lock so that only one process writes to a work folder; the kernel releases it when the process ends.

LEASE_NAME = ".lease"


@contextmanager
def lease(workdir: Path) -> Iterator[None]:
    """Raises InputError naming the process that holds the lease, if another one writes to this folder, and if the lease
    is not a file."""
    workdir.mkdir(parents=True, exist_ok=True)
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
