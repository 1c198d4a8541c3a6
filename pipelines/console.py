"""Printing for the command line: plain text, wrapped on a terminal only."""

import sys
from typing import Any

from gristmill.foundation.progress import plain_console


def print_block(block: Any) -> None:
    """Prints a rich table or other renderable to standard output."""
    plain_console(sys.stdout).print(block)


def print_error(error: object) -> None:
    """Prints an error to standard error; lone surrogates (from arguments) are written as escapes."""
    text = f"gristmill: {error}".encode("utf-8", "backslashreplace").decode("utf-8")
    plain_console(sys.stderr).print(text, soft_wrap=True)
