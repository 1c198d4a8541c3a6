"""Printing for the command line: plain text, wrapped on a terminal only."""

import sys
from collections.abc import Sequence
from typing import Any

from gristmill.foundation.progress import JsonLog, plain_console
from gristmill.foundation.startup import DeferredModule

rich_table = DeferredModule("rich.table")  # 0.03 s, for tables alone


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
