"""The commands about filter profiles: `gristmill profiles fit`."""

from pathlib import Path
from typing import Annotated

import typer

from gristmill.data_pipeline.filters.fit_profiles import fit_profiles
from gristmill.data_pipeline.reference_texts import read_reference, write_profiles
from gristmill.data_pipeline.signals.language_model import BUNDLED, model_languages

profiles_app = typer.Typer(no_args_is_help=True, help="Filter thresholds and stop words by language.")


@profiles_app.callback()
def profiles() -> None:
    """Makes `fit` a command of its own, as more may come beside it."""


@profiles_app.command("fit")
def fit_command(
    corpus: Annotated[
        list[Path], typer.Option(metavar="FILE", help="JSONL of clean text with its language; English among it.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the profiles go, one YAML a language.")],
    text_field: Annotated[str, typer.Option(help="The field that holds the text.")] = "text",
    language_field: Annotated[str, typer.Option(help="The field that names its language (ISO 639 or BCP 47).")] = (
        "language"
    ),
    languages: Annotated[str, typer.Option(help="Only these, with commas; empty: all.")] = "",
    detectable: Annotated[
        bool, typer.Option("--detectable", help="Only those that the bundled language model can name.")
    ] = False,
    source: Annotated[str, typer.Option(help="What the profiles say of their reference text.")] = "",
) -> None:
    """Derive profiles from reference text: stop words by frequency, thresholds at English's quantiles."""
    wanted = [name for name in languages.split(",") if name]
    if detectable:
        wanted = [name for name in model_languages(BUNDLED) if not wanted or name in wanted]
    texts = read_reference(corpus, text_field, language_field, wanted)
    said = source or ", ".join(path.name for path in corpus)
    profiles = fit_profiles(texts, said)
    write_profiles(
        profiles, output, "Written by `gristmill profiles fit`; numbers and words are derived from `source`."
    )
    print(
        f"{len(profiles)} profiles in {output}, of {sum(map(len, texts.values()))} documents in {len(texts)} languages"
    )
