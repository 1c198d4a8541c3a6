"""A lease in an object store: one writer a work folder, decided by objects that are created only if there is none.

`lease/N` is the lease of holder N and counts its beats; who sees no new beat for a while creates N + 1, and of two who
do only one succeeds. No clocks are compared, so they may differ."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from gristmill.foundation.errors import InputError
from gristmill.foundation.store import Store

BEAT_SECONDS = 4.0
SILENT_BEATS = 4  # without a new one the holder is taken for dead
FOLDER = "lease"


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
        if first is None or json.loads(first)["released"]:
            return
        say(f"{self._store.address}: waiting whether its last writer is still there")
        for _ in range(SILENT_BEATS):
            time.sleep(self._beat_seconds)
            now = self._store.read(_name(number))
            if now is None or json.loads(now)["released"]:
                return
            if now != first:
                raise self._held(number)

    def _held(self, number: int) -> InputError:
        holder = json.loads(self._store.read(_name(number)) or b'{"holder": "unknown"}')["holder"]
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
