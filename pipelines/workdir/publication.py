"""Publication protocol of a work folder in an object store: one writer, and one pointer to what is published.

`lease/N` is the lease of writer N and counts its beats; who sees no new beat for a while creates N + 1, and of two who
do only one succeeds. No clocks are compared, so they may differ. A lease cannot stop a writer whose requests are under
way while it is replaced. The pointer `published.json` can: it is replaced by compare-and-swap only (If-Match), names
its writer, and is never replaced by an earlier one. A new writer replaces it before anything else. Its version grows
with each replacement, so no content returns, and a late or repeated request changes nothing."""

import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from gristmill.foundation.errors import InputError
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.runtime.store.store import Store

BEAT_SECONDS = 4.0
SILENT_BEATS = 4  # without a new one the holder is taken for dead
LEASE_FOLDER = "lease"
POINTER_NAME = "published.json"
MAX_SWAPS = 10  # each failed one means that another writer changed the pointer in between, which ends with its lease
STAGE_NAMES = ("curate", "tokenizer", "index", "train", "evaluate", "report")


@dataclass(frozen=True)
class Published:
    """Content of the pointer. stages: folder below STAGE/ by stage. lock: SHA-256 of the lock, "" for none."""

    stages: Mapping[str, str] = field(default_factory=dict)
    lock: str = ""
    writer: int = 0
    version: int = 0

    @classmethod
    def read(cls, store: Store) -> tuple["Published", str | None]:
        """(what is published, the pointer's tag or None).

        Raises InputError if the pointer is damaged, and if an older version published one pointer a stage."""
        content, tag = store.read_tagged(POINTER_NAME)
        if content is None:
            if any(store.read(f"{stage}.json") is not None for stage in STAGE_NAMES):
                raise InputError(
                    f"{store.address}: published by an older gristmill, with a pointer for each stage; use another "
                    "--workdir, or delete it and run the recipe again"
                )
            return cls(), None
        names = ("stages", "lock", "writer", "version")
        fields = read_fields(f"{store.address}/{POINTER_NAME}", content, names)
        if not isinstance(fields["stages"], dict) or not isinstance(fields["writer"], int):
            raise InputError(f"{store.address}/{POINTER_NAME}: damaged; delete it and run the command again")
        return cls(**{name: fields[name] for name in names}), tag

    def content(self) -> bytes:
        return canonical_json(
            {"stages": dict(self.stages), "lock": self.lock, "writer": self.writer, "version": self.version}
        )


def read_fields(address: str, content: bytes, names: Sequence[str]) -> dict[str, Any]:
    """The JSON object of a store, which has these fields. Raises InputError naming the address."""
    try:
        fields = json.loads(content)
        missing = [name for name in names if name not in fields] if isinstance(fields, dict) else list(names)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{address}: not JSON ({error}); delete the object and run the command again") from error
    if missing:
        raise InputError(f"{address}: has no field {missing[0]!r}, so it is damaged; delete it and run the same again")
    return fields


