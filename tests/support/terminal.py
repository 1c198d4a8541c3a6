"""A terminal that types commands as a person would, keeps the screens, and does not wait for a silent program."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pexpect

MAX_SILENCE_SECONDS = 10.0  # longer than this, people think that a program hangs
PROMPT = "> "


class SilentProgram(AssertionError):
    """A program showed nothing for longer than a person waits."""


class Terminal:
    """folder: where the commands are typed. screens: the file that keeps all that was shown, with the waits over a
    second. On a machine with more work than cores a wait is as much longer as the work waits."""

    def __init__(self, folder: Path, screens: Path):
        self.folder, self.screens = folder, screens
        self.longest_wait = 0.0

    def type(self, command: str, answers: Sequence[str] = ()) -> tuple[int, str]:
        """(exit code, all that was shown). answers: lines to type at each prompt."""
        child = pexpect.spawn(
            "/bin/sh",
            ["-c", command],
            cwd=str(self.folder),
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "xterm"},
            encoding="utf-8",
            codec_errors="replace",
            use_poll=True,  # select refuses descriptors above 1023
            dimensions=(40, 120),
        )
        shown, waiting = f"$ {command}\n", list(answers)
        try:
            while (chunk := self._next(child, command)) is not None:
                shown += chunk
                if waiting and shown.endswith(PROMPT):
                    child.sendline(waiting.pop(0))
        finally:
            child.close(force=True)
            with self.screens.open("a", encoding="utf-8") as file:
                file.write(shown + "\n")
        return child.exitstatus if child.exitstatus is not None else -child.signalstatus, shown

    def _next(self, child: pexpect.spawn, command: str) -> str | None:
        """What is shown next; None at the end of the program."""
        started = time.monotonic()
        try:
            chunk = child.read_nonblocking(4096, timeout=allowed_silence())
        except pexpect.EOF:
            child.wait()
            return None
        except pexpect.TIMEOUT:
            raise SilentProgram(
                f"{command}: nothing was shown for {time.monotonic() - started:.0f} s; {self.screens} has the screens"
            ) from None
        self.longest_wait = max(self.longest_wait, time.monotonic() - started)
        return chunk


def allowed_silence() -> float:
    return MAX_SILENCE_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
