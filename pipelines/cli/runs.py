"""`gristmill runs`: the models of a work folder beside each other. `gristmill watch`: a page in a browser on runs."""

from pathlib import Path
from typing import Annotated

import rich.table
import typer

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.cli.console import print_block
from gristmill.pipelines.cli.options import read_text
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.workdir.trained_runs import MAX_DIFFERENCES, TrainedRun, name_run, remove_runs, trained_runs

runs_app = typer.Typer(help="List the models of a work folder, or remove some of them.")

WorkFolder = Annotated[Path | None, typer.Option("--workdir", metavar="DIR", help="Default: every folder in work/.")]


@runs_app.callback(invoke_without_command=True)
def list_runs(context: typer.Context, workdir: WorkFolder = None) -> None:
    """List the models of a work folder: what differs, tokens, loss, scores, size on disk."""
    if context.invoked_subcommand is not None:
        return
    folders = [workdir] if workdir is not None else sorted(path for path in Path("work").glob("*") if path.is_dir())
    rows = [(folder, run) for folder in folders for run in trained_runs(folder)]
    if not rows:
        where = workdir if workdir is not None else "work/*"
        raise InputError(f"{where}: no trained models; train one with `gristmill run RECIPE`, or give --workdir DIR")
    table = rich_table()
    for folder, run in rows:
        table.add_row(str(folder), *cells(run))
    print_block(table)


@runs_app.command("remove")
def remove(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Names or aliases as `gristmill runs` shows them.")
    ],
    workdir: Annotated[Path, typer.Option("--workdir", metavar="DIR", help="The work folder.")],
) -> None:
    """Remove models that were set aside or not finished, with their scores."""
    for run in remove_runs(workdir, names):
        print(f"removed {run.name}: {', '.join(str(folder) for folder in run.folders)}")


@runs_app.command("name")
def name(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or alias as `gristmill runs` shows it.")],
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="What to call it.")],
    workdir: Annotated[Path, typer.Option("--workdir", metavar="DIR", help="The work folder.")],
) -> None:
    """Give a model an alias, which every `gristmill runs` command takes."""
    name_run(workdir, run, alias)
    print(f"{run} is {alias}")


def rich_table() -> rich.table.Table:
    return rich.table.Table("folder", "run", "alias", "state", "differs in", "tokens", "loss", "scores", "size")


def cells(run: TrainedRun) -> tuple[str, ...]:
    differences = [*run.differences[:MAX_DIFFERENCES]]
    if len(run.differences) > MAX_DIFFERENCES:
        differences.append(f"and {len(run.differences) - MAX_DIFFERENCES} more")
    return (
        run.name,
        run.alias,
        run.state,
        "\n".join(differences),
        "" if run.tokens is None else f"{run.tokens:,}",
        "" if run.loss is None else f"{run.loss:.4f}",
        "\n".join(f"{task} {value:.4g}" for task, value in run.scores.items()),
        f"{run.num_bytes / 1e6:,.1f} MB",
    )


def watch(
    workdir: Annotated[list[Path], typer.Argument(metavar="WORKDIR...", help="Work folders; several are compared.")],
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The recipe of the run, for the time that is left.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.")] = 8002,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A file with the token of requests.")] = None,
) -> None:
    """Serve a page on runs while they go on: curves, rate, time left, memory, samples of text. Until Ctrl-C."""
    try:
        from gristmill.pipelines.explorer.server import Address, serve_pages  # the extra `serve`
        from gristmill.pipelines.explorer.watch import make_watch_app, watched_runs
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{error.name} is not installed; run `pip install -c constraints.txt 'gristmill[serve]'`"
        ) from error
    tokens = None if recipe is None else load_recipe(str(recipe)).training()[1].tokens
    address = Address(host, port, None if token_file is None else read_text(token_file).strip())
    app = make_watch_app(watched_runs(workdir, tokens), address.token)
    serve_pages(app, address, f"watching {', '.join(map(str, workdir))}", Reporter.to_terminal())