class LeaseClock:
    """The machine's clock and threads."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def repeat(self, seconds: float, call: Callable[[], bool]) -> Callable[[], None]:
        """Calls from a thread, with so many seconds before each call, until one returns False or the returned function
        is called, which waits for the thread."""
        stopped = threading.Event()

        def run() -> None:
            while not stopped.wait(seconds) and call():
                pass

        def stop() -> None:
            stopped.set()
            thread.join()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return stop


class RemoteLease:
    """One writer's lease, from construction to `release`; a thread renews it.

    Raises InputError, after SILENT_BEATS beats at most, if another process holds it."""

    def __init__(
        self,
        store: Store,
        info: Callable[[str], None],
        beat_seconds: float = BEAT_SECONDS,
        clock: LeaseClock | None = None,
    ):
        self._store, self._beat_seconds, self._clock = store, beat_seconds, clock or LeaseClock()
        self._beats, self._token, self._is_released = 0, uuid.uuid4().hex, False
        self._number = self._taken(info)
        self._stop_beats = self._clock.repeat(beat_seconds, self._renew)
        try:
            self.publish(lambda published: published)  # from now on no earlier writer can change the pointer
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raises InputError if another process took the lease, because this one was silent for too long."""
        if _numbers(self._store)[-1:] != [self._number]:
            raise self._lost()

    def publish(self, change: Callable[[Published], Published]) -> None:
        """Replaces the pointer by what `change` makes of it, as one step. Raises InputError if another writer took
        over."""
        for _ in range(MAX_SWAPS):
            published, tag = Published.read(self._store)
            if published.writer > self._number:
                raise self._lost()
            new = replace(change(published), writer=self._number)
            if new == published:
                return
            content = replace(new, version=published.version + 1).content()
            if self._store.put_if(POINTER_NAME, content, tag):
                return
            if self._store.read(POINTER_NAME) == content:  # the first answer was lost, and the repeated request refused
                return
        raise InputError(f"{self._store.address}/{POINTER_NAME}: changes all the time; run the command again")

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._stop_beats()
            with suppress(InputError):  # the store is gone: the lease ends by itself
                self._write()

    def _taken(self, info: Callable[[str], None]) -> int:
        before = _numbers(self._store)
        if before:
            self._wait_for(before[-1], info)
        number = max([*before, Published.read(self._store)[0].writer]) + 1
        if not self._store.put_new(_name(number), self._content()):
            content = self._store.read(_name(number))
            if content is None or self._lease(number, content)["token"] != self._token:
                raise self._held(number)
        for old in before:
            with suppress(InputError):
                self._store.delete(_name(old))
        return number

    def _wait_for(self, number: int, info: Callable[[str], None]) -> None:
        """Returns once the holder has released the lease or is silent."""
        first = self._store.read(_name(number))
        if first is None or self._lease(number, first)["released"]:
            return
        info(f"{self._store.address}: waiting whether its last writer is still there")
        for _ in range(SILENT_BEATS):
            self._clock.sleep(self._beat_seconds)
            now = self._store.read(_name(number))
            if now is None or self._lease(number, now)["released"]:
                return
            if now != first:
                raise self._held(number)

    def _lease(self, number: int, content: bytes) -> dict[str, Any]:
        """The fields of a lease's object. Raises InputError if it is damaged."""
        return read_fields(f"{self._store.address}/{_name(number)}", content, ("released", "holder", "token"))

    def _held(self, number: int) -> InputError:
        content = self._store.read(_name(number))
        holder = "unknown" if content is None else self._lease(number, content)["holder"]
        return InputError(
            f"{self._store.address}: another gristmill ({holder}) writes here; wait for it, or use another --workdir"
        )

    def _lost(self) -> InputError:
        return InputError(
            f"{self._store.address}: another gristmill took this work folder over, since this process was silent for "
            f"{SILENT_BEATS * self._beat_seconds:.0f} s; nothing of it was published since; run it again when the "
            "other has ended"
        )

    def _renew(self) -> bool:
        """Whether the lease is still this writer's."""
        with suppress(InputError):  # a store that is away for a while; `publish` sees whether the lease was lost
            if _numbers(self._store)[-1:] != [self._number]:
                return False
            self._beats += 1
            self._write()
        return True

    def _write(self) -> None:
        self._store.put_bytes(_name(self._number), self._content())

    def _content(self) -> bytes:
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        fields = {"holder": holder, "token": self._token, "beats": self._beats, "released": self._is_released}
        return json.dumps(fields).encode()


def _name(number: int) -> str:
    return f"{LEASE_FOLDER}/{number:010d}"


def _numbers(store: Store) -> list[int]:
    return sorted(int(name.rpartition("/")[2]) for name in store.list(LEASE_FOLDER))


def folder_name(fingerprint: str, manifest: bytes) -> str:
    """Folder of a stage's files below STAGE/: two writers with other bytes for one fingerprint do not share it."""
    return f"{fingerprint}-{hashlib.sha256(manifest).hexdigest()[:16]}"
