"""The command for the extractor's weights: `gristmill extractor fit`."""

from pathlib import Path
from typing import Annotated

import typer

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter

extractor_app = typer.Typer(no_args_is_help=True, help="Weights of the HTML extractor `blocks`.")


@extractor_app.callback()
def extractor() -> None:
    """Keeps `fit` a subcommand: typer would drop the name of an only command."""


@extractor_app.command("fit")
def fit_command(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders of labelled pages.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The weights file to write (.npz).")],
) -> None:
    """Fit the weights of the extractor blocks on folders of labelled pages (docs/extraction.md)."""
    for folder in folders:
        if not folder.is_dir():
            raise RecipeError(f"{folder}: no such folder; give folders of labelled pages")
    try:
        from gristmill.data_pipeline.extraction.fit import fit_weights  # LightGBM, in the extra `extractor`
    except ModuleNotFoundError as error:
        if error.name != "lightgbm":
            raise
        raise RecipeError("fitting needs LightGBM: pip install 'gristmill[extractor]'") from None
    weights = fit_weights(folders, output, Reporter.to_terminal())
    described = weights.provenance
    print(f"{output}: {described['pages']} pages of {described['sites']} sites, {described['blocks']} blocks")
