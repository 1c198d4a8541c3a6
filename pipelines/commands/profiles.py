"""The command for language-specific filter profiles: `gristmill profiles fit`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gristmill.data_pipeline.filters.fit_profiles import fit_profiles
from gristmill.data_pipeline.reference_texts import read_reference, write_profiles
from gristmill.data_pipeline.signals.language_model import BUNDLED, model_languages
from gristmill.pipelines.commands.option_groups import with_option_groups

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
def fit_command(
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
    texts = read_reference(corpus, fields.text_field, fields.language_field, selected)
    origin = source or ", ".join(path.name for path in corpus)
    profiles = fit_profiles(texts, origin)
    write_profiles(
        profiles, output, "Written by `gristmill profiles fit`; numbers and words are derived from `source`."
    )
    print(
        f"{output}: {len(profiles)} profiles from {sum(map(len, texts.values()))} documents in {len(texts)} languages"
    )
