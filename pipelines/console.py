"""What the command line prints: text as it is, wrapped on a terminal only."""

import sys
from typing import Any

from gristmill.foundation.progress import plain_console


def print_block(block: Any) -> None:
    """A table, or another block of rich, on standard output."""
    plain_console(sys.stdout).print(block)


def print_error(error: object) -> None:
    """An error on standard error. What no encoding can write (lone surrogates of arguments) is written as an escape."""
    text = f"gristmill: {error}".encode("utf-8", "backslashreplace").decode("utf-8")
    plain_console(sys.stderr).print(text, soft_wrap=True)
