"""The command that looks into a corpus: `gristmill why`."""

from pathlib import Path
from typing import Annotated

import typer

from gristmill.data_pipeline.explain import why as life_of


def why(
    doc_id: Annotated[str, typer.Argument(metavar="DOC_ID", help="32 hex digits, as in the column doc_id.")],
    corpus: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the stage curate, or the work folder.")],
) -> None:
    """The life of one document, step by step, with values and thresholds."""
    for event in life_of(doc_id, corpus):
        print(f"{event.step}: {event.outcome}")
        for line in event.lines:
            print(f"    {line}")
