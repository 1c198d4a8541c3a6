"""The commands for indexed data and tokenizers: `gristmill data ...` and `gristmill tokenizer compare`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gristmill.data_pipeline.indexed import packing_report
from gristmill.data_pipeline.indexed.inspect import inspect, lines
from gristmill.data_pipeline.indexed.merge import append, cut_out, merge
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.console import print_block
from gristmill.pipelines.proxy_model_config import ProxyConfig
from gristmill.pipelines.tokenizer_comparison import (
    GROUP_METRICS,
    TokenizerComparison,
    compare_tokenizers,
    group_rows,
    read_texts,
    rows,
)
from gristmill.tokenizers.config import STRATEGIES
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
    _print(packing_report.rows(packing_report.packing_report(folder, split, sequence_length)))


def tokenizer_compare(
    texts: Annotated[Path, typer.Argument(metavar="TEXTS", help="A curate folder, or a .jsonl(.gz|.zst) file.")],
    strategies: Annotated[str, typer.Option(help="Strategies to train, comma-separated; empty for none.")] = ",".join(
        STRATEGIES
    ),
    tokenizer: Annotated[list[Path] | None, typer.Option(help="A further tokenizer folder to compare.")] = None,
    vocab_size: Annotated[int, typer.Option(min=300)] = 16_000,
    reference: Annotated[str, typer.Option(help="The reference language of parity.")] = "en",
    leave_out: Annotated[str, typer.Option(help="Languages or sources to exclude, comma-separated.")] = "",
    train_proxy: Annotated[
        bool, typer.Option("--train-proxy", help="Also train a small proxy model on each tokenizer.")
    ] = False,
    proxy_bytes: Annotated[
        int, typer.Option(min=10_000, help="Training text of the proxy model.")
    ] = ProxyConfig().text_bytes,
    output: Annotated[Path, typer.Option(help="Folder for the trained tokenizers.")] = Path("work/compare"),
) -> None:
    """Compare tokenizers: bytes per token, fertility, parity, unused pieces, round trips, bits per byte."""
    left_out = leave_out.split(",")
    chosen = [text for text in read_texts(texts) if text.group not in left_out]
    names = [name for name in strategies.split(",") if name]
    if not names and not tokenizer:
        raise RecipeError("nothing to compare; name strategies, or folders with --tokenizer")
    proxy = ProxyConfig(text_bytes=proxy_bytes) if train_proxy else None
    comparison = TokenizerComparison(output, names, tokenizer or [], vocab_size, reference, proxy)
    reports = compare_tokenizers(chosen, comparison, Reporter.to_terminal())
    _print(rows(reports))
    for metric in GROUP_METRICS:
        _print(group_rows(reports, metric))


def _print(table_rows: list[list[str]]) -> None:
    table = Table(*table_rows[0])
    for row in table_rows[1:]:
        table.add_row(*row)
    print_block(table)
