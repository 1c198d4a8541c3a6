"""Every command of gristmill and the file that defines it; a command's file is imported when the command is used.

`gristmill curate` so loads neither the planner nor the tokenizers, and worker processes, which import the command's
script again, load almost nothing."""

import ast
import importlib
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

# Command -> file of pipelines/cli, and the function or typer app in it; in the order of work,
# as the help page lists them.
COMMANDS = {
    "doctor": "doctor:doctor",
    "init": "start:init",
    "check": "stages:check",
    "plan": "stages:plan",
    "run": "stages:run",
    "curate": "stages:curate",
    "tokenizer": "data:tokenizer_app",
    "index": "stages:index",
    "train": "stages:train",
    "launch": "launch:launch",
    "evaluate": "stages:evaluate",
    "report": "stages:report",
    "runs": "runs:runs_app",
    "watch": "runs:watch",
    "explain": "layout:explain",
    "ablate": "ablate:ablate",
    "ladder": "ladder:ladder",
    "mix": "ablate:mix",
    "chat": "start:chat",
    "generate": "checkpoint:generate",
    "serve": "checkpoint:serve",
    "compare": "checkpoint:compare",
    "export": "checkpoint:export",
    "verify": "stages:verify",
    "reproduce": "stages:reproduce",
    "why": "corpus:why",
    "try": "corpus:try_",
    "decide": "corpus:decide",
    "trace": "provenance:trace",
    "summary": "provenance:summary",
    "forget": "provenance:forget",
    "explore": "corpus:explore",
    "similar": "corpus:similar_command",
    "data": "data:data_app",
    "signatures": "corpus:signatures_app",
    "profiles": "fit:profiles_app",
    "extractor": "fit:extractor_app",
    "quality": "fit:quality_app",
    "layout": "layout:layout",
    "calibrate": "layout:calibrate",
    "import": "checkpoint:import_",
    "schema": "stages:schema",
    "work": "commands:work",
}


class Commands(MutableMapping[str, Any]):
    """Name -> click command. A command is imported when it is looked up; the names alone import nothing, nor does
    anything inside `as_listed`."""

    def __init__(self) -> None:
        self._targets: dict[str, Any] = dict(COMMANDS)
        self._only_listed = False

    def __getitem__(self, name: str) -> Any:
        target = self._targets[name]
        if not isinstance(target, str):
            return target
        if self._only_listed:
            return TyperCommand(name, help=_help_of(target))
        self._targets[name] = command = _import_command(name, target)
        return command

    @contextmanager
    def as_listed(self) -> Iterator[None]:
        """Inside, a command that is not imported has its name and its help alone: importing all takes seconds."""
        self._only_listed = True
        try:
            yield
        finally:
            self._only_listed = False

    def __setitem__(self, name: str, command: Any) -> None:
        self._targets[name] = command

    def __delitem__(self, name: str) -> None:
        del self._targets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


class CommandGroup(TyperGroup):
    """The group of all commands, for typer.Typer(cls=...)."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands: Commands = Commands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with self.commands.as_listed():
            super().format_commands(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self.commands.as_listed():
            return super().shell_complete(ctx, incomplete)


def _help_of(target: str) -> str:
    """ "corpus:why" -> the docstring of the function `why` in pipelines/cli/corpus.py, or the help of a typer app."""
    file, _, attribute = target.partition(":")
    for node in ast.parse(Path(__file__).with_name(f"{file}.py").read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == attribute:
            settings = {keyword.arg: keyword.value for keyword in cast(ast.Call, node.value).keywords}
            return str(ast.literal_eval(settings["help"]))
    raise LookupError(target)


def _import_command(name: str, target: str) -> Any:
    """("why", "corpus:why") -> the click command of the function `why` in pipelines/cli/corpus.py."""
    file, _, attribute = target.partition(":")
    command = getattr(importlib.import_module(f"gristmill.pipelines.cli.{file}"), attribute)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.callback()(_no_options)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)
    group: Any = typer.main.get_command(app)
    return group.commands[name]


def _no_options() -> None:
    """Makes typer build a group also of a single command."""


def work(
    tasks: Annotated[
        str, typer.Argument(metavar="TASKS", help="A folder of tasks or its address, as --engine slurm writes it.")
    ],
    element: Annotated[int, typer.Argument(metavar="N", help="Which element of the array this is, from 0.")],
) -> None:
    """Run one element of an array job; `--engine slurm` gives these commands to Slurm."""
    from gristmill.foundation.runtime.tasks.slurm import TaskFolder  # other commands do without it

    TaskFolder.at(tasks).run(element)


# The typer application of all commands.

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Pretraining pipeline: from raw text to an evaluated model.",
)


def _show_version(asked: bool) -> None:
    from gristmill.pipelines.cli.doctor import show_version  # packaging, which no other command needs

    show_version(asked)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """All other options belong to the commands."""
