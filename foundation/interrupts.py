"""Ctrl-C that is never lost.

Python drops a KeyboardInterrupt that is raised while native code calls back or a destructor runs ("Exception ignored
in ..."), and the command would go on as if nobody had pressed Ctrl-C. So the signal is remembered, and raised again at
the next progress report or stage."""

import signal
import threading
from types import FrameType

_received = False


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a batch system or a shutdown sends it: everything ends as for Ctrl-C, with its own exit code."""


def install() -> None:
    """Remembers Ctrl-C from here on, unless the process ignores it (nohup) or handles it in another way; SIGTERM raises
    Terminated, where nothing else handles it."""
    global _received
    _received = False
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _receive)
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def check() -> None:
    """Raises KeyboardInterrupt, once, if Ctrl-C was pressed and the exception was lost."""
    global _received
    if _received and threading.current_thread() is threading.main_thread():
        _received = False
        raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
    raise Terminated


def _receive(number: int, frame: FrameType | None) -> None:
    global _received
    _received = True
    signal.default_int_handler(number, frame)
