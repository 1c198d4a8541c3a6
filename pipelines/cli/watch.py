"""`gristmill watch`: a page in a browser on runs while they go on."""

from pathlib import Path
from typing import Annotated

import typer

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.cli.corpus import read_text
from gristmill.pipelines.recipes.recipe_file import load_recipe


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
