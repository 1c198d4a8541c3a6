"""Typer commands whose options are grouped in dataclasses."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from gristmill.pipelines.cli.commands import Commands
from gristmill.pipelines.cli.options import with_option_groups


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(min=1, help="Columns.")] = 80
    as_json: Annotated[bool, typer.Option("--json")] = False


def show(name: Annotated[str, typer.Argument(metavar="NAME")], size: Size) -> None:
    """Print what was given."""
    print(name, size)


def run(*arguments: str) -> str:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_option_groups(show))
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    return result.output


def test_fields_of_a_dataclass_are_options():
    assert run("x") == "x Size(width=80, as_json=False)\n"
    assert run("x", "--width", "5", "--json") == "x Size(width=5, as_json=True)\n"


def test_help_and_bounds_are_those_of_the_fields():
    text = run("--help")
    assert "Print what was given." in text and "Columns." in text and "--json" in text and "--size" not in text
    assert "Invalid value for '--width'" in run("x", "--width", "0")


def test_the_list_of_commands_has_the_help_of_each():
    """It is read from the files, without importing them."""
    commands = Commands()
    with commands.as_listed():
        listed = {name: command.get_short_help_str() for name, command in commands.items()}
    assert listed == {name: command.get_short_help_str() for name, command in commands.items()}
    assert all(listed.values())
