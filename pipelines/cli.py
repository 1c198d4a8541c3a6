"""The command line: runs a command of command_table.py and turns its errors into exit codes and messages."""

import sys
from collections.abc import Sequence

import typer

from gristmill.foundation import interrupts
from gristmill.foundation.disk_errors import disk_trouble
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.command_table import CommandGroup
from gristmill.pipelines.console import print_error

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Pretraining pipeline: from raw text to an evaluated model.",
)


@app.callback()
def _no_options() -> None:
    """The commands alone have options."""


INTERRUPTED = "interrupted; finished work is kept, run the same command to resume"


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit codes: 0 success, 1 failure, 2 invalid command or recipe. User errors show no traceback."""
    interrupts.install()
    try:
        app(args=arguments)
    except RecipeError as error:
        _exit(error, 2)
    except InputError as error:
        _exit(error, 1)
    except OSError as error:
        if (message := disk_trouble(error)) is None:
            raise
        _exit(message, 1)
    except MemoryError:
        _exit("out of memory; finished work is kept: run the same command with fewer --workers", 1)
    except SystemExit as error:
        if (interrupt := _keyboard_interrupt(error)) is None:
            raise
        _exit(str(interrupt) or INTERRUPTED, 130)


def _keyboard_interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt behind typer's SystemExit, if any; training's has a message about what was saved."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _exit(error: object, code: int) -> None:
    print_error(error)
    sys.exit(code)


def stage_script(name: str) -> None:
    """Entry point of `python -m gristmill.pipelines.stages.NAME RECIPE`."""
    main([name, *sys.argv[1:]])


if __name__ == "__main__":
    main()
