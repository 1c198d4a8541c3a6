"""The typer application of all commands."""

import typer

from gristmill.pipelines.command_table import CommandGroup

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
