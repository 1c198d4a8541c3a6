"""The commands that look into a corpus or into indexed data: `gristmill why` and `gristmill inspect`."""

from pathlib import Path
from typing import Annotated

import typer

from gristmill.data_pipeline.explain import why as life_of
from gristmill.data_pipeline.indexed.inspect import inspect as look_into
from gristmill.data_pipeline.indexed.inspect import lines
from gristmill.tokenizers.tokenizer import load_tokenizer


def why(
    doc_id: Annotated[str, typer.Argument(metavar="DOC_ID", help="32 hex digits, as in the column doc_id.")],
    corpus: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the stage curate, or the work folder.")],
) -> None:
    """The life of one document, step by step, with values and thresholds."""
    for event in life_of(doc_id, corpus):
        print(f"{event.step}: {event.outcome}")
        for line in event.lines:
            print(f"    {line}")


def inspect(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="PREFIX.bin and PREFIX.idx")],
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer's folder: shows text in place of ids.")] = None,
) -> None:
    """What indexed files hold: counts, dtype, a histogram of lengths, the first documents."""
    decode = load_tokenizer(tokenizer).decode if tokenizer else None
    for line in lines(look_into(prefix, decode)):
        print(line)
