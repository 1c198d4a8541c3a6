"""A reporter that records its messages."""

from gristmill.foundation.progress import Reporter


class RecordingReporter(Reporter):
    """Silent; the messages are in `lines`."""

    def __init__(self) -> None:
        super().__init__(Reporter.silent().console)
        self.lines: list[str] = []

    def info(self, message: str) -> None:
        self.lines.append(message)
