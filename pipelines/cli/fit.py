"""The command for the extractor's weights: `gristmill extractor fit`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gristmill.data_pipeline.filters.fit_profiles import fit_profiles
from gristmill.data_pipeline.reference_texts import read_reference, write_profiles
from gristmill.data_pipeline.signals.language import BUNDLED, model_languages
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.cli.options import with_option_groups

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


# The command for language-specific filter profiles: `gristmill profiles fit`.

profiles_app = typer.Typer(no_args_is_help=True, help="Filter thresholds and stop words per language.")


@profiles_app.callback()
def profiles() -> None:
    """Keeps `fit` a subcommand: typer would drop the name of an only command."""


@dataclass(frozen=True)
class ReferenceFields:
    """Fields of the reference text's records."""

    text_field: Annotated[str, typer.Option(help="The text field.")] = "text"
    language_field: Annotated[str, typer.Option(help="The language field (ISO 639 or BCP 47).")] = "language"


@profiles_app.command("fit")
@with_option_groups
def fit_profiles_command(
    corpus: Annotated[
        list[Path], typer.Option(metavar="FILE", help="JSONL of clean text with language codes; must include English.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Output folder, one YAML file per language.")],
    fields: ReferenceFields,
    languages: Annotated[str, typer.Option(help="Only these languages, comma-separated; empty: all.")] = "",
    detectable: Annotated[
        bool, typer.Option("--detectable", help="Only languages that the bundled language model detects.")
    ] = False,
    source: Annotated[str, typer.Option(help="Description of the reference text.")] = "",
) -> None:
    """Derive profiles from reference text: stop words by frequency, thresholds at English's quantiles."""
    selected = [name for name in languages.split(",") if name]
    if detectable:
        selected = [name for name in model_languages(BUNDLED) if not selected or name in selected]
    texts, mislabelled = read_reference(corpus, fields.text_field, fields.language_field, selected)
    origin = source or ", ".join(path.name for path in corpus)
    profiles = fit_profiles(texts, origin)
    write_profiles(
        profiles, output, "Written by `gristmill profiles fit`; numbers and words are derived from `source`."
    )
    print(
        f"{output}: {len(profiles)} profiles from {sum(map(len, texts.values()))} documents in {len(texts)} languages"
    )
    for language, documents in sorted(mislabelled.items()):
        print(
            f"left out: {documents} labelled {language}, which another text of that label shows to be another language"
        )
