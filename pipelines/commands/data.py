"""The commands for indexed data: `gristmill data ...`."""

from pathlib import Path
from typing import Annotated

import typer

from gristmill.data_pipeline.indexed import packing_report
from gristmill.data_pipeline.indexed.inspect import inspect, lines
from gristmill.data_pipeline.indexed.merge import append, cut_out, merge
from gristmill.pipelines.console import print_rows
from gristmill.tokenizers.tokenizer import load_tokenizer

data_app = typer.Typer(no_args_is_help=True, help="Inspect, merge, append and slice indexed datasets.")

Prefix = Annotated[Path, typer.Argument(metavar="PREFIX", help="A dataset's path without .bin or .idx.")]


@data_app.command("inspect")
def inspect_command(
    prefix: Prefix,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer folder, to show documents as text.")] = None,
    documents: Annotated[int, typer.Option(min=0, help="Number of documents to show.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to show of each document.")] = 64,
) -> None:
    """Verify the files; show counts, dtype, a length histogram and the first documents."""
    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    decode, vocab_size = (loaded.decode, loaded.vocab_size) if loaded is not None else (None, None)
    for line in lines(inspect(prefix, decode, documents, tokens, vocab_size)):
        print(line)


@data_app.command("merge")
def merge_command(
    parts: Annotated[list[Path], typer.Argument(metavar="PREFIX...", help="The datasets, in their order.")],
    output: Annotated[Path, typer.Option(help="The new dataset's prefix.")],
) -> None:
    """Concatenate datasets."""
    merge(parts, output)


@data_app.command("append")
def append_command(prefix: Prefix, addition: Annotated[Path, typer.Argument(metavar="ADDITION")]) -> None:
    """Append the documents of ADDITION to the dataset PREFIX."""
    append(prefix, addition)


@data_app.command("slice")
def slice_command(
    prefix: Prefix,
    output: Annotated[Path, typer.Option(help="The new dataset's prefix.")],
    first: Annotated[int, typer.Option(help="The first document, from 0.")],
    last: Annotated[int, typer.Option(help="The end of the range, exclusive.")],
) -> None:
    """Write a range of documents as a new dataset."""
    cut_out(prefix, output, first, last)


@data_app.command("packing")
def packing_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An index folder.")],
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per sample.")],
    split: Annotated[str, typer.Option()] = "train",
) -> None:
    """Compare the packings concat and best_fit: truncated documents and padding."""
    print_rows(packing_report.rows(packing_report.packing_report(folder, split, sequence_length)))
