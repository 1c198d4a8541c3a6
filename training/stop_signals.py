"""Ctrl-C and SIGTERM during training: the current step is finished and saved, then the run ends."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from gristmill.foundation.errors import InputError


class StopRequest:
    """signal: the signal that arrived, or None. A second Ctrl-C raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def receive(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("stopped at once; the same command goes on from the last checkpoint")
        self.signal = signal.Signals(number)
        # os.write, because a signal may arrive while print or rich holds its lock
        os.write(sys.__stderr__.fileno(), b"\ntrain: stopping after this step, then saving; Ctrl-C stops at once\n")

    def error(self, step: int, saved: Path) -> BaseException:
        """What ends the run: KeyboardInterrupt after Ctrl-C (exit code 130), else InputError (exit code 1)."""
        message = (
            f"stopped after step {step} as requested, and saved; run the same command to go on. Kept: {saved} and the "
            f"metrics of {step} steps"
        )
        return KeyboardInterrupt(message) if self.signal == signal.SIGINT else InputError(message)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Receives SIGTERM and SIGINT in the block, where this is the main thread (signals reach no other)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
