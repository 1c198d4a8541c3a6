"""Progress reports: a bar with rate and remaining time on a terminal or in a notebook, periodic lines in a log. They
also raise a Ctrl-C that was lost. And printing for the command line: plain text, wrapped on a terminal only."""

import json
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from gristmill.foundation.startup import DeferredModule

if TYPE_CHECKING:
    from rich.console import Console

# Workers print nothing, and a log has no bar.
rich_console, rich_progress = DeferredModule("rich.console"), DeferredModule("rich.progress")
rich_table = DeferredModule("rich.table")  # 0.03 s, for tables alone

SECONDS_BETWEEN_LOG_LINES = 10.0
SECONDS_BETWEEN_NOTEBOOK_UPDATES = 0.2
NO_WRAP_WIDTH = 100_000  # columns of a log or a pipe: lines and tables are as long as their text


def plain_console(file: TextIO, quiet: bool = False) -> "Console":
    """A console without markup: `[bold]` and `:100:` in a message or file name are printed unchanged. Lines are wrapped
    on a terminal only."""
    width = None if file.isatty() else NO_WRAP_WIDTH
    return rich_console.Console(
        file=file, width=width, quiet=quiet, markup=False, emoji=False, highlight=False, force_jupyter=False
    )


class JsonLog:
    """In the place of a console: each message is a line of JSON, {"time", "message"}, and of progress also {"task",
    "done", "total", "unit", "seconds"}. time: UTC, ISO 8601."""

    is_terminal = False

    def __init__(self, file: TextIO):
        self.file = file

    def print(self, message: object, **fields: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.file.write(json.dumps({"time": now, "message": str(message), **fields}) + "\n")
        self.file.flush()


def print_block(block: Any) -> None:
    """Prints a rich table or other renderable to standard output."""
    plain_console(sys.stdout).print(block)


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose first row is its header."""
    table = rich_table.Table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    print_block(table)


def print_error(error: object, as_json: bool = False) -> None:
    """Prints an error to standard error; lone surrogates (from arguments) are written as escapes."""
    if as_json:
        JsonLog(sys.stderr).print(str(error), level="error")
        return
    text = f"gristmill: {error}".encode("utf-8", "backslashreplace").decode("utf-8")
    plain_console(sys.stderr).print(text, soft_wrap=True)


def in_notebook() -> bool:
    """Whether this is the kernel of a Jupyter notebook, whose output is no terminal and can be replaced in place."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookLine:
    """One line of a notebook cell's output, replaced in place; it needs no widgets, and a saved notebook has its last
    text. Nothing is displayed before the first text."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._last = 0.0

    def update(self, text: str) -> None:
        """Show the text, unless the last one is younger than SECONDS_BETWEEN_NOTEBOOK_UPDATES."""
        if time.monotonic() - self._last >= SECONDS_BETWEEN_NOTEBOOK_UPDATES:
            self.show(text)

    def show(self, text: str) -> None:
        self._last, content = time.monotonic(), {"text/plain": text}
        if self._handle is None:
            self._handle = sys.modules["IPython"].display.display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class ProgressMeter:
    """Progress of one task in units of work. `advance` may be called at any rate."""

    def __init__(self, description: str, total: float, unit: str, console: "Console | JsonLog"):
        self.description, self.total, self.unit, self.console = description, total, unit, console
        self.done = self._done_before = 0.0
        self.note = ""
        self._started = self._last_line = time.monotonic()
        self._line = (
            NotebookLine() if in_notebook() and not isinstance(console, JsonLog) and not console.quiet else None
        )
        self._bar: Any = None
        if self._line is None and console.is_terminal:
            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("{task.description}", markup=False),
                rich_progress.BarColumn(bar_width=30),
                rich_progress.TaskProgressColumn(),
                rich_progress.TextColumn("{task.fields[rate]}"),
                rich_progress.TimeRemainingColumn(),
                rich_progress.TextColumn("{task.fields[note]}", markup=False),
                console=console,
                transient=True,
            )
            self._bar.start()
            self._bar_id = self._bar.add_task(description, total=total, rate="", note="")

    def resume(self, done: float) -> None:
        """Begin behind the units that an earlier run finished: they count for the share, not for rate and time left."""
        self.done = self._done_before = done
        if self._bar is not None:
            self._bar.reset(self._bar_id, completed=done)

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Add to the finished units; `note` is a short status text, such as the loss.

        Raises KeyboardInterrupt after a Ctrl-C whose exception was lost."""
        raise_lost_interrupt()
        self.done += amount
        self.note = note or self.note
        if self._bar is not None:
            self._bar.update(self._bar_id, completed=self.done, rate=self._rate(), note=self.note)
        elif self._line is not None:
            if self.done:
                self._line.update(f"{self.description}: {self._state()} {self.note}".rstrip())
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LOG_LINES:
            self._last_line = time.monotonic()
            self._print(f"{self.description}: {self._state()} {self.note}".rstrip())

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if not self.total and not self.done and not self.note:
            return  # nothing was to be done, which a corpus of many sources would say a thousand times
        seconds = time.monotonic() - self._started
        before = f" ({amount(self._done_before, self.unit)} were done before)" if self._done_before else ""
        finished = f"{amount(self._done_now, self.unit)} in {seconds:.1f} s{before}"
        self._print(f"{self.description}: {finished} {self.note}".rstrip())

    @property
    def _done_now(self) -> float:
        return self.done - self._done_before

    def _print(self, message: str) -> None:
        if self._line is not None:
            self._line.show(message)
            return
        if not isinstance(self.console, JsonLog):
            self.console.print(message)
            return
        seconds = round(time.monotonic() - self._started, 3)
        counts = {"done": self.done, "total": self.total, "unit": self.unit, "seconds": seconds}
        if self._done_before:
            counts["done_before"] = self._done_before
        self.console.print(message, task=self.description, **counts)

    def _rate(self) -> str:
        seconds = time.monotonic() - self._started
        return f"{amount(self._done_now / seconds, self.unit)}/s" if seconds > 0 else ""

    def _state(self) -> str:
        elapsed = time.monotonic() - self._started
        share = 100 * self.done / self.total if self.total else 100.0
        so_far = f"{share:.0f} % ({amount(self.done, self.unit)} of {amount(self.total, self.unit)})"
        if not self._done_now:
            return so_far
        left = elapsed * (self.total - self.done) / self._done_now
        return f"{so_far}, {self._rate()}, {left:.0f} s left"


class Reporter:
    """Creates progress meters and prints messages; `Reporter.silent()` prints nothing."""

    def __init__(self, console: "Console | JsonLog"):
        self.console = console

    @classmethod
    def to_terminal(cls) -> "Reporter":
        """Standard error; in a notebook standard output, since Jupyter shows errors in red."""
        if not in_notebook():
            return cls(plain_console(sys.stderr))
        warnings.filterwarnings("ignore", "IProgress not found")  # tqdm, of libraries that load with training
        return cls(plain_console(sys.stdout))

    @classmethod
    def to_json(cls) -> "Reporter":
        """Lines of JSON on standard error, for programs that collect logs."""
        return cls(JsonLog(sys.stderr))

    @classmethod
    def silent(cls) -> "Reporter":
        return cls(plain_console(sys.stderr, quiet=True))

    @contextmanager
    def meter(self, description: str, total: float, unit: str = "it") -> Iterator[ProgressMeter]:
        meter = ProgressMeter(description, total, unit, self.console)
        try:
            yield meter
        finally:
            meter.close()

    def info(self, message: str) -> None:
        """Print one line without markup."""
        self.console.print(message)


def amount(number: float, unit: str) -> str:
    """(62_100_000, "B") -> "62.1 MB"; (1, "tasks") -> "1 task"; (12_345, "tokens") -> "12.3k tokens"."""
    text = _short(number)
    if unit == "B":
        digits = text.rstrip("kMGT")
        return f"{digits} {text[len(digits) :]}B"
    if number == 1:
        unit = unit.removesuffix("es") if unit.endswith("ches") else unit.removesuffix("s")
    return f"{text} {unit}"


def _short(number: float) -> str:
    """12345 -> '12.3k': three significant digits."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


# Ctrl-C is never lost. Python drops a KeyboardInterrupt that is raised while native code calls back or a destructor
# runs ("Exception ignored in ..."), and the command would go on as if nobody had pressed Ctrl-C. So the signal is
# remembered, and raised again at the next progress report or stage.
_received = False


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a batch system or a shutdown sends it: everything ends as for Ctrl-C, with its own exit code."""


def remember_interrupts() -> None:
    """Remembers Ctrl-C from here on, unless the process ignores it (nohup) or handles it in another way; SIGTERM raises
    Terminated, where nothing else handles it."""
    global _received
    _received = False
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _receive)
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def raise_lost_interrupt() -> None:
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
