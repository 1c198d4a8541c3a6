"""The commands for indexed data: `gristmill data ...`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gristmill.data_pipeline.indexed import inspect as packing_report
from gristmill.data_pipeline.indexed.dataset import append, merge, slice_documents
from gristmill.data_pipeline.indexed.inspect import inspect, lines
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter, print_rows
from gristmill.pipelines.ablate.tokenizer_comparison import (
    GROUP_METRICS,
    TokenizerComparison,
    compare_tokenizers,
    group_rows,
    ranking_by_group,
    ranking_rows,
    read_texts,
    rows,
)
from gristmill.pipelines.cli.options import with_option_groups
from gristmill.pipelines.cli.stages import tokenizer
from gristmill.tokenizers.config import PRESETS, ProxyConfig
from gristmill.tokenizers.tokenizer import load_tokenizer
from gristmill.tokenizers.tokenizer_report import inspect_tokenizer

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
    slice_documents(prefix, output, first, last)


@data_app.command("packing")
def packing_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An index folder.")],
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per sample.")],
    split: Annotated[str, typer.Option()] = "train",
) -> None:
    """Compare the packings concat and best_fit: truncated documents and padding."""
    print_rows(packing_report.rows(packing_report.packing_report(folder, split, sequence_length)))


# The commands for tokenizers: `gristmill tokenizer RECIPE` and `gristmill tokenizer compare`.

STAGE_COMMAND = "stage"


class StageGroup(TyperGroup):
    """A stage's command with subcommands: `tokenizer compare ...`, and `tokenizer RECIPE` for everything else."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = args[:1] == ["--help"] or (args and args[0] in self.commands)
        return super().parse_args(ctx, args if known else [STAGE_COMMAND, *args])


tokenizer_app = typer.Typer(cls=StageGroup, help="Run only the stage tokenizer, inspect or compare tokenizers.")
tokenizer_app.command(STAGE_COMMAND)(tokenizer)


@dataclass(frozen=True)
class ComparedTokenizers:
    """The tokenizers that are trained for a comparison, and further ones."""

    presets: Annotated[str, typer.Option(help="Presets to train, byte_bpe, superwords; empty: none.")] = ",".join(
        PRESETS
    )
    tokenizer: Annotated[list[Path] | None, typer.Option(help="A further tokenizer folder to compare.")] = None
    vocab_size: Annotated[int, typer.Option(min=300)] = 16_000


@dataclass(frozen=True)
class ComparedGroups:
    """The languages or sources of a comparison."""

    reference: Annotated[str, typer.Option(help="The reference language of parity.")] = "en"
    leave_out: Annotated[str, typer.Option(help="Languages or sources to exclude, comma-separated.")] = ""


@dataclass(frozen=True)
class ProxyOptions:
    """The small models of a comparison."""

    train: Annotated[
        bool, typer.Option("--train", help="Train small models on each tokenizer and rank by their bits per byte.")
    ] = False
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Models per tokenizer.")] = ProxyConfig().seeds
    train_bytes: Annotated[int, typer.Option(min=10_000, help="Training text of each small model.")] = (
        ProxyConfig().text_bytes
    )


@tokenizer_app.command("inspect")
def tokenizer_inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With tokenizer.model or tokenizer.json.")],
) -> None:
    """Show a tokenizer's family, and which encoders give its ids: the first equal one encodes a corpus."""
    inspection = inspect_tokenizer(folder)
    print(f"{inspection.file}: {inspection.family}, {inspection.vocab_size:,} pieces")
    print(f"end of document: {inspection.end_of_document}; fingerprint {inspection.fingerprint}")
    print(f"encodes a corpus by: {inspection.encoder}")
    print_rows([("encoder", "ids"), *((check.encoder, check.outcome) for check in inspection.checks)])


@tokenizer_app.command("compare")
@with_option_groups
def tokenizer_compare(
    texts: Annotated[Path, typer.Argument(metavar="TEXTS", help="A curate folder, or a .jsonl(.gz|.zst) file.")],
    tokenizers: ComparedTokenizers,
    groups: ComparedGroups,
    proxy: ProxyOptions,
    output: Annotated[Path, typer.Option(help="Folder for the trained tokenizers.")] = Path("work/compare"),
) -> None:
    """Compare tokenizers: bytes per token, fertility, parity, unused pieces, round trips, bits per byte."""
    left_out = groups.leave_out.split(",")
    chosen = [text for text in read_texts(texts) if text.group not in left_out]
    names = [name for name in tokenizers.presets.split(",") if name]
    if not names and not tokenizers.tokenizer:
        raise RecipeError("nothing to compare; name presets, or folders with --tokenizer")
    comparison = TokenizerComparison(
        folder=output,
        presets=names,
        pretrained=tokenizers.tokenizer or [],
        vocab_size=tokenizers.vocab_size,
        reference=groups.reference,
        proxy=ProxyConfig(text_bytes=proxy.train_bytes, seeds=proxy.seeds) if proxy.train else None,
    )
    reports = compare_tokenizers(chosen, comparison, Reporter.to_terminal())
    print_rows(rows(reports))
    for metric in GROUP_METRICS:
        print_rows(group_rows(reports, metric))
    if proxy.train:
        print_rows(ranking_by_group(reports))
        print_rows(ranking_rows(reports))
